// Vectors of bytes that decode codes with a history, in AVX-512, with byte lookups (VBMI) and matrices of bits (GFNI).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "decode/parities.h"
#include "microkernels/avx512/mask.h"
#include "runtime/target.h"

EQQUANT_BEGIN

struct ByteVector {
  static constexpr int64_t size = 64;
  using Bytes = __m512i;
  using Input = __m512i;

  static EQQUANT_INLINE Bytes load(const uint8_t* at, int64_t count) {
    return _mm512_maskz_loadu_epi8(first_bytes(count), at);
  }
  template <int zeros>
  static EQQUANT_INLINE Bytes load_after_zeros(const uint8_t* at, int64_t count) {
    return _mm512_maskz_loadu_epi8(first_bytes(count) & ~uint64_t{0} << zeros, at - zeros);
  }
  static EQQUANT_INLINE void store(uint8_t* to, Bytes x) { _mm512_storeu_si512(to, x); }
  static EQQUANT_INLINE void store(uint8_t* to, Bytes x, int64_t count) {
    _mm512_mask_storeu_epi8(to, first_bytes(count), x);
  }
  static EQQUANT_INLINE Input input(Bytes x) { return x; }
  static EQQUANT_INLINE Bytes add(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
  // Moves odd bits to the even bits below.
  static EQQUANT_INLINE Bytes halve(Bytes x) { return _mm512_srli_epi16(x, 1); }
  // Interleaves groups of `bytes` bytes of the low, or high, half of each lane.
  template <int bytes, bool high>
  static EQQUANT_INLINE Bytes interleave(Bytes a, Bytes b) {
    if constexpr (bytes == 1) return high ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
    return high ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b);
  }

  // Moves columns so that registers are in order after interleaving: part i of lane j is part j of register i.
  template <int planes>
  struct Order {
    __m512i index;
    Order() {
      constexpr int words = 4 / planes;  // 32-bit words of a part.
      alignas(64) int32_t of[16];
      for (int i = 0; i < 16; i++) {
        const int lane = i / 4, part = i % 4 / words;
        of[i] = (4 * part + lane) * words + i % words;
      }
      index = _mm512_load_si512(of);
    }
    EQQUANT_INLINE Bytes place(Bytes x) const { return _mm512_permutexvar_epi32(index, x); }
  };
  // Bit i of a result is the parity of the bits of a byte that mask i selects. `used` are the bits that any mask
  // selects.
  struct Map {
    __m512i matrix, of_low;  // The results for the six low bits.
    Map() = default;
    explicit Map(const uint8_t* masks) : matrix(_mm512_set1_epi64(bit_matrix(masks))) {
      alignas(64) uint8_t low[64];
      for (int value = 0; value < 64; value++) low[value] = parities(masks, value);
      of_low = _mm512_load_si512(low);
    }
    // Lookups and products of bits use different units of a core.
    template <int used>
    EQQUANT_INLINE Bytes of(Input x) const {
      return used < 64 ? _mm512_permutexvar_epi8(x, of_low) : _mm512_gf2p8affine_epi64_epi8(x, matrix, 0);
    }
  };
  static constexpr bool indices_have_signs = false;
  template <int count>
  struct Table {
    __m512i low, high;
    explicit Table(const uint8_t* levels) : low(_mm512_loadu_si512(levels)), high(_mm512_loadu_si512(levels + 64)) {}
    EQQUANT_INLINE Bytes look_up(Bytes index) const {
      return count > 64 ? _mm512_permutex2var_epi8(low, index, high) : _mm512_permutexvar_epi8(index, low);
    }
  };
};

EQQUANT_END
