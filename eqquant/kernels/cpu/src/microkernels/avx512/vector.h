// Sixteen float32 numbers in AVX-512.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "microkernels/avx512/transpose.h"
#include "runtime/limits.h"
#include "runtime/target.h"

EQQUANT_BEGIN

struct Vector {
  static constexpr int size = 16;
  // The number of registers for sums beside decoding; the rows of the activation that are multiplied at once with
  // four decoded rows; and the largest number of rows for the GEMV.
  static constexpr int sums = 24, most_at_once = 6, few = limits::float_in_registers_avx512;
  // The rows of the activation that x @ w multiplies at once.
  static constexpr int most_of_rows = 8;
  // x @ w decodes the weight once for all rows from this number of rows on.
  static constexpr int rows_for_panels = limits::x_w_panels_avx512;
  // The same for x @ w.T. It is smaller for short rows, because their horizontal sums take more of the time.
  static int64_t rows_for_transposed_panels(int64_t columns) {
    if (columns <= limits::x_wt_short_row) return limits::x_wt_short_avx512;
    return std::clamp(columns / limits::x_wt_columns_avx512, limits::x_wt_least_avx512, limits::x_wt_most_avx512);
  }
  using Floats = __m512;
  using Codes = __m512i;
  using Halves = __m256i;
  using Bytes = __m128i;
  using Shift = __m256i;
  using Four = __m128;
  using Levels = __m512;

  static EQQUANT_INLINE __mmask16 mask(int count) { return (1u << count) - 1; }
  static EQQUANT_INLINE Floats zero() { return _mm512_setzero_ps(); }
  static EQQUANT_INLINE Floats all(float x) { return _mm512_set1_ps(x); }
  static EQQUANT_INLINE Floats halves(float x, float y) {
    return _mm512_insertf32x8(_mm512_set1_ps(x), _mm256_set1_ps(y), 1);
  }
  static EQQUANT_INLINE Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static EQQUANT_INLINE Floats load(const float* p, int count) {
    return _mm512_maskz_loadu_ps(mask(count), p);
  }
  static EQQUANT_INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
  static EQQUANT_INLINE void store(float* p, Floats x, int count) {
    _mm512_mask_storeu_ps(p, mask(count), x);
  }
  static EQQUANT_INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static EQQUANT_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    return _mm512_fmadd_ps(a, b, c);
  }
  static EQQUANT_INLINE float sum(Floats x) { return _mm512_reduce_add_ps(x); }
  static EQQUANT_INLINE Four load_four(const float* p) { return _mm_loadu_ps(p); }
  static EQQUANT_INLINE void store(float* p, Four x) { _mm_storeu_ps(p, x); }
  static EQQUANT_INLINE Four multiply(Four a, Four b) { return _mm_mul_ps(a, b); }
  // Returns the sum of each of four vectors.
  static EQQUANT_INLINE Four sum_four(Floats a, Floats b, Floats c, Floats d) {
    const Floats ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const Floats cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const Floats all =
        _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }

  static EQQUANT_INLINE void transpose(Floats (&x)[size]) {
    __m512i bits[size];
    for (int i = 0; i < size; i++) bits[i] = _mm512_castps_si512(x[i]);
    EQQUANT_NAMESPACE::transpose(bits);
    for (int i = 0; i < size; i++) x[i] = _mm512_castsi512_ps(bits[i]);
  }

  static EQQUANT_INLINE Bytes bytes(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static EQQUANT_INLINE Bytes bytes(const uint8_t* p, int count) {
    return _mm_maskz_loadu_epi8(mask(count), p);
  }
  static EQQUANT_INLINE Codes codes(Bytes bytes) { return _mm512_cvtepu8_epi32(bytes); }
  static EQQUANT_INLINE Floats integers(Bytes bytes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
  // float16 numbers, made from bytes by a shift.
  static EQQUANT_INLINE Shift shift(int bits) { return halves(bits); }
  static EQQUANT_INLINE Halves halves(int bits) {
    return _mm256_set1_epi16(static_cast<short>(bits));
  }
  static EQQUANT_INLINE Halves signed_halves(Bytes bytes) { return _mm256_cvtepi8_epi16(bytes); }
  static EQQUANT_INLINE Floats from_halves(Halves x, Shift shift, Halves used) {
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_sllv_epi16(x, shift), used));
  }
  static EQQUANT_INLINE Levels levels(const float* table) { return _mm512_loadu_ps(table); }
  static EQQUANT_INLINE Levels scaled(Levels levels, Floats by) { return multiply(levels, by); }
  // A lookup reads the low four bits of each index, and ignores the others.
  template <int bits, int plane>
  static EQQUANT_INLINE Floats decode(Levels levels, Codes codes) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, plane * bits), levels);
  }
};

EQQUANT_END
