// Codes as int16 levels, 32 bytes of codes at a time, in AVX2.
//
// A chunk of 32 bytes has two registers for each plane. A lookup reads bytes, so levels are looked up in two tables,
// of their low and of their high bytes. Both are interleaved within halves of a register, so the first register has
// the codes of bytes 0 to 7 and 16 to 23, and the second register the others. All values of a half belong to the same
// 16 bytes.
//
// Consecutive levels need no lookup: the activation determines the correction of each sum.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "microkernels/avx2/dense_codes.h"
#include "microkernels/avx2/few_rows.h"
#include "products/int16_levels.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

constexpr int64_t lanes = 16;  // The int16 values of a register.

// The registers of the values of a chunk.
constexpr int registers_of(int bits) { return 16 / bits; }

// True if codes are unpacked in registers. For more rows of the activation, that would be repeated.
inline bool reads_stored(const Product& p) { return p.is_unpacked() && p.m <= most_at_once && are_dense(p); }

// The level of code 0.
inline int first_level(const Product& p, const Int16Levels& levels) {
  return p.bits == 8 ? -p.largest_integer() : levels.values[0];
}

// True if codes are multiplied instead of their levels.
inline bool multiplies_codes(const Product& p, const Int16Levels& levels) {
  if (p.bits != 2 && p.bits != 4) return reads_stored(p);
  for (int i = 1; i < 1 << p.bits; i++)
    if (levels.values[i] != levels.values[0] + i) return false;
  return true;
}

template <int bits, int shared_, bool looks_up, class Stored_ = WholeBytes>
struct Int16Codes {
  using Levels = Int16Levels;
  using Stored = Stored_;
  static constexpr int shared = shared_, parts = shared == 4 ? 2 : 1, values_of_x = registers_of(bits);
  static constexpr int registers_of_x = values_of_x + (looks_up ? 0 : parts);
  static constexpr int scale_of(int part, int lane) { return lane < 4 ? part : parts + part; }

  // The low and the high bytes of int16 levels. Levels of 8 bits need no tables.
  struct Tables {
    static constexpr int bits_of_code = bits == 8 ? 4 : bits;
    NibbleTables<bits_of_code> low, high;

    explicit Tables(const Int16Levels& levels)
        : low([&](int code) { return levels.values[code]; }), high([&](int code) { return levels.values[code] >> 8; }) {}
  };

  // Decodes the two registers of a plane.
  template <int plane>
  static EQQUANT_INLINE void decode(const Tables& tables, __m256i codes, __m256i (&out)[2]) {
    if constexpr (bits == 8 && looks_up) {  // Levels.
      out[0] = _mm256_srai_epi16(_mm256_unpacklo_epi8(codes, codes), 8);
      out[1] = _mm256_srai_epi16(_mm256_unpackhi_epi8(codes, codes), 8);
      return;
    }
    __m256i low, high = _mm256_setzero_si256();
    if constexpr (looks_up)
      low = tables.low.template look_up<plane>(codes), high = tables.high.template look_up<plane>(codes);
    else
      low = bits == 8 ? codes : code<bits, plane>(codes);
    out[0] = _mm256_unpacklo_epi8(low, high);
    out[1] = _mm256_unpackhi_epi8(low, high);
  }

  template <int plane = 0, int count>
  static EQQUANT_INLINE void multiply(const Tables& tables, __m256i codes, const char* x,
                                      __m256i (&products)[parts][count]) {
    __m256i weight[2];
    decode<plane>(tables, codes, weight);
    for (int k = 0; k < 2; k++)
      for (int i = 0; i < count; i++) {
        const __m256i product =
            _mm256_madd_epi16(weight[k], load(x + ((2 * plane + k) * count + i) * of_register));
        const int part = k % parts;
        const bool is_first = plane == 0 && k < parts;
        if (!is_first)
          products[part][i] = _mm256_add_epi32(products[part][i], product);
        else if (looks_up)
          products[part][i] = product;
        else
          products[part][i] =
              _mm256_add_epi32(product, load(x + ((values_of_x + part) * count + i) * of_register));
      }
    if constexpr ((plane + 1) * bits < 8) multiply<plane + 1>(tables, codes, x, products);
  }

  static EQQUANT_INLINE __m256 scaled(__m256 scale, const char*, int, int) { return scale; }
};

EQQUANT_END
