// `multiply_rows` of decoded_rows.h with i8mm: one instruction multiplies two rows of the weight by two rows of
// the activation.
#pragma once

#include <arm_neon.h>

#include "microkernels/dotprod/int8_vector.h"
#include "runtime/target.h"

EQQUANT_BEGIN

template <int rows, int count>
void multiply_rows(const uint8_t* w, int64_t length, const int8_t* x, int64_t stride,
                   uint32_t* totals) {
  static_assert(rows % 2 == 0);
  constexpr int pairs = (count + 1) / 2;
  // A register holds eight bytes of each of two rows. Sums are (row of the activation, row of the weight), two by
  // two.
  struct Pair {
    int8x16_t low, high;
  };
  const auto pair = [](const void* one, const void* other) -> Pair {
    const int64x2_t a = vreinterpretq_s64_u8(Int8Vector::load(one));
    const int64x2_t b = vreinterpretq_s64_u8(Int8Vector::load(other));
    return {vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))};
  };
  int32x4_t sums[pairs][rows / 2];
  for (int i = 0; i < pairs; i++)
    for (int r = 0; r < rows / 2; r++) sums[i][r] = Int8Vector::zero();
  int64_t j = 0;
  do {
    Pair weight[rows / 2];
    for (int r = 0; r < rows / 2; r++)
      weight[r] = pair(w + 2 * r * length + j, w + (2 * r + 1) * length + j);
    for (int i = 0; i < pairs; i++) {
      // An odd last row is paired with itself, and the second result is not used.
      const int other = 2 * i + 1 < count ? 2 * i + 1 : 2 * i;
      const Pair some = pair(x + 2 * i * stride + j, x + other * stride + j);
      for (int r = 0; r < rows / 2; r++) {
        sums[i][r] = vmmlaq_s32(sums[i][r], some.low, weight[r].low);
        sums[i][r] = vmmlaq_s32(sums[i][r], some.high, weight[r].high);
      }
    }
    j += Int8Vector::size;
  } while (j < length);
  for (int i = 0; i < count; i++)
    for (int r = 0; r < rows / 2; r++) {
      const int32x4_t of = sums[i / 2][r];
      const int32x2_t two = i % 2 ? vget_high_s32(of) : vget_low_s32(of);
      vst1_u32(totals + i * rows + 2 * r, vreinterpret_u32_s32(two));
    }
}

EQQUANT_END
