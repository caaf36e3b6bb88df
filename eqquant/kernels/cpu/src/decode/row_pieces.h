// Parts of the rows of a weight, for x @ w: unpacked, if their codes are packed more densely than kernels read.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/unpack.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// The number of rows that are read at once.
constexpr int rows_at_once = 32;

// The codes of some rows from byte `begin` on: in place, or unpacked.
struct Pieces {
  const Product& p;
  int64_t begin, first, groups, row_bytes;
  std::vector<uint8_t> unpacked;

  // The unpacked part consists of whole groups.
  Pieces(const Product& p, int64_t begin, int64_t end, int at_once = rows_at_once)
      : p(p),
        begin(begin),
        first(begin / p.run),
        groups((end + p.run - 1) / p.run - first),
        row_bytes(p.is_unpacked() ? groups * p.run : p.packed),
        unpacked(p.is_unpacked() ? at_once * row_bytes : 0) {}

  const uint8_t* of(int64_t row, int rows) {
    if (!p.is_unpacked()) return p.codes + row * p.packed + begin;
    for (int r = 0; r < rows; r++)
      unpack(p, p.stored(row + r) + first * p.run * p.stored_bits / p.bits, groups,
             unpacked.data() + r * row_bytes);
    return unpacked.data() + begin - first * p.run;
  }
};

EQQUANT_END
