// Rows of the weight in tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/target.h"

EQQUANT_BEGIN

// The rows of the largest tile. Routines that use `by_tiles` require as many rows of the weight.
constexpr int64_t rows_of_tile = 8;

// Calls `use(row)` for tiles of `rows` rows of the weight, from `row` on. There must be at least as many. The last tile
// overlaps the one before it, because tiles of other sizes would add to the time of compilation.
template <int rows, class Use>
EQQUANT_INLINE void by_tiles(int64_t begin, int64_t end, const Use& use) {
  for (int64_t row = begin; row < end; row += rows) use(std::min(row, end - rows));
}

EQQUANT_END
