// Codes as int16 levels, 32 bytes of codes at a time, in AVX2.
//
// A chunk of 32 bytes has two registers for each plane. A lookup reads bytes, so levels are looked up in two tables,
// of their low and of their high bytes. Both are interleaved within halves of a register, so the first register has
// the codes of bytes 0 to 7 and 16 to 23, and the second register the others. All values of a half belong to the same
// 16 bytes.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Bytes of a chunk and of its halves, and the int16 values of a register.
constexpr int64_t chunk = 32, half = 16, lanes = 16;

inline int64_t chunks_of(const Product& p) { return (p.packed + chunk - 1) / chunk; }
// The registers of a chunk.
constexpr int64_t registers_of(int bits) { return 16 / bits; }

// The place of the value of byte `j` of a plane, in registers that are `stride` apart.
inline int64_t place_of(int64_t j, int plane, int bits, int64_t stride) {
  const int64_t in_chunk = 2 * plane + j / 8 % 2;
  return (j / chunk * registers_of(bits) + in_chunk) * stride + j % chunk / half * 8 + j % 8;
}

EQQUANT_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
EQQUANT_INLINE void store(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
// The low and the high bytes of sixteen int16 levels, for each half.
class Tables {
 public:
  __m256i low, high;

  EQQUANT_INLINE explicit Tables(const int16_t* levels) {
    const __m256i values = load(levels), bytes = _mm256_set1_epi16(255);
    low = in_both_halves(_mm256_and_si256(values, bytes));
    high = in_both_halves(_mm256_srli_epi16(values, 8));
  }

 private:
  // Narrows sixteen values to bytes.
  static EQQUANT_INLINE __m256i in_both_halves(__m256i values) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(values, values), 0x88);
  }
};

// Decodes the two registers of a plane. Levels of 8 bits need no tables.
template <int bits, int plane>
EQQUANT_INLINE void decode(const Tables& tables, __m256i codes, __m256i (&out)[2]) {
  if constexpr (bits == 8) {
    out[0] = _mm256_srai_epi16(_mm256_unpacklo_epi8(codes, codes), 8);
    out[1] = _mm256_srai_epi16(_mm256_unpackhi_epi8(codes, codes), 8);
  } else {
    const __m256i shifted = plane ? _mm256_srli_epi16(codes, plane * bits) : codes;
    const __m256i code = _mm256_and_si256(shifted, _mm256_set1_epi8((1 << bits) - 1));
    const __m256i low = _mm256_shuffle_epi8(tables.low, code), high = _mm256_shuffle_epi8(tables.high, code);
    out[0] = _mm256_unpacklo_epi8(low, high);
    out[1] = _mm256_unpackhi_epi8(low, high);
  }
}

// Rounds eight floats times a factor to int16.
EQQUANT_INLINE __m128i rounded(__m256 x, __m256 factor) {
  const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(x, factor));
  return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}

// Returns an upper bound for the norms of all lanes of `count` registers, `stride` values apart. `of_sum` registers
// contribute to a lane.
inline float norm_of_lanes(const int16_t* values, int64_t stride, int64_t count, int64_t of_sum) {
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = 0; i < count;) {
    __m256i sum = _mm256_setzero_si256();
    for (int64_t k = 0; k < of_sum && i < count; k++, i++, values += stride) {
      // A quarter, rounded up, because the squares would not fit.
      const __m256i magnitudes = _mm256_abs_epi16(load(values));
      const __m256i quarters = _mm256_srli_epi16(_mm256_add_epi16(magnitudes, _mm256_set1_epi16(3)), 2);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(quarters, quarters));
    }
    most = _mm256_max_epu32(most, sum);
  }
  uint32_t sums[8], largest = 0;
  store(sums, most);
  for (uint32_t sum : sums) largest = std::max(largest, sum);
  return 4 * std::sqrt(static_cast<float>(largest));
}

EQQUANT_END
