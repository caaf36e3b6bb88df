// 64 bytes in AVX-512 VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "microkernels/avx512/mask.h"
#include "runtime/target.h"

EQQUANT_BEGIN

struct Int8Vector {
  static constexpr int size = 64;
  // The offset that is added to signed bytes of a weight, because the instruction reads them as unsigned.
  static constexpr int middle = 128;
  using Bytes = __m512i;
  using Sums = __m512i;

  static EQQUANT_INLINE Bytes load(const void* p) { return _mm512_loadu_si512(p); }
  static EQQUANT_INLINE Bytes load(const void* p, int64_t count) {
    return _mm512_maskz_loadu_epi8(first_bytes(count), p);
  }
  static EQQUANT_INLINE void store(void* p, Bytes x) { _mm512_storeu_si512(p, x); }
  // Stores some of 16 bytes. A masked store takes many times as long.
  static EQQUANT_INLINE void store(void* to, __mmask16 some, __m128i x) {
    some == 0xFFFF ? _mm_storeu_si128(static_cast<__m128i*>(to), x) : _mm_mask_storeu_epi8(to, some, x);
  }
  static EQQUANT_INLINE Bytes table(const uint8_t* of_codes) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(of_codes)));
  }
  template <int bits, int plane>
  static EQQUANT_INLINE Bytes decode(Bytes table, Bytes codes) {
    if constexpr (bits == 8) return _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
    return _mm512_shuffle_epi8(table, code<bits, plane>(codes));
  }
  template <int bits, int plane>
  static EQQUANT_INLINE Bytes code(Bytes codes) {
    const __m512i shifted = plane ? _mm512_srli_epi16(codes, plane * bits) : codes;
    return _mm512_and_si512(shifted, _mm512_set1_epi8((1 << bits) - 1));
  }

  static EQQUANT_INLINE Sums zero() { return _mm512_setzero_si512(); }
  static EQQUANT_INLINE Sums add(Sums sum, Bytes weight, Bytes x) {
    return _mm512_dpbusd_epi32(sum, weight, x);
  }
  // The same in assembly, because GCC 12 keeps the sums of a large tile in memory.
  static EQQUANT_INLINE Sums add_in_tile(Sums sum, Bytes weight, Bytes x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x));
    return sum;
  }
  static EQQUANT_INLINE uint32_t total(Sums x) {
    return static_cast<uint32_t>(_mm512_reduce_add_epi32(x));
  }
  // Stores the total of each of four registers.
  static EQQUANT_INLINE void store_totals(uint32_t* to, const Sums (&x)[4]) {
    __m256i half[4];
    for (int i = 0; i < 4; i++)
      half[i] = _mm256_add_epi32(_mm512_castsi512_si256(x[i]), _mm512_extracti64x4_epi64(x[i], 1));
    const __m256i quarter = _mm256_hadd_epi32(_mm256_hadd_epi32(half[0], half[1]),
                                              _mm256_hadd_epi32(half[2], half[3]));
    _mm_store_si128(reinterpret_cast<__m128i*>(to),
                    _mm_add_epi32(_mm256_castsi256_si128(quarter),
                                  _mm256_extracti128_si256(quarter, 1)));
  }

  // Splits a run of the activation into int8 parts, and adds them to the sums of the row.
  template <int parts>
  static void split(const float* x, int64_t size, float per_unit, int8_t* high, int8_t* low,
                    Sums* sums) {
    constexpr float low_per_high = 254;
    const __m512 factor = _mm512_set1_ps(per_unit);
    const auto write = [](int8_t* to, __mmask16 some, __m512i of) { store(to, some, _mm512_cvtepi32_epi8(of)); };
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 some = first(size - i);
      const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), factor);
      const __m512i whole = _mm512_cvtps_epi32(scaled);
      write(high + i, some, whole);
      sums[0] = _mm512_add_epi32(sums[0], whole);
      if constexpr (parts == 1) continue;
      const __m512 rest = _mm512_sub_ps(scaled, _mm512_cvtepi32_ps(whole));
      const __m512i part = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(low_per_high)));
      write(low + i, some, part);
      sums[1] = _mm512_add_epi32(sums[1], part);
    }
  }

  // Writes the levels of codes, times a factor, as bytes. Planes are `stride` apart. Factors of int8 codes are at most
  // 2^`power`.
  template <int bits>
  static EQQUANT_INLINE void round_block(const float* levels, float factor, int power, int64_t bytes,
                                         const uint8_t* codes, uint8_t* to, int64_t stride) {
    if constexpr (bits == 8) return scale_block(factor, power, bytes, codes, to);
    const __m512 by = _mm512_set1_ps(factor);
    const auto rounded = [&](__m512 x) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, by));
      // Saturate, because the level -128 with a negative scale is 128.
      return _mm512_cvtusepi32_epi8(_mm512_add_epi32(whole, _mm512_set1_epi32(middle)));
    };
    const __m128i table = rounded(_mm512_loadu_ps(levels));
    for (int64_t j = 0; j < bytes; j += 16) {
      const __mmask16 some = first(bytes - j);
      const __m128i of = _mm_maskz_loadu_epi8(some, codes + j);
      for (int plane = 0; plane < 8 / bits; plane++) {
        const __m128i shifted = _mm_srl_epi16(of, _mm_cvtsi32_si128(plane * bits));
        const __m128i code = _mm_and_si128(shifted, _mm_set1_epi8((1 << bits) - 1));
        store(to + plane * stride + j, some, _mm_shuffle_epi8(table, code));
      }
    }
  }
  // Writes int8 codes times a factor: a power of two, by which codes are shifted, times a fraction of 15 bits.
  static EQQUANT_INLINE void scale_block(float factor, int power, int64_t bytes, const uint8_t* codes,
                                         uint8_t* to) {
    const __m128i whole = _mm_cvtps_epi32(_mm_set1_ps(factor * static_cast<float>(1 << (15 - power))));
    const __m512i fraction = _mm512_broadcastw_epi16(_mm_packs_epi32(whole, whole));  // 2^15 is rounded down.
    const __m128i shift = _mm_cvtsi32_si128(power);
    const __m256i sign = _mm256_set1_epi8(-128);
    const auto scaled = [&](__m256i of) {
      const __m512i values = _mm512_sll_epi16(_mm512_cvtepi8_epi16(of), shift);
      // Saturate, because the level -128 with a negative scale is 128.
      return _mm256_xor_si256(_mm512_cvtsepi16_epi8(_mm512_mulhrs_epi16(values, fraction)), sign);
    };
    int64_t j = 0;
    for (; j + 32 <= bytes; j += 32) {
      const __m256i of = scaled(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + j)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), of);
    }
    for (; j < bytes; j += 16) {
      const __mmask16 some = first(bytes - j);
      const __m256i of = scaled(_mm256_castsi128_si256(_mm_maskz_loadu_epi8(some, codes + j)));
      store(to + j, some, _mm256_castsi256_si128(of));
    }
  }
};

EQQUANT_END
