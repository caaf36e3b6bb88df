// The transpose of sixteen registers of sixteen lanes.
#pragma once

#include <immintrin.h>

#include "runtime/target.h"

EQQUANT_BEGIN

EQQUANT_INLINE void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  // Transpose within quarters of a register first, then across them.
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; k++) {
      x[i + 2 * k] = _mm512_unpacklo_epi64(y[i + k], y[i + k + 2]);
      x[i + 2 * k + 1] = _mm512_unpackhi_epi64(y[i + k], y[i + k + 2]);
    }
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k += 8) {
      y[k + i] = _mm512_shuffle_i32x4(x[k + i], x[k + i + 4], 0x88);
      y[k + i + 4] = _mm512_shuffle_i32x4(x[k + i], x[k + i + 4], 0xDD);
    }
  for (int i = 0; i < 8; i++) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xDD);
  }
}

EQQUANT_END
