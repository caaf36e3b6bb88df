// Multiplies decoded rows of the weight by `count` rows of int8 digits, for any `Integers`. Totals are
// (digits, row).
template <int rows, int count>
void multiply_decoded(const uint8_t* w, int64_t length, const int8_t* x, int64_t stride,
                      uint32_t* totals) {
  using Bytes = Integers::Bytes;
  Integers::Sums sums[count][rows];
  for (int i = 0; i < count; i++)
    for (int r = 0; r < rows; r++) sums[i][r] = Integers::zero();
  int64_t j = 0;
  do {  // A do loop, like in tiles.h.
    Bytes weight[rows];
    for (int r = 0; r < rows; r++) weight[r] = Integers::load(w + r * length + j);
    for (int i = 0; i < count; i++) {
      const Bytes digits = Integers::load(x + i * stride + j);
      for (int r = 0; r < rows; r++)
        sums[i][r] = Integers::add_in_tile(sums[i][r], weight[r], digits);
    }
    j += Integers::size;
  } while (j < length);
  for (int i = 0; i < count; i++) Integers::store_totals(totals + i * rows, sums[i]);
}

#include "decoded_rows.h"
