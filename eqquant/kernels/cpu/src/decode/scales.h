// Scales as floats. Routines receive them in this way, so no routine depends on their type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/product.h"

namespace eqquant {

// Decodes the scales of blocks `begin` to `begin + count` of a row.
void decode_scales(const Product& p, int64_t row, int64_t begin, int64_t count, float* to);

// Decodes the offsets of these blocks, including the multiple of the scales.
void decode_offsets(const Product& p, int64_t row, int64_t begin, int64_t count, float* to);

// Returns the scales of `rows` rows with `blocks` blocks: in place if they are floats, or decoded into a buffer of
// `rows * blocks` floats.
const float* scales_of(const Scales& scales, int64_t blocks, int64_t row, int64_t rows, float* buffer);
inline const float* scales_of(const Product& p, int64_t row, int64_t rows, float* buffer) {
  return scales_of(p.scales, p.blocks, row, rows, buffer);
}

// The scales, or offsets, of rows that are read in order, up to row `end`. Those of short rows are decoded for several
// steps at once, because a call takes longer than some scales.
class ScalesInOrder {
  static constexpr int64_t most_rows = 8, at_once = 512;
  const Scales& from;
  const int64_t blocks, end, step;
  int64_t first = 0, stop = 0;
  std::vector<float> buffer;
  const float* scales = nullptr;

 public:
  ScalesInOrder(const Scales& from, int64_t blocks, int64_t end)
      : from(from),
        blocks(blocks),
        end(end),
        step(std::max(most_rows, at_once / blocks / most_rows * most_rows)) {}
  // Returns the scales of at most `most_rows` rows.
  const float* of(int64_t row, int64_t rows) {
    if (row + rows > stop) {
      first = row;
      buffer.resize(from.are_floats() ? 0 : step * blocks);
      stop = std::min(end, row + step);
      scales = scales_of(from, blocks, first, stop - first, buffer.data());
    }
    return scales + (row - first) * blocks;
  }
};

}  // namespace eqquant
