// Parities of the bits that masks select.
#pragma once

#include <cstdint>

#include "runtime/target.h"

EQQUANT_BEGIN

// Bit i of `of[value]` is the parity of the bits of a number of four bits that mask i, from bit `shift` on, selects.
inline void find_parities(const uint8_t* masks, int shift, uint8_t (&of)[16]) {
  for (int value = 0; value < 16; value++) {
    of[value] = 0;
    for (int i = 0; i < 8; i++)
      of[value] = static_cast<uint8_t>(of[value] | __builtin_parity(masks[i] >> shift & value) << i);
  }
}

EQQUANT_END
