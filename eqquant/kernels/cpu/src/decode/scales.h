// Scales as floats. Routines receive them in this way, so no routine depends on their type.
#pragma once

#include <cstdint>

#include "runtime/product.h"

namespace eqquant {

// Decodes the scales of blocks `begin` to `begin + count` of a row.
void decode_scales(const Product& p, int64_t row, int64_t begin, int64_t count, float* to);

// Decodes the offsets of these blocks, including the multiple of the scales.
void decode_offsets(const Product& p, int64_t row, int64_t begin, int64_t count, float* to);

// Returns the scales of `rows` rows: in place if they are floats, or decoded into a buffer of
// `p.scale_buffer(rows)` floats.
const float* scales_of(const Product& p, int64_t row, int64_t rows, float* buffer);

}  // namespace eqquant
