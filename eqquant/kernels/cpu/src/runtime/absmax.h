// Rows of the activation, their largest magnitude, its check, and the unit in which floats are rounded to integers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Compilers turn the loop into vector instructions. Compares bits: their order equals the order of magnitudes, and NaN
// is above infinity.
inline float absmax_of(const float* x, int64_t size) {
  int32_t most = 0;
  for (int64_t i = 0; i < size; i++) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  float absmax;
  std::memcpy(&absmax, &most, sizeof absmax);
  return absmax;
}

// Returns the largest magnitude of a row of the activation. If kernels are inaccurate for rows of this magnitude, sets
// the flag of the product (range.h). Zeros, infinity and NaN are usual.
inline float check_row(const Product& p, const float* row) {
  const float absmax = absmax_of(row, p.contracted());
  uint32_t bits;
  std::memcpy(&bits, &absmax, sizeof bits);
  if (is_out_of_range(bits)) p.unusual->store(true, std::memory_order_relaxed);
  return absmax;
}

// The unit of values up to `absmax` that are rounded to integers up to `largest`, and its reciprocal. The unit is NaN
// if `absmax` is not finite. Both are zero if the reciprocal overflows.
struct Units {
  float per_unit, unit;

  Units(float absmax, float largest) {
    per_unit = largest / absmax;
    const bool fits = std::isfinite(per_unit);
    if (!fits) per_unit = 0;
    unit = !std::isfinite(absmax) ? NAN : fits ? absmax / largest : 0;
  }
};

// A float of up to 2^22 plus this number is rounded to nearest. Compilers vectorise this, but not `rintf`.
constexpr float without_fraction = 3 << 22;

// Rows of the activation as floats: in place, or converted from bfloat16, or rounded to int8 with one unit for each
// row.
class Activation {
  const Product& p;
  const bool rounds;
  std::vector<float> buffer;

 public:
  Activation(const Product& p, bool rounds)
      : p(p), rounds(rounds), buffer(p.bfloat16_x || rounds ? p.contracted() : 0) {}
  explicit Activation(const Product& p) : Activation(p, p.rounds_before()) {}

  const float* row(int64_t i) { return row(i, buffer.data()); }
  // Writes the row to `to` if it is not in place.
  const float* row(int64_t i, float* __restrict to) const {
    const int64_t size = p.contracted();
    const float* x = static_cast<const float*>(p.x) + i * size;
    if (p.bfloat16_x) from_bfloat16(p.x, i * size, size, to), x = to;
    if (!rounds) return x;
    const Units units(absmax_of(x, size), 127);
    for (int64_t k = 0; k < size; k++)
      to[k] = (x[k] * units.per_unit + without_fraction - without_fraction) * units.unit;
    return to;
  }
};

EQQUANT_END
