// Parities of the bits that masks select.
#pragma once

#include <cstdint>

#include "runtime/target.h"

EQQUANT_BEGIN

// Bit i of the result is the parity of the bits of a byte that mask i selects.
inline uint8_t parities(const uint8_t* masks, int value) {
  int of = 0;
  for (int i = 0; i < 8; i++) of |= __builtin_parity(masks[i] & value) << i;
  return static_cast<uint8_t>(of);
}

EQQUANT_END
