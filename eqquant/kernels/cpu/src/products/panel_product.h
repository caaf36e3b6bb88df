// A panel: decoded rows of the weight with their scales, in the second-level cache, multiplied by the
// whole activation, which needs no rearrangement. For any `Vector`.
#pragma once

#include <cstdint>
#include <memory>

#include "products/float_activation.h"
#include "runtime/absmax.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// How many floats are decoded at once.
constexpr int64_t panel_floats = 1 << 16;
// Vectors of results that are computed at once.
constexpr int side_by_side = 4;

// The buffer of a panel, aligned to cache lines. It is not cleared, because clearing takes longer than a
// small product.
struct Space {
  struct alignas(64) Line {
    float values[16];
  };
  std::unique_ptr<Line[]> lines;

  explicit Space(int64_t floats) : lines(new Line[(floats + 15) / 16]) {}
  float* data() { return lines[0].values; }
  const float* data() const { return lines[0].values; }
};

// The activation as floats: in place, or converted to scratch.
inline bool is_plain(const Product& p) { return !p.bfloat16_x && !p.rounds_before(); }
inline int64_t plain_scratch(const Product& p) {
  return is_plain(p) ? 0 : p.m * p.contracted() * static_cast<int64_t>(sizeof(float));
}
inline void prepare_plain(const Product& p, char* scratch, int64_t begin, int64_t end) {
  if (is_plain(p)) return;
  const Activation x(p);
  for (int64_t i = begin; i < end; i++) x.row(i, reinterpret_cast<float*>(scratch) + i * p.contracted());
}
inline const float* plain_x(const Product& p, const char* scratch) {
  return static_cast<const float*>(is_plain(p) ? p.x : scratch);
}

// Reports rows out of range in the same way as rounding kernels.
inline void check_rows(const Product& p, int64_t begin, int64_t end) {
  Activation activation(p, false);
  for (int64_t i = begin; i < end; i++) check_row(p, activation.row(i));
}

// The arithmetic of a panel. Its element type provides:
//
// - `multiply_add(weight, x, sums)` on vectors, with 32 bits for each value of the result
// - `steps_of_sum`: the number of steps after which sums are added to the result, if limited
// - `add(result, sums)`
// - `scaled(result, i, v)`: the result of a row and a vector, times their scales
struct OfFloats {
  using Sums = Vector::Floats;
  static constexpr int64_t steps_of_sum = INT64_MAX;
  static EQQUANT_INLINE Sums zero() { return Vector::zero(); }
  static EQQUANT_INLINE Sums multiply_add(Vector::Floats weight, Vector::Floats x, Sums sums) {
    return Vector::multiply_add(weight, x, sums);
  }
  static EQQUANT_INLINE Vector::Floats scaled(Vector::Floats result, int, int) { return result; }
};

// Values in registers are passed as arguments. float_x_wt_gemv.h has the reason.
template <class Of, int vectors, int count>
EQQUANT_INLINE void multiply_steps(const float*& w, const float*& x, int64_t x_stride,
                                   const float* end, typename Of::Sums (&sums)[count][vectors]) {
  do {
    Vector::Floats weight[vectors];
    for (int v = 0; v < vectors; v++) weight[v] = Vector::load(w + v * Vector::size);
    for (int i = 0; i < count; i++) {
      const Vector::Floats factor = Vector::all(x[i * x_stride]);
      for (int v = 0; v < vectors; v++)
        sums[i][v] = Of::multiply_add(weight[v], factor, sums[i][v]);
    }
    w += side_by_side * Vector::size;
  } while (++x < end);
}

// Multiplies rows of the activation from `x` on by a panel with `side_by_side` vectors for each of `steps`
// values. `y` points to the start of each result vector.
template <int vectors, int count, class Of>
void multiply_panel(const Of& of, const float* w, const float* x, int64_t x_stride,
                    int64_t steps, float* const* y, int64_t y_stride, bool adds) {
  using Floats = Vector::Floats;
  Floats results[count][vectors];
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++) {
      __builtin_prefetch(y[v] + i * y_stride, 1);
      results[i][v] = Vector::zero();
    }
  const float* const end = x + steps;
  if constexpr (Of::steps_of_sum == INT64_MAX) {
    multiply_steps<Of>(w, x, x_stride, end, results);
  } else {
    do {
      typename Of::Sums sums[count][vectors];
      for (auto& of_row : sums)
        for (auto& sum : of_row) sum = Of::zero();
      multiply_steps<Of>(w, x, x_stride, std::min(end, x + Of::steps_of_sum), sums);
      for (int i = 0; i < count; i++)
        for (int v = 0; v < vectors; v++) results[i][v] = Of::add(results[i][v], sums[i][v]);
    } while (x < end);
  }
  const Floats one = Vector::all(1);
  for (int i = 0; i < count; i++)
    for (int v = 0; v < vectors; v++) {
      float* const to = y[v] + i * y_stride;
      Floats result = of.scaled(results[i][v], i, v);
      if (adds) result = Vector::multiply_add(result, one, Vector::load(to));
      Vector::store(to, result);
    }
}

// The same with run-time `vectors` and `count`. Not inlined, so that it is compiled once instead of once per
// format.
template <int most_at_once, class Of>
__attribute__((noinline)) void multiply_panel(const Of& of, int vectors, int count,
                                              const float* w, const float* x, int64_t x_stride,
                                              int64_t steps, float* const* y, int64_t y_stride,
                                              bool adds) {
  with_constant<side_by_side>(vectors, [&](auto wide) {
    with_constant<most_at_once>(count, [&](auto high) {
      multiply_panel<wide, high>(of, w, x, x_stride, steps, y, y_stride, adds);
    });
  });
}

// Multiplies `count` rows of the activation by a panel of `rows` rows of the weight, at most `side_by_side` vectors.
inline void multiply_rows_of_panel(const float* w, const float* x, int64_t x_stride, int64_t steps, int rows,
                                   int count, float* y, int64_t y_stride, bool adds) {
  constexpr int size = Vector::size;
  const int vectors = (rows + size - 1) / size;
  const bool whole = rows == vectors * size;
  float edge[side_by_side * size * Vector::most_at_once];
  float* to[side_by_side];
  for (int v = 0; v < vectors; v++) to[v] = (whole ? y : edge) + v * size;
  multiply_panel<Vector::most_at_once>(OfFloats(), vectors, count, w, x, x_stride, steps, to,
                                       whole ? y_stride : vectors * size, whole && adds);
  for (int i = 0; i < count && !whole; i++)
    for (int r = 0; r < rows; r++)
      y[i * y_stride + r] = edge[i * vectors * size + r] + (adds ? y[i * y_stride + r] : 0);
}

EQQUANT_END
