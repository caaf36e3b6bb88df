// Products in float32, for any `Vector`. Included into a namespace, and under a target.
//
// A vector of codes is decoded in registers, by a table lookup, and multiplied at once
// with as many rows of the activation as there are registers for.

// What is read of some bytes of a row, and what that stands for in one plane.
template <int bits>
struct Decoder {
  using Codes = Vector::Codes;
  static EQQUANT_INLINE Codes read(__m128i bytes) { return Vector::codes(bytes); }
  template <int plane>
  static EQQUANT_INLINE Vector::Floats decode(Vector::Levels levels, Codes codes) {
    return Vector::template decode<bits, plane>(levels, codes);
  }
};

template <>
struct Decoder<8> {
  using Codes = Vector::Floats;
  static EQQUANT_INLINE Codes read(__m128i bytes) { return Vector::integers(bytes); }
  template <int>
  static EQQUANT_INLINE Vector::Floats decode(Vector::Levels, Codes codes) {
    return codes;
  }
};

// Whether `count` is that of a whole vector, known to the compiler, or not.
struct Whole {
  constexpr operator int() const { return Vector::size; }
};
EQQUANT_INLINE __m128i bytes_of(const uint8_t* p, Whole) { return Vector::bytes(p); }
EQQUANT_INLINE __m128i bytes_of(const uint8_t* p, int count) {
  return Vector::bytes(p, count);
}
EQQUANT_INLINE Vector::Floats floats_of(const float* p, Whole) { return Vector::load(p); }
EQQUANT_INLINE Vector::Floats floats_of(const float* p, int count) {
  return Vector::load(p, count);
}
EQQUANT_INLINE void write(float* p, Vector::Floats x, Whole) { Vector::store(p, x); }
EQQUANT_INLINE void write(float* p, Vector::Floats x, int count) {
  Vector::store(p, x, count);
}

//
// x @ w.T: each entry of the result is a sum along a row of the weight
//

// Rows of the activation are taken in groups. Scratch has each group in the order in which
// it is read: (block, vector of its bytes, plane, row, value), filled up with zeros.
struct Group {
  int64_t first;
  int count;
};

constexpr int most_at_once = 4;

// That of row `i`: fours as long as there are any, then two, then one.
inline Group group_at(int64_t i, int64_t m) {
  for (int count = most_at_once; count > 1; count /= 2) {
    const int64_t end = m / count * count;
    if (i < end) return {i / count * count, count};
  }
  return {i, 1};
}

inline int64_t vectors_of_block(const Product& p) {
  return (p.block_bytes() + Vector::size - 1) / Vector::size;
}
inline int64_t group_stride(const Product& p) {  // for each of its rows
  return p.blocks * vectors_of_block(p) * p.planes() * Vector::size;
}

inline int64_t columns_scratch(const Product& p) {
  return p.m * group_stride(p) * static_cast<int64_t>(sizeof(float));
}

inline void prepare_columns(const Product& p, char* scratch, int64_t begin, int64_t end) {
  constexpr int64_t size = Vector::size;
  const int64_t block = p.block_bytes();
  std::vector<float> planar(p.columns());
  for (int64_t i = begin; i < end; i++) {
    const float* from = p.x + i * p.columns();
    for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t at, int64_t length) {
      std::memcpy(&planar[at], from + logical, length * sizeof(float));
    });
    const Group group = group_at(i, p.m);
    float* to = reinterpret_cast<float*>(scratch) + group.first * group_stride(p) +
                (i - group.first) * size;
    for (int64_t b = 0; b < p.blocks; b++)
      for (int64_t j = 0; j < block; j += size)
        for (int plane = 0; plane < p.planes(); plane++, to += group.count * size) {
          const int64_t some = std::min(size, block - j);
          std::memcpy(to, &planar[plane * p.packed + b * block + j], some * sizeof(float));
          std::fill(to + some, to + size, 0.0f);
        }
  }
}

// Whether a row has one scale, or each block of it. A block's is worked into the levels,
// once; only codes of 8 bits, which have no table, are multiplied with it one by one.
enum class Scaling { row, block };

template <int bits, int rows, int count, Scaling scaling>
struct Columns {
  using Floats = Vector::Floats;
  using Codes = typename Decoder<bits>::Codes;
  Vector::Levels levels[rows];
  Floats scale[rows];
  Floats sums[rows][count];

  template <int plane>
  EQQUANT_INLINE void multiply(const Codes* codes, const float* x) {
    Floats weight[rows];
    for (int r = 0; r < rows; r++) {
      weight[r] = Decoder<bits>::template decode<plane>(levels[r], codes[r]);
      if constexpr (scaling == Scaling::block && bits == 8)
        weight[r] = Vector::multiply(weight[r], scale[r]);
    }
    for (int i = 0; i < count; i++) {
      const Floats some = Vector::load(x + (plane * count + i) * Vector::size);
      for (int r = 0; r < rows; r++)
        sums[r][i] = Vector::multiply_add(weight[r], some, sums[r][i]);
    }
    if constexpr ((plane + 1) * bits < 8) multiply<plane + 1>(codes, x);
  }

  template <class Size>
  EQQUANT_INLINE void step(const Product& p, const uint8_t* from, const float* x, Size size) {
    Codes codes[rows];
    for (int r = 0; r < rows; r++)
      codes[r] = Decoder<bits>::read(bytes_of(from + r * p.packed, size));
    multiply<0>(codes, x);
  }

  EQQUANT_INLINE void run(const Product& p, const float* x, const float* scales, int64_t row,
                          float* y) {
    constexpr int64_t values = 8 / bits * count * Vector::size;
    const int64_t block = p.block_bytes(), whole = block / Vector::size * Vector::size;
    const uint8_t* codes = p.codes + row * p.packed;
    // The next rows: the hardware would have to find out at each row where it goes on.
    const uint8_t* next = codes + rows * p.packed;
    const Vector::Levels plain = Vector::levels(p.levels);
    for (int r = 0; r < rows; r++) {
      levels[r] = plain;
      for (int i = 0; i < count; i++) sums[r][i] = Vector::zero();
    }
    for (int64_t b = 0; b < p.blocks; b++) {
      if constexpr (scaling == Scaling::block)
        for (int r = 0; r < rows; r++) {
          scale[r] = Vector::all(scales[r * p.blocks + b]);
          if constexpr (bits < 8) levels[r] = Vector::scaled(plain, scale[r]);
        }
      int64_t j = b * block;
      for (const int64_t end = j + whole; j < end; j += Vector::size, x += values) {
        if (j % 64 == 0)
          for (int r = 0; r < rows; r++) __builtin_prefetch(next + r * p.packed + j);
        step(p, codes + j, x, Whole{});
      }
      if (whole < block) {
        step(p, codes + j, x, static_cast<int>(block - whole));
        x += values;
      }
    }
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < count; i++) {
        const float sum = Vector::sum(sums[r][i]);
        y[i * p.rows + row + r] = scaling == Scaling::row ? sum * scales[r] : sum;
      }
  }
};

template <int bits, int rows, int count>
void columns_of_group(const Product& p, const float* x, const float* scales, int64_t row,
                      float* y) {
  if constexpr (rows * count > Vector::registers)
    return;  // As `columns` sees to.
  else if (p.blocks == 1)
    Columns<bits, rows, count, Scaling::row>().run(p, x, scales, row, y);
  else
    Columns<bits, rows, count, Scaling::block>().run(p, x, scales, row, y);
}

template <int bits, int rows>
void columns_of_all(const Product& p, const float* x, int64_t row) {
  std::vector<float> buffer(p.bfloat16_scales ? rows * p.blocks : 0);
  const float* scales = scales_of(p, row, rows, buffer.data());
  for (int64_t m = 0; m < p.m;) {
    const int count = group_at(m, p.m).count;
    const float* from = x + m * group_stride(p);
    float* y = p.y + m * p.rows;
    switch (count) {
      case 4: columns_of_group<bits, rows, 4>(p, from, scales, row, y); break;
      case 2: columns_of_group<bits, rows, 2>(p, from, scales, row, y); break;
      default: columns_of_group<bits, rows, 1>(p, from, scales, row, y);
    }
    m += count;
  }
}

template <int bits>
void columns(const Product& p, const float* x, int64_t begin, int64_t end) {
  int64_t row = begin;
  // Four rows, that each load of the activation serves as many, if the sums for as many
  // rows of the activation fit.
  if (Vector::registers >= 4 * most_at_once || p.m < most_at_once)
    for (; row + 4 <= end; row += 4) columns_of_all<bits, 4>(p, x, row);
  for (; row + 2 <= end; row += 2) columns_of_all<bits, 2>(p, x, row);
  for (; row < end; row++) columns_of_all<bits, 1>(p, x, row);
}

inline void run_columns(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const float* x = reinterpret_cast<const float*>(scratch);
  switch (p.bits) {
    case 1: return columns<1>(p, x, begin, end);
    case 2: return columns<2>(p, x, begin, end);
    case 4: return columns<4>(p, x, begin, end);
    case 8: return columns<8>(p, x, begin, end);
  }
}

//
// x @ w: each row of the weight, times a number, is added to the result
//

// The rows that are added up before the result goes back to memory.
constexpr int rows_at_once = 16;

template <int bits, int vectors, int count>
struct Rows {
  using Floats = Vector::Floats;
  static constexpr int planes = 8 / bits;
  using Codes = typename Decoder<bits>::Codes;
  Floats sums[vectors][planes][count];

  template <int plane, class Size>
  EQQUANT_INLINE void move(float* out, int64_t ld, int64_t stride, int v, bool in, Size size) {
    for (int i = 0; i < count; i++) {
      float* at = out + i * ld + plane * stride + v * Vector::size;
      if (in)
        sums[v][plane][i] = floats_of(at, size);
      else
        write(at, sums[v][plane][i], size);
    }
    if constexpr (plane + 1 < planes) move<plane + 1>(out, ld, stride, v, in, size);
  }

  template <int plane>
  EQQUANT_INLINE void add(Vector::Levels levels, Codes codes, const Floats* x, int v) {
    const Floats weight = Decoder<bits>::template decode<plane>(levels, codes);
    for (int i = 0; i < count; i++)
      sums[v][plane][i] = Vector::multiply_add(weight, x[i], sums[v][plane][i]);
    if constexpr (plane + 1 < planes) add<plane + 1>(levels, codes, x, v);
  }

  // `out` is a piece of the result in plane order, `stride` from plane to plane.
  template <class Size>
  EQQUANT_INLINE void run(const Product& p, const float* x, const float* scales,
                          int64_t row, int rows, int64_t byte, float* out, int64_t ld,
                          int64_t stride, Size size) {
    const Vector::Levels levels = Vector::levels(p.levels);
    for (int v = 0; v < vectors; v++) move<0>(out, ld, stride, v, true, size);
    for (int r = 0; r < rows; r++) {
      Floats factor[count];
      for (int i = 0; i < count; i++)
        factor[i] = Vector::all(x[i * p.rows + row + r] * scales[r * p.blocks]);
      for (int v = 0; v < vectors; v++) {
        const uint8_t* codes = p.codes + (row + r) * p.packed + byte + v * Vector::size;
        add<0>(levels, Decoder<bits>::read(bytes_of(codes, size)), factor, v);
      }
    }
    for (int v = 0; v < vectors; v++) move<0>(out, ld, stride, v, false, size);
  }
};

template <int bits, int vectors, int count>
void rows_of_some(const Product& p, const float* x, const float* scales, int64_t row,
                  int rows, int64_t begin, int64_t end, float* out, int64_t ld,
                  int64_t stride) {
  constexpr int64_t wide = vectors * Vector::size;
  const int64_t block = p.block_bytes();
  for (int64_t j = begin; j < end;) {
    // Up to the end of the block, which has one scale.
    const int64_t b = j / block, stop = std::min(end, (b + 1) * block);
    for (; j + wide <= stop; j += wide)
      Rows<bits, vectors, count>().run(p, x, scales + b, row, rows, j, out + j - begin, ld,
                                       stride, Whole{});
    while (j < stop) {
      const int size = static_cast<int>(std::min<int64_t>(Vector::size, stop - j));
      Rows<bits, 1, count>().run(p, x, scales + b, row, rows, j, out + j - begin, ld, stride,
                                 size);
      j += size;
    }
  }
}

template <int bits>
void rows(const Product& p, int64_t begin, int64_t end) {
  constexpr int planes = 8 / bits;
  constexpr int most = std::max(1, std::min(4, Vector::registers / planes));
  constexpr int vectors = std::max(1, std::min(4, Vector::registers / planes / most));
  constexpr int vectors_of_one = std::max(1, std::min(4, Vector::registers / planes));
  const int64_t stride = end - begin, ld = planes * stride, columns = p.columns();
  std::vector<float> out(p.m * ld), buffer(p.bfloat16_scales ? rows_at_once * p.blocks : 0);
  for (int64_t row = 0; row < p.rows; row += rows_at_once) {
    const int some = static_cast<int>(std::min<int64_t>(rows_at_once, p.rows - row));
    const float* scales = scales_of(p, row, some, buffer.data());
    int64_t m = 0;
    for (; m + most <= p.m; m += most)
      rows_of_some<bits, vectors, most>(p, p.x + m * p.rows, scales, row, some, begin, end,
                                        out.data() + m * ld, ld, stride);
    for (; m < p.m; m++)
      rows_of_some<bits, vectors_of_one, 1>(p, p.x + m * p.rows, scales, row, some, begin,
                                            end, out.data() + m * ld, ld, stride);
  }
  for (int64_t i = 0; i < p.m; i++) {
    const float* from = out.data() + i * ld;
    float* to = p.y + i * columns;
    for_each_run(p, begin, end, [=, &p](int64_t logical, int64_t planar, int64_t length) {
      const int64_t plane = planar / p.packed, byte = planar % p.packed;
      std::memcpy(to + logical, from + plane * stride + byte - begin, length * sizeof(float));
    });
  }
}

inline void run_rows(const Product& p, const char*, int64_t begin, int64_t end) {
  switch (p.bits) {
    case 1: return rows<1>(p, begin, end);
    case 2: return rows<2>(p, begin, end);
    case 4: return rows<4>(p, begin, end);
    case 8: return rows<8>(p, begin, end);
  }
}

inline int64_t rows_scratch(const Product&) { return 0; }
inline void prepare_rows(const Product&, char*, int64_t, int64_t) {}
