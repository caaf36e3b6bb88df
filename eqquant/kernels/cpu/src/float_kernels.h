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

// Where the scale comes in: once a row, once a block, or (for many rows of activations,
// of which each would need it) with each vector decoded.
enum class Scaling { row, block, vector };

template <int bits, int rows, int count, Scaling scaling>
struct Columns {
  using Floats = Vector::Floats;
  using Codes = typename Decoder<bits>::Codes;
  Vector::Levels levels;
  Floats sums[rows][count];
  Floats part[rows][count];

  template <int plane, class Size>
  EQQUANT_INLINE void multiply(const Codes* codes, const float* x, int64_t packed,
                               const Floats* scales, Size size) {
    Floats weight[rows];
    for (int r = 0; r < rows; r++) {
      weight[r] = Decoder<bits>::template decode<plane>(levels, codes[r]);
      if constexpr (scaling == Scaling::vector)
        weight[r] = Vector::multiply(weight[r], scales[r]);
    }
    auto& into = scaling == Scaling::block ? part : sums;
    for (int i = 0; i < count; i++) {
      const Floats some = floats_of(x + i * packed * (8 / bits) + plane * packed, size);
      for (int r = 0; r < rows; r++)
        into[r][i] = Vector::multiply_add(weight[r], some, into[r][i]);
    }
    if constexpr ((plane + 1) * bits < 8)
      multiply<plane + 1>(codes, x, packed, scales, size);
  }

  template <class Size>
  EQQUANT_INLINE void step(const Product& p, const uint8_t* from, const float* x,
                           const Floats* scales, Size size) {
    Codes codes[rows];
    for (int r = 0; r < rows; r++)
      codes[r] = Decoder<bits>::read(bytes_of(from + r * p.packed, size));
    multiply<0>(codes, x, p.packed, scales, size);
  }

  EQQUANT_INLINE void run(const Product& p, const float* x, const float* scales, int64_t row,
                          float* y) {
    const int64_t block = p.block_bytes(), whole = block / Vector::size * Vector::size;
    const uint8_t* codes = p.codes + row * p.packed;
    // The next rows: the hardware would have to find out at each row where it goes on.
    const uint8_t* next = codes + rows * p.packed;
    levels = Vector::levels(p.levels);
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < count; i++) sums[r][i] = part[r][i] = Vector::zero();
    for (int64_t b = 0; b < p.blocks; b++) {
      Floats scale[rows];
      if constexpr (scaling != Scaling::row)
        for (int r = 0; r < rows; r++) scale[r] = Vector::all(scales[r * p.blocks + b]);
      int64_t j = b * block;
      for (const int64_t end = j + whole; j < end; j += Vector::size) {
        if (j % 64 == 0)
          for (int r = 0; r < rows; r++) __builtin_prefetch(next + r * p.packed + j);
        step(p, codes + j, x + j, scale, Whole{});
      }
      if (whole < block)
        step(p, codes + j, x + j, scale, static_cast<int>(block - whole));
      if constexpr (scaling == Scaling::block)
        for (int r = 0; r < rows; r++)
          for (int i = 0; i < count; i++) {
            sums[r][i] = Vector::multiply_add(part[r][i], scale[r], sums[r][i]);
            part[r][i] = Vector::zero();
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
void columns_of_some(const Product& p, const float* x, const float* scales, int64_t row,
                     float* y) {
  if (p.blocks == 1)
    Columns<bits, rows, count, Scaling::row>().run(p, x, scales, row, y);
  else if constexpr (count == 1)
    Columns<bits, rows, count, Scaling::block>().run(p, x, scales, row, y);
  else
    Columns<bits, rows, count, Scaling::vector>().run(p, x, scales, row, y);
}

template <int bits, int rows>
void columns_of_all(const Product& p, const float* x, int64_t row) {
  const int64_t columns = p.columns();
  std::vector<float> buffer(p.bfloat16_scales ? rows * p.blocks : 0);
  const float* scales = scales_of(p, row, rows, buffer.data());
  int64_t m = 0;
  if constexpr (rows <= Vector::rows)
    for (; m + 4 <= p.m; m += 4)
      columns_of_some<bits, rows, 4>(p, x + m * columns, scales, row, p.y + m * p.rows);
  for (; m + 2 <= p.m; m += 2)
    columns_of_some<bits, rows, 2>(p, x + m * columns, scales, row, p.y + m * p.rows);
  for (; m < p.m; m++)
    columns_of_some<bits, rows, 1>(p, x + m * columns, scales, row, p.y + m * p.rows);
}

template <int bits>
void columns(const Product& p, const float* x, int64_t begin, int64_t end) {
  int64_t row = begin;
  // Four rows, that each load of the activation serves as many; fewer, where the sums
  // for four rows of the activation would not stay in registers.
  if (Vector::rows == 4 || p.m < 4)
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

inline int64_t columns_scratch(const Product& p) {
  return p.m * p.columns() * static_cast<int64_t>(sizeof(float));
}

// The activation in plane order.
inline void prepare_columns(const Product& p, char* scratch, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const float* from = p.x + i * p.columns();
    float* to = reinterpret_cast<float*>(scratch) + i * p.columns();
    for_each_run(p, 0, p.packed, [=](int64_t logical, int64_t planar, int64_t length) {
      std::memcpy(to + planar, from + logical, length * sizeof(float));
    });
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
