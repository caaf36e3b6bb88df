// Codes with a history: a level depends on a code and on the codes before it in its block.
#pragma once

#include <cstdint>

#include "runtime/product.h"

namespace eqquant {

// The bits of a state: a code, and below it the codes before it.
constexpr int state_bits = 12;

// A table of levels whose index is linear in the bits of a state: bit i of the index is the parity of the bits that
// mask i selects. The second half of the levels is the negative of the first half in reverse order.
struct LinearTable {
  static constexpr int most_levels = 128, most_masks = 8, numbers = most_levels + most_masks;
  alignas(64) uint8_t levels[most_levels];  // int8
  uint32_t masks[most_masks];               // 0 beyond the bits of an index.

  LinearTable() = default;
  // Takes the levels and then the masks as floats.
  explicit LinearTable(const float* from) {
    for (int i = 0; i < most_levels; i++) levels[i] = static_cast<uint8_t>(static_cast<int8_t>(from[i]));
    for (int i = 0; i < most_masks; i++) masks[i] = static_cast<uint32_t>(from[most_levels + i]);
  }
};

// Returns the function that decodes blocks of `p.run` codes to int8 levels, for kernels that need an instruction set.
// Consecutive codes share a byte, the first in its lowest bits. For 3 bits, a block has two parts: the low bits of all
// codes; and the high bits of four codes as the even bits of a byte, whose odd bits are for the second half of the
// block.
StatesUnpacker* states_unpacker(int instructions);

}  // namespace eqquant
