// The levels of codes, without scales.
#pragma once

#include <algorithm>
#include <cmath>

#include "runtime/product.h"

namespace eqquant {

// Returns the largest magnitude. Floats with four exponent bits are decoded too small by 2^8.
inline float largest_level(const Product& p) {
  if (p.exponent) return p.exponent == 4 ? 448 / 256.0f : 57344;
  if (p.bits == 8) return static_cast<float>(p.largest_integer());
  float most = 0;
  for (int i = 0; i < 16; i++) most = std::max(most, std::fabs(p.levels[i]));
  return most;
}

// The power of two by which integer levels of at most `largest` are multiplied, so that they are at most 128.
inline int spare_bits(float largest) { return largest > 64 ? 0 : largest > 32 ? 1 : largest > 16 ? 2 : 3; }

// True if int8 holds each row of the weight exactly, times its scale.
inline bool is_exact_int8(const Product& p) {
  if (p.blocks > 1 || p.exponent) return false;
  return p.bits == 8 || std::all_of(p.levels, p.levels + 16, [](float level) {
           return level >= -128 && level <= 127 && level == std::rint(level);
         });
}

}  // namespace eqquant
