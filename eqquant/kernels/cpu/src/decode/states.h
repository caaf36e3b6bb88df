// Codes with a history: a level depends on a code and on the codes before it in its block.
#pragma once

#include <cstdint>

#include "runtime/product.h"

namespace eqquant {

// The bits of a state: a code, and below it the codes before it.
constexpr int state_bits = 12, num_states = 1 << state_bits;

// Decodes `groups` blocks of `p.run` codes to int8 levels. Consecutive codes share a byte, the first in its lowest
// bits. For 3 bits, a block has two parts: the low bits of all codes; and the high bits of four codes as the even
// bits of a byte, whose odd bits are for the second half of the block.
void unpack_states(const Product& p, const uint8_t* from, int64_t groups, uint8_t* to);

}  // namespace eqquant
