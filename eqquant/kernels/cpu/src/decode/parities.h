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

// The masks as a matrix of bits, as instructions that multiply it by bytes expect it: the last mask is first.
inline int64_t bit_matrix(const uint8_t* masks) {
  uint64_t rows = 0;
  for (int i = 0; i < 8; i++) rows |= uint64_t{masks[i]} << 8 * (7 - i);
  return static_cast<int64_t>(rows);
}

EQQUANT_END
