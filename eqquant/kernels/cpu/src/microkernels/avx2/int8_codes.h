// Codes as unsigned bytes, 32 bytes of codes at a time, in AVX2.
//
// The instruction adds two products of an unsigned and a signed byte in 16 bits. Sums of the products of all planes
// stay in 16 bits, so levels must be small. Levels have an offset, because they are unsigned. The activation
// determines the correction of each sum. Codes of 8 bits stay int16, because both take the same number of instructions.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "microkernels/avx2/few_rows.h"
#include "products/int8_levels.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

constexpr int largest_int8 = 127;

// True if sums of products fit into 16 bits.
inline bool has_small_levels(const Product& p) {
  return p.bits < 8 && has_int8_levels(p) && UnsignedLevels(p).largest * 2 * largest_int8 * p.planes() < 1 << 15;
}

// The registers of a row of the activation for a chunk: values of each plane, corrections, and units of the lanes.
struct ChunkOfX {
  int planes;

  constexpr int correction() const { return planes; }
  constexpr int unit() const { return planes + 1; }
  constexpr int registers() const { return planes + 2; }
};

template <int bits, int shared_, bool looks_up>
struct Int8Codes {
  using Levels = UnsignedLevels;
  using Stored = WholeBytes;
  static constexpr int shared = shared_, parts = 1, planes = 8 / bits;
  static constexpr ChunkOfX of_x = {planes};
  static constexpr int registers_of_x = of_x.registers();
  static constexpr int scale_of(int, int lane) { return lane * shared / 8; }

  struct Tables : NibbleTables<bits> {
    explicit Tables(const Levels& levels) : NibbleTables<bits>([&](int code) { return levels.values[code]; }) {}
  };

  template <int plane>
  static EQQUANT_INLINE __m256i decode(const Tables& tables, __m256i codes) {
    return looks_up ? tables.template look_up<plane>(codes) : code<bits, plane>(codes);
  }

  template <int plane, int count>
  static EQQUANT_INLINE void add_plane(const Tables& tables, __m256i codes, const char* x, __m256i (&sums)[count]) {
    const __m256i weight = decode<plane>(tables, codes);
    for (int i = 0; i < count; i++) {
      const __m256i product = _mm256_maddubs_epi16(weight, load(x + (plane * count + i) * of_register));
      sums[i] = plane ? _mm256_add_epi16(sums[i], product) : product;
    }
    if constexpr (plane + 1 < planes) add_plane<plane + 1>(tables, codes, x, sums);
  }

  template <int count>
  static EQQUANT_INLINE void multiply(const Tables& tables, __m256i codes, const char* x,
                                      __m256i (&products)[parts][count]) {
    __m256i sums[count];
    add_plane<0>(tables, codes, x, sums);
    for (int i = 0; i < count; i++)
      products[0][i] = _mm256_add_epi32(_mm256_madd_epi16(sums[i], _mm256_set1_epi16(1)),
                                        load(x + (of_x.correction() * count + i) * of_register));
  }

  static EQQUANT_INLINE __m256 scaled(__m256 scale, const char* x, int count, int i) {
    const char* const units = x + (of_x.unit() * count + i) * of_register;
    return _mm256_mul_ps(scale, _mm256_loadu_ps(reinterpret_cast<const float*>(units)));
  }
};

EQQUANT_END
