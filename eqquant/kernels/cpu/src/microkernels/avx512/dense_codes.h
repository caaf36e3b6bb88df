// Codes of 5 and 6 bits, unpacked in registers, in AVX-512. decode/unpack.h has their layout.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "microkernels/avx512/mask.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// True if 64 codes are whole groups of whole words.
inline bool are_dense(const Product& p) {
  if (p.has_history || (p.stored_bits != 5 && p.stored_bits != 6)) return false;
  return 64 % p.run == 0 && p.run * (p.stored_bits - 4) % 32 == 0;
}

// Reads 64 codes as int8 levels, or as they are. Each 32-bit lane has four consecutive codes of a group. Their low bits
// are one word of the first part of the group, and their high bits one word of the second part, after a shift.
template <bool as_levels>
class DenseCodes {
  __m512i low_words, low_shifts, high_words, high_rotations, used, half_range;

 public:
  static constexpr bool is_prefetched = true;
  // Stored bytes of 64 codes.
  const int64_t bytes;

  explicit DenseCodes(const Product& p) : bytes(8 * p.stored_bits) {
    const int high_bits = p.stored_bits - 4, run = static_cast<int>(p.run);
    const int words = run / 4, lows = run / 8, highs = run * high_bits / 32;  // 32-bit words of a group.
    alignas(64) int32_t low_word[16], low_shift[16], high_word[16], high_rotation[16];
    for (int i = 0; i < 16; i++) {
      const int first = i / words * (lows + highs), word = i % words;
      low_word[i] = first + word % lows, low_shift[i] = 4 * (word / lows);
      high_word[i] = first + lows + word % highs;
      high_rotation[i] = (4 - word / highs * high_bits) & 31;  // To the left, to bit 4 of each byte.
    }
    low_words = _mm512_load_si512(low_word), low_shifts = _mm512_load_si512(low_shift);
    high_words = _mm512_load_si512(high_word), high_rotations = _mm512_load_si512(high_rotation);
    used = _mm512_set1_epi8(static_cast<char>((1 << p.stored_bits) - 1));
    half_range = _mm512_set1_epi8(static_cast<char>(1 << (p.stored_bits - 1)));
  }
  // 64 codes take at most 48 bytes. If 128 codes remain, 64 bytes can be read, without a mask: a masked load takes 5% of
  // the time of a product (Zen 4).
  static constexpr int64_t least_left = 128;
  static int64_t bytes_of_row(const Product& p) { return p.stored_bytes(); }
  // Codes beyond the first `count` are read as zeros, the lowest level.
  EQQUANT_INLINE __m512i read(const uint8_t* stored, int64_t count) const {
    const __m512i from = _mm512_maskz_loadu_epi8(first_bytes(std::min<int64_t>(count, 64) * bytes / 64), stored);
    return unpack(from);
  }
  EQQUANT_INLINE __m512i read(const uint8_t* stored) const {
    return unpack(_mm512_loadu_si512(stored));
  }

 private:
  EQQUANT_INLINE __m512i unpack(__m512i from) const {
    const __m512i low = _mm512_srlv_epi32(_mm512_permutexvar_epi32(low_words, from), low_shifts);
    const __m512i high = _mm512_rolv_epi32(_mm512_permutexvar_epi32(high_words, from), high_rotations);
    // The low four bits of `low`, and the other bits of `high`.
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, 0xCA);
    const __m512i only = _mm512_and_si512(code, used);
    return as_levels ? _mm512_sub_epi8(only, half_range) : only;
  }
};

// Codes that need no unpacking, 64 bytes at a time.
struct WholeBytes {
  static constexpr int64_t bytes = 64, least_left = 64;
  static constexpr bool is_prefetched = true;

  explicit WholeBytes(const Product&) {}
  static int64_t bytes_of_row(const Product& p) { return p.packed; }
  EQQUANT_INLINE __m512i read(const uint8_t* stored, int64_t count) const {
    return _mm512_maskz_loadu_epi8(first_bytes(count), stored);
  }
  EQQUANT_INLINE __m512i read(const uint8_t* stored) const { return _mm512_loadu_si512(stored); }
};

// Codes that were unpacked into a cache. Prefetching would read other memory.
struct UnpackedBytes : WholeBytes {
  static constexpr bool is_prefetched = false;
  using WholeBytes::WholeBytes;
};

EQQUANT_END
