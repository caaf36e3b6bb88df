// The largest magnitude of a row, in AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "runtime/target.h"

EQQUANT_BEGIN

// Returns a mask of the first `count` of 16 lanes.
inline __mmask16 first(int64_t count) { return count >= 16 ? 0xFFFF : (1u << count) - 1; }

inline float absmax_of(const float* x, int64_t size) {
  // Compare bits: their order equals the order of magnitudes, and NaN is the largest.
  __m512i most = _mm512_setzero_si512();
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 some = first(size - i);
    const __m512i bits = _mm512_maskz_loadu_epi32(some, x + i);
    most = _mm512_max_epi32(most, _mm512_and_si512(bits, magnitude));
  }
  const int32_t bits = _mm512_reduce_max_epi32(most);
  float absmax;
  std::memcpy(&absmax, &bits, sizeof absmax);
  return absmax;
}

EQQUANT_END
