// Codes of 3, 5 and 6 bits, unpacked in registers, in AVX-512. decode/unpack.h has their layout.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "microkernels/avx512/mask.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// The bits of a byte in the second part of a group.
inline int high_bits(const Product& p) { return p.stored_bits == 3 ? 2 : p.stored_bits - 4; }

// True if 64 bytes are whole groups of whole words.
inline bool are_dense(const Product& p) {
  if (p.has_history || (p.stored_bits != 3 && p.stored_bits != 5 && p.stored_bits != 6)) return false;
  return 64 % p.run == 0 && p.run * high_bits(p) % 32 == 0;
}

// Reads 64 bytes: two codes of 3 bits each, or one code of 5 or 6 bits, as an int8 level or as it is. Each 32-bit lane
// has four consecutive bytes of a group. The low bits of codes are one word of the first part of the group, and the high
// bits one word of the second part, after a shift.
template <bool as_levels>
class DenseCodes {
  __m512i low_words, low_shifts, high_words, high_rotations, low, used, half_range;

 public:
  // Stored bytes of 64 bytes.
  const int64_t bytes;

  explicit DenseCodes(const Product& p) : bytes(64 * p.stored_bits / p.bits) {
    const bool are_pairs = p.stored_bits == 3;
    const int low_bits = are_pairs ? 2 : 4, high_bits_of_code = are_pairs ? 1 : high_bits(p);
    const int run = static_cast<int>(p.run), words = run / 4;
    const int lows = run / 8, highs = run * high_bits(p) / 32;  // 32-bit words of a group.
    alignas(64) int32_t low_word[16], low_shift[16], high_word[16], high_rotation[16];
    for (int i = 0; i < 16; i++) {
      const int first = i / words * (lows + highs), word = i % words;
      low_word[i] = first + word % lows, low_shift[i] = low_bits * (word / lows);
      high_word[i] = first + lows + word % highs;
      // To the left, behind the low bits.
      high_rotation[i] = (low_bits - word / highs * high_bits_of_code) & 31;
    }
    low_words = _mm512_load_si512(low_word), low_shifts = _mm512_load_si512(low_shift);
    high_words = _mm512_load_si512(high_word), high_rotations = _mm512_load_si512(high_rotation);
    low = _mm512_set1_epi8(are_pairs ? 0x33 : 0x0F);
    used = _mm512_set1_epi8(static_cast<char>(are_pairs ? 0x77 : (1 << p.stored_bits) - 1));
    half_range = _mm512_set1_epi8(static_cast<char>(1 << (p.stored_bits - 1)));
  }
  // 64 bytes are stored in at most 48. If 128 bytes remain, 64 stored bytes can be read, without a mask: a masked load
  // takes 5% of the time of a product (Zen 4).
  static constexpr int64_t least_left = 128;
  static int64_t bytes_of_row(const Product& p) { return p.stored_bytes(); }
  // Bytes beyond the first `count` are read as zeros, the lowest level.
  EQQUANT_INLINE __m512i read(const uint8_t* stored, int64_t count) const {
    const __m512i from = _mm512_maskz_loadu_epi8(first_bytes(std::min<int64_t>(count, 64) * bytes / 64), stored);
    return unpack(from);
  }
  EQQUANT_INLINE __m512i read(const uint8_t* stored) const {
    return unpack(_mm512_loadu_si512(stored));
  }

 private:
  EQQUANT_INLINE __m512i unpack(__m512i from) const {
    const __m512i first = _mm512_srlv_epi32(_mm512_permutexvar_epi32(low_words, from), low_shifts);
    const __m512i second = _mm512_rolv_epi32(_mm512_permutexvar_epi32(high_words, from), high_rotations);
    // The bits `low` of `first`, and the other bits of `second`.
    const __m512i code = _mm512_ternarylogic_epi32(low, first, second, 0xCA);
    const __m512i only = _mm512_and_si512(code, used);
    return as_levels ? _mm512_sub_epi8(only, half_range) : only;
  }
};

// Codes that need no unpacking, 64 bytes at a time.
struct WholeBytes {
  static constexpr int64_t bytes = 64, least_left = 64;

  explicit WholeBytes(const Product&) {}
  static int64_t bytes_of_row(const Product& p) { return p.packed; }
  EQQUANT_INLINE __m512i read(const uint8_t* stored, int64_t count) const {
    return _mm512_maskz_loadu_epi8(first_bytes(count), stored);
  }
  EQQUANT_INLINE __m512i read(const uint8_t* stored) const { return _mm512_loadu_si512(stored); }
};

// Levels of 8 bits that were unpacked into a cache.
struct UnpackedBytes : WholeBytes {
  using WholeBytes::WholeBytes;
};

EQQUANT_END
