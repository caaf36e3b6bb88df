// Eight float32 numbers in AVX2.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "runtime/limits.h"
#include "runtime/target.h"

EQQUANT_BEGIN

struct Vector {
  static constexpr int size = 8;
  // The number of registers for sums beside decoding; the rows of the activation that are multiplied at once with
  // four decoded rows; and the largest number of rows for the GEMV.
  static constexpr int sums = 8, most_at_once = 3, few = limits::float_in_registers_avx2;
  // The rows of the activation that x @ w multiplies at once.
  static constexpr int most_of_rows = 4;
  // x @ w decodes the weight once for all rows from this number of rows on.
  static constexpr int rows_for_panels = limits::x_w_panels_avx2;
  // The same for x @ w.T. It is smaller for short rows, because their horizontal sums take more of the time.
  static int64_t rows_for_transposed_panels(int64_t columns) {
    if (columns <= limits::x_wt_short_row) return limits::x_wt_short_avx2;
    return std::clamp(columns / limits::x_wt_columns_avx2, limits::x_wt_least_avx2, limits::x_wt_most_avx2);
  }
  using Floats = __m256;
  using Codes = __m256i;
  using Halves = __m128i;
  using Bytes = __m128i;
  using Shift = __m128i;
  using Four = __m128;
  struct Levels {
    __m256 low, high;
  };

  static EQQUANT_INLINE __m256i mask(int count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
  }
  static EQQUANT_INLINE Floats zero() { return _mm256_setzero_ps(); }
  static EQQUANT_INLINE Floats all(float x) { return _mm256_set1_ps(x); }
  static EQQUANT_INLINE Floats halves(float x, float y) {
    return _mm256_set_m128(_mm_set1_ps(y), _mm_set1_ps(x));
  }
  static EQQUANT_INLINE Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static EQQUANT_INLINE Floats load(const float* p, int count) {
    return _mm256_maskload_ps(p, mask(count));
  }
  static EQQUANT_INLINE void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
  static EQQUANT_INLINE void store(float* p, Floats x, int count) {
    _mm256_maskstore_ps(p, mask(count), x);
  }
  static EQQUANT_INLINE Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static EQQUANT_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    return _mm256_fmadd_ps(a, b, c);
  }
  static EQQUANT_INLINE float sum(Floats x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_hadd_ps(s, s);
    return _mm_cvtss_f32(_mm_hadd_ps(s, s));
  }
  static EQQUANT_INLINE Four load_four(const float* p) { return _mm_loadu_ps(p); }
  static EQQUANT_INLINE void store(float* p, Four x) { _mm_storeu_ps(p, x); }
  static EQQUANT_INLINE Four multiply(Four a, Four b) { return _mm_mul_ps(a, b); }
  // Returns the sum of each of four vectors.
  static EQQUANT_INLINE Four sum_four(Floats a, Floats b, Floats c, Floats d) {
    const Floats all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  }

  // Transposes eight vectors: first within halves, then across them.
  static EQQUANT_INLINE void transpose(Floats (&x)[size]) {
    Floats y[size];
    for (int i = 0; i < 8; i += 2) {
      y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
      y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
      for (int k = 0; k < 2; k++) {
        x[i + 2 * k] = _mm256_shuffle_ps(y[i + k], y[i + k + 2], 0x44);
        x[i + 2 * k + 1] = _mm256_shuffle_ps(y[i + k], y[i + k + 2], 0xEE);
      }
    for (int i = 0; i < 4; i++) {
      y[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
      y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) x[i] = y[i];
  }

  static EQQUANT_INLINE Bytes bytes(const uint8_t* p) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  }
  static EQQUANT_INLINE Bytes bytes(const uint8_t* p, int count) {
    uint64_t some = 0;
    std::memcpy(&some, p, count);
    return _mm_cvtsi64_si128(some);
  }
  static EQQUANT_INLINE Codes codes(Bytes bytes) { return _mm256_cvtepu8_epi32(bytes); }
  static EQQUANT_INLINE Floats integers(Bytes bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  // float16 numbers, made from bytes by a shift.
  static EQQUANT_INLINE Shift shift(int bits) { return _mm_cvtsi32_si128(bits); }
  static EQQUANT_INLINE Halves halves(int bits) { return _mm_set1_epi16(static_cast<short>(bits)); }
  static EQQUANT_INLINE Halves signed_halves(Bytes bytes) { return _mm_cvtepi8_epi16(bytes); }
  static EQQUANT_INLINE Floats from_halves(Halves x, Shift shift, Halves used) {
    return _mm256_cvtph_ps(_mm_and_si128(_mm_sll_epi16(x, shift), used));
  }
  static EQQUANT_INLINE Levels levels(const float* table) {
    return {_mm256_loadu_ps(table), _mm256_loadu_ps(table + 8)};
  }
  static EQQUANT_INLINE Levels scaled(Levels levels, Floats by) {
    return {multiply(levels.low, by), multiply(levels.high, by)};
  }
  // A lookup reads the low three bits of each index, and ignores the others.
  template <int bits, int plane>
  static EQQUANT_INLINE Floats decode(Levels levels, Codes codes) {
    const __m256i index = _mm256_srli_epi32(codes, plane * bits);
    const __m256 low = _mm256_permutevar8x32_ps(levels.low, index);
    if constexpr (bits < 4) return low;
    const __m256 high = _mm256_permutevar8x32_ps(levels.high, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
};

EQQUANT_END
