// Values as int8 (one part) or int8x2 (two parts: `256 * high + low`), in AVX-512 with VBMI.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "decode/levels.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// The largest value of two parts, whose high part is at most 127.
constexpr float largest_split = 127 * 256;
inline float largest_of(int parts) { return parts > 1 ? largest_split : 127; }

// Returns the high part of integers. The low part is their lowest byte, read as signed.
EQQUANT_INLINE __m512i upper(__m512i x) {
  return _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
}

// Writes the parts of sixteen values, under a mask.
EQQUANT_INLINE void round_sixteen(__m512 x, __m512 per_unit, __mmask16 some, int parts,
                                  int8_t* high, int8_t* low) {
  __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(x, per_unit));
  if (parts > 1) {
    _mm512_mask_cvtepi32_storeu_epi8(low, some, rounded);
    rounded = upper(rounded);
  }
  _mm512_mask_cvtepi32_storeu_epi8(high, some, rounded);
}

// Combines the sums of products with high and low parts. The unit is the unit of the low part.
EQQUANT_INLINE __m512 sum_of(const int32_t* high, const int32_t* low, int parts) {
  const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(high));
  if (parts == 1) return sum;
  return _mm512_fmadd_ps(sum, _mm512_set1_ps(256), _mm512_cvtepi32_ps(_mm512_load_si512(low)));
}

// Codes in tables may be in blocks of eight bytes. Sixteen 8-bit codes must share a scale.
inline const char* why_not_blocks(const Product& p) {
  if (p.blocks == 1 || p.block_bytes() % 16 == 0) return nullptr;
  if (p.block_bytes() == 8 && p.bits < 8) return nullptr;
  return "blocks must be eight bytes, or a multiple of 16";
}

// Returns levels that are bytes, four times.
inline __m512i bytes_of_levels(const float* levels) {
  return _mm512_broadcast_i32x4(
      _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_loadu_ps(levels))));
}

// Levels as int16. The levels of codes of up to four bits, times an int16 scale, have two parts. Each part is a table
// of sixteen bytes, and a register holds the tables of four scales.
struct LevelTables {
  __m512i first_half, second_half;  // Eight int16 levels each, four times.
  float unit;                       // The unit of the product of an int16 level and an int16 scale.

  LevelTables(const float* levels, float largest) {
    const float per_unit = 32767 / largest;
    const bool fits = std::isfinite(per_unit);
    unit = fits ? 32768 / per_unit : 0;
    const __m512i values = _mm512_cvtps_epi32(
        _mm512_mul_ps(_mm512_loadu_ps(levels), _mm512_set1_ps(fits ? per_unit : 0)));
    const __m256i narrow = _mm512_cvtepi32_epi16(values);
    first_half = _mm512_broadcast_i32x4(_mm256_castsi256_si128(narrow));
    second_half = _mm512_broadcast_i32x4(_mm256_extracti128_si256(narrow, 1));
  }

  EQQUANT_INLINE void of(const int16_t* scales, __m512i& high, __m512i& low) const {
    int64_t four;
    std::memcpy(&four, scales, sizeof four);
    // Each scale fills a quarter of a register.
    const __m512i of_lane = _mm512_setr_epi64(
        0x0100010001000100, 0x0100010001000100, 0x0302030203020302, 0x0302030203020302,
        0x0504050405040504, 0x0504050405040504, 0x0706070607060706, 0x0706070607060706);
    const __m512i by = _mm512_shuffle_epi8(_mm512_set1_epi64(four), of_lane);
    const __m512i a = _mm512_mulhrs_epi16(first_half, by),
                  b = _mm512_mulhrs_epi16(second_half, by);
    const __m512i half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
    high = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                              _mm512_srai_epi16(_mm512_add_epi16(b, half), 8));
    low = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
  }
};

// Decodes sixteen float8 numbers. With four exponent bits they are too small by 2^8, and the scales compensate.
EQQUANT_INLINE __m512 float8_of(__m128i codes, int exponent) {
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 3 + exponent);
  const __m256i used = _mm256_set1_epi16(exponent == 4 ? 0xBFFF : 0xFFFF);
  return _mm512_cvtph_ps(_mm256_and_si256(wide, used));
}

// Decodes sixteen 8-bit codes: float8 numbers, or integers.
EQQUANT_INLINE __m512 values_of(__m128i codes, int exponent) {
  return exponent ? float8_of(codes, exponent)
                  : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
}

// The two int8 parts of each float8 magnitude.
struct Float8Tables {
  alignas(64) int8_t high[128], low[128];

  Float8Tables(int exponent, float largest) {
    const float per_unit = Units(largest, largest_split).per_unit;
    for (int i = 0; i < 128; i += 16) {
      alignas(16) uint8_t codes[16];
      for (int k = 0; k < 16; k++) codes[k] = static_cast<uint8_t>(i + k);
      // Codes beyond the largest number are NaN.
      const __m512 x = _mm512_min_ps(
          float8_of(_mm_load_si128(reinterpret_cast<const __m128i*>(codes)), exponent),
          _mm512_set1_ps(largest));
      round_sixteen(x, _mm512_set1_ps(per_unit), 0xFFFF, 2, high + i, low + i);
    }
    // int8 has no negative of -128.
    for (int8_t& of : low) of = std::max<int8_t>(of, -127);
  }

  static EQQUANT_INLINE __m512i look_up(const int8_t* table, __m512i codes) {
    const __m512i magnitude = _mm512_permutex2var_epi8(
        _mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    return _mm512_mask_sub_epi8(magnitude, _mm512_movepi8_mask(codes), _mm512_setzero_si512(),
                                magnitude);
  }
};

EQQUANT_END
