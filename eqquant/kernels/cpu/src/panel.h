// Part of a weight that has been decoded, with its scales, into a second-level cache: by all of
// the activation, which is read as it is. For any `Vector`.

// How many floats are decoded at once.
constexpr int64_t panel_floats = 1 << 16;
// Vectors of results that are computed at once.
constexpr int side_by_side = 4;

// Space for a panel, where no vector is in two lines of a cache. To fill it with zeros would
// take longer than a small product.
struct Space {
  struct alignas(64) Line {
    float values[16];
  };
  std::unique_ptr<Line[]> lines;

  explicit Space(int64_t floats) : lines(new Line[(floats + 15) / 16]) {}
  float* data() { return lines[0].values; }
  const float* data() const { return lines[0].values; }
};

// The activation as floats: as it is, or else converted to scratch.
inline int64_t plain_scratch(const Product& p) {
  return p.bfloat16_x ? p.m * p.contracted() * static_cast<int64_t>(sizeof(float)) : 0;
}
inline void prepare_plain(const Product& p, char* scratch, int64_t begin, int64_t end) {
  if (!p.bfloat16_x) return;
  const int64_t size = p.contracted();
  from_bfloat16(p.x, begin * size, (end - begin) * size,
                reinterpret_cast<float*>(scratch) + begin * size);
}
inline const float* plain_x(const Product& p, const char* scratch) {
  return static_cast<const float*>(p.bfloat16_x ? scratch : p.x);
}

// Some rows of the activation, `x` and those after it, by a panel, which has `side_by_side`
// vectors for each of `rows` values of these; `y` is where each vector of the result begins.
template <int vectors, int count>
void multiply_panel(const float* w, const float* x, int64_t x_stride, int64_t rows,
                    float* const* y, int64_t y_stride, bool adds) {
  using Floats = Vector::Floats;
  constexpr int64_t size = Vector::size;
  Floats sums[count][vectors];
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++) {
      __builtin_prefetch(y[v] + i * y_stride, 1);
      sums[i][v] = Vector::zero();
    }
  const float* const end = x + rows;
  do {
    Floats weight[vectors];
    for (int v = 0; v < vectors; v++) weight[v] = Vector::load(w + v * size);
    for (int i = 0; i < count; i++) {
      const Floats factor = Vector::all(x[i * x_stride]);
      for (int v = 0; v < vectors; v++)
        sums[i][v] = Vector::multiply_add(weight[v], factor, sums[i][v]);
    }
    w += side_by_side * size;
  } while (++x < end);
  const Floats one = Vector::all(1);
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++) {
      float* const to = y[v] + i * y_stride;
      if (adds) sums[i][v] = Vector::multiply_add(sums[i][v], one, Vector::load(to));
      Vector::store(to, sums[i][v]);
    }
}

// The same, for `vectors` and `count` that are known only at run time. Not inlined, so that it is
// compiled once and not for every format.
__attribute__((noinline)) inline void multiply_panel(int vectors, int count, const float* w,
                                                     const float* x, int64_t x_stride,
                                                     int64_t rows, float* const* y,
                                                     int64_t y_stride, bool adds) {
  with_constant<side_by_side>(vectors, [&](auto wide) {
    with_constant<Vector::most_at_once>(count, [&](auto high) {
      multiply_panel<wide, high>(w, x, x_stride, rows, y, y_stride, adds);
    });
  });
}
