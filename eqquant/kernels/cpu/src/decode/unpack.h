// Codes of 3, 5 and 6 bits, and short blocks of 2 bits. Routines receive codes of 4 bits or int8: rows are unpacked
// into a cache right before use.
#pragma once

#include <cstdint>

#include "runtime/product.h"

namespace eqquant {

// Unpacks `groups` groups of codes to groups of `p.run` bytes. A group of `n` codes consists of two parts. The first
// has the low bits of each code: two in 4 planes (three-bit codes), or four in 2 planes. The second has the high
// bits: one in 8 planes, or two in 4 planes (six-bit codes). Codes of 5 and 6 bits are the integers `level + 16` and
// `level + 32`, and become the int8 levels. A group of 16 two-bit codes has 4 planes of 4 bytes.
void unpack(const Product& p, const uint8_t* from, int64_t groups, uint8_t* to);

// `routine.run`, for codes of any number of bits.
void run_units(const Routine& routine, const Product& p, const char* scratch, int64_t begin,
               int64_t end);

}  // namespace eqquant
