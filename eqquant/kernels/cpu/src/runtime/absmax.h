// The largest magnitude of floats, its check, and the unit in which floats are rounded to integers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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

EQQUANT_END
