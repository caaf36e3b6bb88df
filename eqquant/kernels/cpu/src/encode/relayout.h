// Moves the bits of blocks of bytes to another layout, independent of XLA.
#pragma once

#include <cstdint>

namespace eqquant {

// Shifts each of `count` consecutive bytes of a block by `shift` bits to the left (a negative shift is to the right),
// keeps the bits of `mask`, and flips the bits of the result that are set in them. The mask has no bits that the shift
// takes from another byte.
struct Move {
  int32_t from, to, count, shift, mask;
};

// Blocks of `from_bytes` bytes, and of `to_bytes` bytes in the result, which starts as `start`.
struct Layout {
  int64_t from_bytes, to_bytes;
  const uint8_t* start;
  const Move* moves;  // counts are powers of two up to 64
  int64_t num_moves;
};

// Returns whether all moves stay inside of a block, and masks inside of a byte.
bool is_valid(const Layout& layout);

void relayout(const Layout& layout, const uint8_t* from, int64_t blocks, uint8_t* to);

}  // namespace eqquant
