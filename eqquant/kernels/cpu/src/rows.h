// x @ w in float32, for any `Vector`: each row of the weight, times a number, is added to
// the result.

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
  constexpr int most = std::max(1, std::min(4, Vector::sums / planes));
  constexpr int vectors = std::max(1, std::min(4, Vector::sums / planes / most));
  constexpr int vectors_of_one = std::max(1, std::min(4, Vector::sums / planes));
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
