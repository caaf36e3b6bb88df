// Rows of the weight in groups of four.
#pragma once

#include <cstdint>
#include <type_traits>

#include "runtime/target.h"

EQQUANT_BEGIN

// Calls `use(rows, row)` for groups of four rows of the weight, and for each remaining row.
template <class Use>
void by_fours(int64_t begin, int64_t end, const Use& use) {
  for (; begin + 4 <= end; begin += 4) use(std::integral_constant<int, 4>(), begin);
  for (; begin < end; begin++) use(std::integral_constant<int, 1>(), begin);
}

// The same, with groups of `most` rows first: 4 or 8.
template <int most, class Use>
void by_rows(int64_t begin, int64_t end, const Use& use) {
  if constexpr (most > 4)
    for (; begin + most <= end; begin += most) use(std::integral_constant<int, most>(), begin);
  by_fours(begin, end, use);
}

EQQUANT_END
