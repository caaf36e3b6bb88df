// Floats to the nearest of 16 levels: AVX-512.
#include <immintrin.h>

#include <cfloat>

#include "encode.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace eqquant {
namespace {

// How many of the 15 boundaries lie below each value: a binary search, by lookups.
EQQUANT_INLINE __m512i search(__m512 x, __m512 boundaries) {
  __m512i code = _mm512_setzero_si512();
  for (int step = 8; step; step /= 2) {
    const __m512i at = _mm512_add_epi32(code, _mm512_set1_epi32(step - 1));
    const __m512 boundary = _mm512_permutexvar_ps(at, boundaries);
    const __mmask16 above = _mm512_cmp_ps_mask(x, boundary, _CMP_GT_OQ);
    code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(step));
  }
  return code;
}

// Of the bits: their order is that of the magnitudes, and NaN lies above infinity.
float absmax_of(const float* x, int64_t size) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < size; i += 16)
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_loadu_si512(x + i), magnitude));
  const int32_t bits = _mm512_reduce_max_epi32(most);
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

}  // namespace

void encode_avx512(const Encoding& e, int64_t begin, int64_t end) {
  const __m512 boundaries = _mm512_loadu_ps(e.boundaries);
  const int64_t half = e.block / 2, blocks = e.size / e.block;
  for (int64_t row = begin; row < end; row++) {
    bool bad = false;
    for (int64_t b = 0; b < blocks; b++) {
      const float* x = e.x + row * e.size + b * e.block;
      uint8_t* codes = e.codes + (row * e.size + b * e.block) / 2;
      const float absmax = absmax_of(x, e.block);
      const bool finite = absmax <= FLT_MAX;
      bad |= !finite;
      const float scale = !finite ? FLT_MAX : absmax > 0 ? std::max(absmax, FLT_MIN) : 0;
      e.scales[row * blocks + b] = scale;
      // A true division: a product with the reciprocal would be off in the last place.
      const __m512 by = _mm512_set1_ps(scale > 0 ? scale : 1);
      for (int64_t j = 0; j < half; j += 16) {
        const __m512i low = search(_mm512_div_ps(_mm512_loadu_ps(x + j), by), boundaries);
        const __m512i high =
            search(_mm512_div_ps(_mm512_loadu_ps(x + half + j), by), boundaries);
        const __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(high, 4));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + j), _mm512_cvtepi32_epi8(both));
      }
    }
    e.problems[row] = bad;
  }
}

}  // namespace eqquant
EQQUANT_TARGET_END
