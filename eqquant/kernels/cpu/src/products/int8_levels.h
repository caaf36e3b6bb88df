// Levels as unsigned bytes, which are multiplied by int8.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "decode/levels.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// True if levels are integers of int8 times the common divisor of levels.
inline bool has_int8_levels(const Product& p) { return p.bits == 8 || largest_level(p) <= 127 * p.level_unit; }

// A level is `unit` times the difference of its byte and `zero`. The unit is the common divisor of the levels, or the
// largest level over 127. Levels of 8-bit codes are the codes: they have no values here.
struct UnsignedLevels {
  alignas(16) uint8_t values[16] = {};
  float unit = 1;
  int zero, largest;  // The largest byte.
  bool are_codes;     // True if the byte of each code is the code, so that no lookup is needed.

  explicit UnsignedLevels(const Product& p) {
    if (p.bits == 8) {
      zero = p.largest_integer(), largest = 2 * zero - 1;
      are_codes = false;
      return;
    }
    unit = has_int8_levels(p) ? p.level_unit : largest_level(p) / 127;
    const float per_unit = unit > 0 && std::isfinite(1 / unit) ? 1 / unit : 0;
    int whole[16];
    for (int i = 0; i < 16; i++) whole[i] = static_cast<int>(std::lrint(p.levels[i] * per_unit));
    zero = std::max(0, -*std::min_element(whole, whole + 16));
    largest = *std::max_element(whole, whole + 16) + zero;
    are_codes = true;
    for (int i = 0; i < 16; i++) {
      values[i] = static_cast<uint8_t>(whole[i] + zero);
      are_codes &= values[i] == i % (1 << p.bits);
    }
  }
};

EQQUANT_END
