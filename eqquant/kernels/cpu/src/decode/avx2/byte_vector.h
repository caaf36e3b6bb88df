// Vectors of bytes that decode codes with a history, in AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "decode/parities.h"
#include "runtime/target.h"

EQQUANT_BEGIN

struct ByteVector {
  static constexpr int64_t size = 32;
  using Bytes = __m256i;
#if defined(EQQUANT_TARGET_AVX2_GFNI)
  using Input = __m256i;
#else
  // The low and the high four bits of each byte.
  struct Input {
    __m256i low, high;
  };
#endif

  static EQQUANT_INLINE Bytes load(const uint8_t* at, int64_t count) {
    if (count == size) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    if (count == size / 2) return _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    uint8_t some[size] = {};
    std::memcpy(some, at, count);
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(some));
  }
  template <int zeros>
  static EQQUANT_INLINE Bytes load_after_zeros(const uint8_t* at, int64_t count) {
    const __m256i x = load(at, count), low_half_above_zeros = _mm256_permute2x128_si256(x, x, 0x08);
    return _mm256_alignr_epi8(x, low_half_above_zeros, 16 - zeros);
  }
  static EQQUANT_INLINE void store(uint8_t* to, Bytes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
  static EQQUANT_INLINE void store(uint8_t* to, Bytes x, int64_t count) {
    uint8_t all[size];
    store(all, x);
    std::memcpy(to, all, count);
  }
#if defined(EQQUANT_TARGET_AVX2_GFNI)
  static EQQUANT_INLINE Input input(Bytes x) { return x; }
#else
  static EQQUANT_INLINE Input input(Bytes x) {
    const __m256i low = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x, low), _mm256_and_si256(_mm256_srli_epi16(x, 4), low)};
  }
#endif
  static EQQUANT_INLINE Bytes add(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
  // Moves odd bits to the even bits below.
  static EQQUANT_INLINE Bytes halve(Bytes x) { return _mm256_srli_epi16(x, 1); }
  // Interleaves groups of `bytes` bytes of the low, or high, half of each lane.
  template <int bytes, bool high>
  static EQQUANT_INLINE Bytes interleave(Bytes a, Bytes b) {
    if constexpr (bytes == 1) return high ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b);
    return high ? _mm256_unpackhi_epi16(a, b) : _mm256_unpacklo_epi16(a, b);
  }

  // Moves columns so that registers are in order after interleaving: part i of lane j is part j of register i.
  template <int planes>
  struct Order {
    EQQUANT_INLINE Bytes place(Bytes x) const {
      if constexpr (planes == 2) return _mm256_permute4x64_epi64(x, 0xD8);
      return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    }
  };
  // Bit i of a result is the parity of the bits of a byte that mask i selects. `used` are the bits that any mask
  // selects.
#if defined(EQQUANT_TARGET_AVX2_GFNI)
  struct Map {
    __m256i matrix;
    Map() = default;
    explicit Map(const uint8_t* masks) : matrix(_mm256_set1_epi64x(bit_matrix(masks))) {}
    template <int>
    EQQUANT_INLINE Bytes of(Input x) const {
      return _mm256_gf2p8affine_epi64_epi8(x, matrix, 0);
    }
  };
#else
  struct Map {
    __m256i of_low, of_high;
    Map() = default;
    explicit Map(const uint8_t* masks) {
      uint8_t low[16], high[16];
      for (int value = 0; value < 16; value++)
        low[value] = parities(masks, value), high[value] = parities(masks, value << 4);
      of_low = twice(low), of_high = twice(high);
    }
    template <int used>
    EQQUANT_INLINE Bytes of(const Input& x) const {
      if constexpr (used < 16) return _mm256_shuffle_epi8(of_low, x.low);
      if constexpr (used % 16 == 0) return _mm256_shuffle_epi8(of_high, x.high);
      return add(_mm256_shuffle_epi8(of_low, x.low), _mm256_shuffle_epi8(of_high, x.high));
    }
  };
#endif
  // Levels, whose second half is the negative of the first. The highest bit of an index is the sign.
  static constexpr bool indices_have_signs = true;
  template <int count>
  struct Table {
    static constexpr int parts_of_half = count / 32, sign = parts_of_half == 1 ? 4 : parts_of_half == 2 ? 5 : 6;
    __m256i parts[parts_of_half];
    explicit Table(const uint8_t* levels) {
      for (int i = 0; i < parts_of_half; i++) parts[i] = twice(levels + 16 * i);
    }
    EQQUANT_INLINE Bytes look_up(Bytes index) const {
      // Not 0, which would make the level 0.
      const __m256i signs = _mm256_or_si256(_mm256_slli_epi16(index, 7 - sign), _mm256_set1_epi8(1));
      return _mm256_sign_epi8(look_up<0, parts_of_half>(index), signs);
    }

   private:
    // Chooses by bit 4 of the index between two parts, and by bit 5 between two pairs.
    template <int first, int of>
    EQQUANT_INLINE Bytes look_up(Bytes index) const {
      if constexpr (of == 1) {
        return _mm256_shuffle_epi8(parts[first], index);
      } else {
        constexpr int bit = of == 2 ? 4 : 5;
        return _mm256_blendv_epi8(look_up<first, of / 2>(index), look_up<first + of / 2, of / 2>(index),
                                  _mm256_slli_epi16(index, 7 - bit));
      }
    }
  };

 private:
  static __m256i twice(const uint8_t* at) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
};

EQQUANT_END
