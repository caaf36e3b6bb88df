// Offsets as floats, for whole rows.
#pragma once

#include <cstdint>

#include "runtime/product.h"

namespace eqquant {

// Decodes the offsets of whole rows. `to` has space for twice as many floats, because scales are decoded behind them.
void decode_offsets_of_rows(const Product& p, int64_t row, int64_t rows, float* to);

}  // namespace eqquant
