// Scales of consecutive blocks of a row, in AVX-512.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "decode/scales.h"
#include "microkernels/avx512/mask.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Decodes sixteen float8 numbers (E4M3) by float16, whose exponent is larger by 8. 127 is NaN.
EQQUANT_INLINE __m512 decode_float8(__m128i bytes) {
  const __m256i codes = _mm256_cvtepu8_epi16(bytes);
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(127));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(127));
  const __m256i halves = _mm256_mask_mov_epi16(_mm256_slli_epi16(magnitude, 7), nan,
                                               _mm256_set1_epi16(0x7E00));
  const __m256i sign = _mm256_slli_epi16(_mm256_sub_epi16(codes, magnitude), 8);
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(halves, sign)), _mm512_set1_ps(256));
}

// Decodes sixteen numbers of a type, under a mask.
EQQUANT_INLINE __m512 numbers_at(ScaleType type, const void* from, int64_t i, __mmask16 some) {
  if (type == ScaleType::float32)
    return _mm512_maskz_loadu_ps(some, static_cast<const float*>(from) + i);
  if (size_of(type) == 2) {
    const __m256i halves =
        _mm256_maskz_loadu_epi16(some, static_cast<const uint16_t*>(from) + i);
    if (type == ScaleType::float16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  const __m128i bytes = _mm_maskz_loadu_epi8(some, static_cast<const uint8_t*>(from) + i);
  if (type == ScaleType::float8) return decode_float8(bytes);
  __m512i x = type == ScaleType::int8 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  if (type == ScaleType::exponent) {
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(x, _mm512_set1_epi32(255));
    x = _mm512_mask_mov_epi32(_mm512_slli_epi32(x, 23), nan, _mm512_set1_epi32(0x7FC00000));
    return _mm512_castsi512_ps(x);
  }
  if (type == ScaleType::low_nibble) x = _mm512_and_si512(x, _mm512_set1_epi32(15));
  if (type == ScaleType::high_nibble) x = _mm512_srli_epi32(x, 4);
  return _mm512_cvtepi32_ps(x);
}

// Integers of a byte, or of half a byte, times a float16 number for each 8 or 16 of them, as in K-quants of GGUF.
class IntegersTimesHalves {
  // The bits of an integer in a byte. The bits that turn signed integers into unsigned ones, and the integer that this
  // adds.
  __m128i shift, used, flipped;
  __m512i middle, factor_of_lane;
  int second, log_size;  // The bit of a second factor in a mask, or 0.

 public:
  // True if these numbers are such products, and each row begins with a factor.
  static bool are(const Scales& s, int64_t blocks) {
    const bool are_integers = ScaleType::uint8 <= s.type && s.type <= ScaleType::high_nibble;
    return are_integers && s.outer_type == ScaleType::float16 && (s.outer_blocks == 8 || s.outer_blocks == 16) &&
           blocks % s.outer_blocks == 0;
  }
  explicit IntegersTimesHalves(const Scales& s) {
    const int size = static_cast<int>(s.outer_blocks), added = s.type == ScaleType::int8 ? 128 : 0;
    const bool is_high = s.type == ScaleType::high_nibble, is_half = is_high || s.type == ScaleType::low_nibble;
    shift = _mm_cvtsi32_si128(is_high ? 4 : 0), used = _mm_set1_epi8(is_half ? 15 : -1);
    flipped = _mm_set1_epi8(static_cast<char>(added)), middle = _mm512_set1_epi32(added);
    second = size == 8 ? 2 : 0, log_size = size == 8 ? 3 : 4;
    factor_of_lane = _mm512_mask_mov_epi32(_mm512_setzero_si512(), size == 8 ? 0xFF00 : 0, _mm512_set1_epi32(1));
  }
  // Reads up to sixteen numbers from `i` on, a multiple of the size of a group.
  EQQUANT_INLINE __m512 read(const char* integers, const char* halves, int64_t i, __mmask16 some) const {
    const __m128i stored = _mm_srl_epi16(_mm_maskz_loadu_epi8(some, integers + i), shift);
    const __m128i bytes = _mm_xor_si128(_mm_and_si128(stored, used), flipped);
    const __m512 whole = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), middle));
    const auto groups = static_cast<__mmask8>(1 | (some >> 7 & second));
    const __m128i factors = _mm_maskz_loadu_epi16(groups, half_at(halves, i));
    const __m512 of_groups = _mm512_cvtph_ps(_mm256_castsi128_si256(factors));
    return _mm512_mul_ps(whole, _mm512_permutexvar_ps(factor_of_lane, of_groups));
  }
  EQQUANT_INLINE const char* half_at(const char* halves, int64_t i) const { return halves + (i >> log_size) * 2; }
};

// Stored numbers that few instructions convert to floats.
struct Numbers {
  enum Type { float32, float16, integers };
  Type type;
  const char *from, *factors;  // Only `integers` have factors.
  const IntegersTimesHalves* products;

  // Reads up to sixteen numbers from `i` on, under a mask.
  EQQUANT_INLINE __m512 read(int64_t i, __mmask16 some) const {
    return type == float32 ? floats(i, some) : type == float16 ? halves(i, some) : times_halves(i, some);
  }
  EQQUANT_INLINE __m512 floats(int64_t i, __mmask16 some) const { return _mm512_maskz_loadu_ps(some, from + 4 * i); }
  EQQUANT_INLINE __m512 halves(int64_t i, __mmask16 some) const {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, from + 2 * i));
  }
  EQQUANT_INLINE __m512 times_halves(int64_t i, __mmask16 some) const { return products->read(from, factors, i, some); }
  EQQUANT_INLINE void prefetch(int64_t i) const { __builtin_prefetch(from + (type == float32 ? 4 : 2) * i, 0, 2); }
  EQQUANT_INLINE void prefetch_integers(int64_t i) const {
    __builtin_prefetch(from + i, 0, 2), __builtin_prefetch(products->half_at(factors, i), 0, 2);
  }
};

// The scales, or offsets, of rows that are read in order, up to row `end`. Types that `Numbers` lacks are decoded
// before. With `by_sixteen`, a row is read sixteen blocks at a time.
class NumbersInOrder {
  const Scales& stored;
  const int64_t blocks;
  const Numbers::Type type;
  const IntegersTimesHalves products;
  ScalesInOrder decoded;

 public:
  NumbersInOrder(const Scales& stored, int64_t blocks, int64_t end, bool by_sixteen)
      : stored(stored),
        blocks(blocks),
        type(stored.type == ScaleType::float16 && !stored.outer_blocks ? Numbers::float16
             : by_sixteen && IntegersTimesHalves::are(stored, blocks)  ? Numbers::integers
                                                                       : Numbers::float32),
        products(stored),
        decoded(stored, blocks, end) {}
  Numbers of(int64_t row, int64_t rows) {
    if (type == Numbers::float32) return {type, reinterpret_cast<const char*>(decoded.of(row, rows)), nullptr, nullptr};
    const Scales own = stored.from(row, blocks);
    return {type, static_cast<const char*>(own.inner), static_cast<const char*>(own.outer), &products};
  }
};

// Decodes the scales of up to sixteen blocks, from block `b` of a row on.
EQQUANT_INLINE __m512 scales_at(const Product& p, int64_t row, int64_t b, __mmask16 some) {
  const Scales& s = p.scales;
  const int64_t size = s.outer_blocks;
  const __m512 x = numbers_at(s.type, s.inner, row * p.blocks + b, some);
  if (!size) return x;
  const int64_t outer = row * s.outer_count(p.blocks) + b / size;
  if (size >= p.blocks || (size % 16 == 0 && b % 16 == 0)) {
    const __m512 factor = numbers_at(s.outer_type, s.outer, outer, 1);
    return _mm512_mul_ps(x, _mm512_broadcastss_ps(_mm512_castps512_ps128(factor)));
  }
  if (16 % size == 0 && b % size == 0) {
    const int64_t factors = (__builtin_popcount(some) + size - 1) / size;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index = _mm512_srl_epi32(lanes, _mm_cvtsi64_si128(__builtin_ctzll(size)));
    const __m512 all = numbers_at(s.outer_type, s.outer, outer, first(factors));
    return _mm512_mul_ps(x, _mm512_permutexvar_ps(index, all));
  }
  alignas(64) float scales[16];
  decode_scales(p, row, b, __builtin_popcount(some), scales);
  return _mm512_maskz_load_ps(some, scales);
}

// Returns the larger magnitudes. NaN is the largest.
EQQUANT_INLINE __m512 larger(__m512 most, __m512 x) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(most), magnitude));
}

// Rows of the activation for x @ w. If each row of the weight has one scale, the activation is multiplied by it.
class ScaledActivation {
  Activation activation;
  const bool one_scale;
  const int64_t rows;
  std::vector<float> buffer, scaled;
  const float* const scales;

 public:
  explicit ScaledActivation(const Product& p)
      : activation(p),
        one_scale(p.blocks == 1),
        rows(p.rows),
        buffer(one_scale ? p.scale_buffer(rows) : 0),
        scaled(one_scale ? rows : 0),
        scales(one_scale ? scales_of(p, 0, rows, buffer.data()) : nullptr) {}

  const float* row(int64_t i) {
    const float* const x = activation.row(i);
    if (!one_scale) return x;
    for (int64_t r = 0; r < rows; r++) scaled[r] = x[r] * scales[r];
    return scaled.data();
  }
  // Like `check_row`, for the row that was computed last. If all products with scales are zero, checks the activation.
  float check(const Product& p, int64_t i) {
    if (!one_scale) return check_row(p, activation.row(i));
    const float absmax = check_row(p, scaled.data());
    if (absmax == 0) check_row(p, activation.row(i));
    return absmax;
  }
};

EQQUANT_END
