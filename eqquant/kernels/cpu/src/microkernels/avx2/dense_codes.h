// Codes of 5 and 6 bits, unpacked in registers, in AVX2. decode/unpack.h has their layout.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "microkernels/avx2/few_rows.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// True if a chunk of 32 codes is one group of 32 codes, or two groups of 16 codes of 6 bits.
inline bool are_dense(const Product& p) {
  if (p.has_history || (p.stored_bits != 5 && p.stored_bits != 6) || p.block_bytes() != p.run) return false;
  return p.run == chunk || (p.run == half && p.stored_bits == 6 && p.blocks > 1);
}

// Reads 32 codes. The low bits of a group are in two planes, and the high bits in the others, so
// each part is shifted by a different distance.
template <int stored_bits, int group_>
struct DenseCodes {
  static constexpr int group = group_;  // The codes of a group.
  static constexpr int high_bits = stored_bits - 4, bytes = 4 * stored_bits;

  static int64_t bytes_of_row(const Product& p) { return p.stored_bytes(); }
  // Factors that shift each 32-bit lane to the left, by fewer than 8 bits. A shift with a different distance in each
  // lane takes longer with some CPUs (Zen 1).
  template <class... Distances>
  static EQQUANT_INLINE __m256i shifts(Distances... of_lane) {
    return _mm256_setr_epi32((0x10001 << of_lane)...);
  }
  static EQQUANT_INLINE __m256i read(const uint8_t* stored) {
    __m256i low, high, factors;
    if constexpr (group == half) {  // Each half is a group of 12 bytes.
      const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored));
      const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored + bytes / 2));
      const __m256i groups = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
      low = _mm256_unpacklo_epi64(code<4, 0>(groups), code<4, 1>(groups));
      high = _mm256_shuffle_epi32(groups, 0xAA);
      factors = shifts(6, 4, 2, 0, 6, 4, 2, 0);
    } else {
      const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored)), used = _mm_set1_epi8(15);
      low = _mm256_castsi128_si256(_mm_and_si128(both, used));
      low = _mm256_inserti128_si256(low, _mm_and_si128(_mm_srli_epi16(both, 4), used), 1);
      int64_t highs = 0;
      std::memcpy(&highs, stored + half, bytes - half);
      high = high_bits == 1 ? _mm256_set1_epi32(static_cast<int>(highs)) : _mm256_set1_epi64x(highs);
      factors = high_bits == 1 ? shifts(7, 6, 5, 4, 3, 2, 1, 0) : shifts(6, 6, 4, 4, 2, 2, 0, 0);
    }
    // The high bits of each code become the highest bits of its byte.
    high = _mm256_mullo_epi16(high, factors);
    high = _mm256_and_si256(high, _mm256_set1_epi8(static_cast<char>(256 - (256 >> high_bits))));
    return _mm256_or_si256(low, _mm256_srli_epi16(high, 4 - high_bits));
  }
};

EQQUANT_END
