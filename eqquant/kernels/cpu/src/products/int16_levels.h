// Activations and levels as int16, whose products are summed in int32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "decode/levels.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// The largest value is a multiple of 127, so that activations that were rounded to int8 stay exact.
constexpr int largest_int16 = 127 * 258, largest_int15 = 16383;

// Levels as integers with a unit, and the largest magnitude. The table contains the 16 levels
// twice, because a lookup with AVX-512 reads five bits.
struct Int16Levels {
  alignas(64) int16_t values[32];
  float unit;
  int largest;
};

inline Int16Levels levels_of(const Product& p) {
  if (p.bits == 8) return {{}, 1, p.largest_integer()};
  const float most = largest_level(p);
  Int16Levels out{{}, p.level_unit > 0 ? p.level_unit : most / largest_int15, 1};
  if (!(out.unit > 0) || !std::isfinite(1 / out.unit)) return out;  // All levels are zero.
  for (int i = 0; i < 32; i++) {
    out.values[i] = static_cast<int16_t>(std::lrint(p.levels[i % 16] / out.unit));
    out.largest = std::max(out.largest, std::abs(out.values[i]));
  }
  return out;
}

// A sum of products of two lanes is at most the product of their norms (Cauchy-Schwarz). This is the largest norm
// of both, if they are equal. Its square fits into int32.
constexpr float largest_norm = 46340;

// Returns the factor for integers with the norm `norm`, after which the norm is at most `most`, even after rounding.
inline float shrunk(float norm, float most) { return norm > most ? (most - 4) / norm * (1 - 1e-6f) : 1; }

// Rounds a row of the activation to int16, so that the norm of each lane is at most `most`. `round(factor)` rounds
// the row times a factor, and `norm()` returns the largest norm of a lane. Returns the unit.
template <class Round, class Norm>
float round_to_int16(float absmax, float most, const Round& round, const Norm& norm) {
  float per_unit = largest_int16 / absmax;
  if (!std::isfinite(per_unit)) per_unit = 0;
  round(per_unit);
  const float smaller = shrunk(norm(), most);
  if (smaller < 1) round(per_unit *= smaller);
  return !std::isfinite(absmax) ? NAN : per_unit > 0 ? 1 / per_unit : 0;
}

// Scratch contains the int16 rows of the activation, `size` values each, and then the unit of each row.
inline int16_t* int16_in(char* scratch) { return reinterpret_cast<int16_t*>(scratch); }
inline float* units_in(const Product& p, int64_t size, char* scratch) {
  return reinterpret_cast<float*>(int16_in(scratch) + p.m * size);
}
inline int64_t scratch_of(const Product& p, int64_t size) {
  return p.m * (size * static_cast<int64_t>(sizeof(int16_t)) + sizeof(float));
}

EQQUANT_END
