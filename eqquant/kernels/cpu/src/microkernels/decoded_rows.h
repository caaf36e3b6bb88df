// A panel of decoded int8 rows of the weight in row-major order, for any `Int8Vector`.
#pragma once

#include <cstdint>

#include "microkernels/int8_vector.h"
#include "runtime/product.h"
#include "runtime/target.h"
#if defined(EQQUANT_TARGET_I8MM)
#include "microkernels/i8mm/multiply_rows.h"
#endif

EQQUANT_BEGIN

#if !defined(EQQUANT_TARGET_I8MM)
// Multiplies decoded rows of the weight by `count` int8 rows of the activation. Totals are (row of the
// activation, row of the weight).
template <int rows, int count>
void multiply_rows(const uint8_t* w, int64_t length, const int8_t* x, int64_t stride,
                   uint32_t* totals) {
  using Bytes = Int8Vector::Bytes;
  Int8Vector::Sums sums[count][rows];
  for (int i = 0; i < count; i++)
    for (int r = 0; r < rows; r++) sums[i][r] = Int8Vector::zero();
  int64_t j = 0;
  do {  // At least one iteration: a loop that may be empty compiles to slower code.
    Bytes weight[rows];
    for (int r = 0; r < rows; r++) weight[r] = Int8Vector::load(w + r * length + j);
    for (int i = 0; i < count; i++) {
      const Bytes some = Int8Vector::load(x + i * stride + j);
      for (int r = 0; r < rows; r++)
        sums[i][r] = Int8Vector::add_in_tile(sums[i][r], weight[r], some);
    }
    j += Int8Vector::size;
  } while (j < length);
  for (int i = 0; i < count; i++) Int8Vector::store_totals(totals + i * rows, sums[i]);
}
#endif

struct DecodedRows {
  static constexpr int lanes = 4, most_vectors = 1, most_at_once = 6;
  static constexpr int64_t short_row = 0;
  // Bytes of the activation that stay in the second-level cache, because every four rows read them again.
  static constexpr int64_t cached_bytes = 1 << 19;
  const uint8_t* rows = nullptr;

  static bool pays(int64_t, int64_t) { return true; }
  static int vectors_for(int64_t) { return 1; }
  explicit DecodedRows(int64_t) {}
  void take(const uint8_t* decoded, int64_t, int, int) { rows = decoded; }
  void multiply(int, const int8_t* x, int64_t stride, int64_t length, int count,
                uint32_t* totals) const {
    with_constant<most_at_once>(count, [&](auto count) {
      multiply_rows<lanes, count>(rows, length, x, stride, totals);
    });
  }
};

EQQUANT_END
