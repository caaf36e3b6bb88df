// int8 x @ w.T for one or two rows of the activation and tables with a scale for each block, in AVX-512 VNNI.
//
// A lookup in registers decodes codes to int8 levels. The activation is rounded to int8 with a unit for each block of
// the weight, at most 64 bytes of its codes. Sums of products are multiplied by both units.
//
// Levels have an offset, because the instruction reads them as unsigned. Sums start with the correction.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "decode/levels.h"
#include "decode/scales.h"
#include "microkernels/avx512/dense_codes.h"
#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/scales.h"
#include "microkernels/avx512/vector.h"
#include "microkernels/vnni/blocked_rows.h"
#include "microkernels/vnni/int8_vector.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace few_rows {

// The most rows of the activation: with four rows of the weight, registers hold no more sums.
constexpr int most_rows = 2;

// True if this is faster than rounding rows of the weight to int8.
inline bool serves(const Product& p) {
  return p.parts == 1 && p.m <= most_rows && p.bits < 8 && !is_exact_int8(p) && p.fits_in_lanes(chunk);
}

// The activation is (chunk, register, row, 64 bytes): a register of int8 for each plane, then the correction and the
// unit of each lane.
inline int64_t scratch_size(const Product& p) {
  return p.m > most_rows ? 0 : p.m * chunks_of(p) * (p.planes() + 2) * chunk;
}

// Rounds the values of a chunk, `planes` registers `stride` bytes apart. `group` values of each plane share a unit.
inline void round_chunk(const float* x, int planes, int64_t group, const Units* common, char* to, int64_t stride) {
  alignas(64) float units[16];
  const int64_t step = std::min<int64_t>(group, 16);
  const __mmask16 some = first(step);
  for (int64_t begin = 0; begin < chunk; begin += group) {
    const auto for_each = [&](auto use) {
      for (int plane = 0; plane < planes; plane++)
        for (int64_t i = begin; i < begin + group; i += step)
          use(_mm512_maskz_loadu_ps(some, x + plane * chunk + i), to + plane * stride + i);
    };
    __m512 most = _mm512_setzero_ps();
    if (!common) for_each([&](__m512 values, char*) { most = larger(most, values); });
    const auto largest = _mm512_reduce_max_epi32(_mm512_castps_si512(most));  // NaN is the largest.
    const Units of = common ? *common : Units(_mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest))), 127);
    for (int64_t i = begin; i < begin + group; i += 4) units[i / 4] = of.unit;
    const __m512 factor = _mm512_set1_ps(of.per_unit);
    for_each([&](__m512 values, char* bytes) {
      const __m128i rounded = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(values, factor)));
      // A masked store takes many times as long.
      step < 16 ? std::memcpy(bytes, &rounded, step) : std::memcpy(bytes, &rounded, 16);
    });
  }
  __m512i correction = _mm512_setzero_si512();
  for (int plane = 0; plane < planes; plane++)
    correction = _mm512_dpbusd_epi32(correction, _mm512_set1_epi8(static_cast<char>(Int8Vector::middle)),
                                     _mm512_loadu_si512(to + plane * stride));
  _mm512_storeu_si512(to + planes * stride, _mm512_sub_epi32(_mm512_setzero_si512(), correction));
  _mm512_storeu_ps(to + (planes + 1) * stride, _mm512_load_ps(units));
}

inline void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const int planes = p.planes();
  const int64_t group = p.blocks > 1 ? std::min(chunk, p.block_bytes()) : chunk;
  std::vector<float> planar(chunks_of(p) * planes * chunk);
  Activation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = activation.row(i);
    const float absmax = check_row(p, x);
    const Units common(absmax, 127);
    for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t position, int64_t length) {
      const int64_t plane = position / p.packed, byte = position % p.packed;
      for (int64_t j = byte, count; j < byte + length; j += count) {
        count = std::min(chunk - j % chunk, byte + length - j);
        std::memcpy(&planar[(j / chunk * planes + plane) * chunk + j % chunk], x + logical + (j - byte),
                    count * sizeof(float));
      }
    });
    const int64_t stride = p.m * chunk;
    char* to = scratch + i * chunk;
    for (int64_t c = 0; c < chunks_of(p); c++, to += (planes + 2) * stride)
      round_chunk(&planar[c * planes * chunk], planes, group, p.rounds_x ? &common : nullptr, to, stride);
  }
}

// The levels as bytes, with their offset. A step is the largest level over 127, or the common divisor of the levels.
struct Levels {
  alignas(16) uint8_t values[16] = {};
  float unit = 1;

  explicit Levels(const Product& p) {
    const float most = largest_level(p);
    unit = p.level_unit > 0 && most <= 127 * p.level_unit ? p.level_unit : most / 127;
    const float per_unit = unit > 0 && std::isfinite(1 / unit) ? 1 / unit : 0;
    for (int i = 0; i < 16; i++)
      values[i] = static_cast<uint8_t>(std::lrint(p.levels[i] * per_unit) + Int8Vector::middle);
  }
};

template <int bits, int rows, int count>
struct Tile {
  static constexpr int planes = 8 / bits;

  template <int plane>
  static EQQUANT_INLINE void multiply(__m512i table, const __m512i* codes, const char* x, __m512i (&sums)[rows][count]) {
    __m512i weight[rows];
    for (int r = 0; r < rows; r++) weight[r] = Int8Vector::template decode<bits, plane>(table, codes[r]);
    for (int i = 0; i < count; i++) {
      const __m512i some = _mm512_loadu_si512(x + (plane * count + i) * chunk);
      for (int r = 0; r < rows; r++) sums[r][i] = Int8Vector::add_in_tile(sums[r][i], weight[r], some);
    }
    if constexpr (plane + 1 < planes) multiply<plane + 1>(table, codes, x, sums);
  }

  // Multiplies by `count` rows of the activation `x`, and writes the results to `y`.
  static void run(const BlockedRows<rows, WholeBytes>& first, __m512i table, const char* x, int64_t chunks, float* y,
                  int64_t y_stride) {
    // A local copy, because compilers leave members of arguments in memory.
    BlockedRows<rows, WholeBytes> weights = first;
    __m512 totals[rows][count];
    for (auto& of_row : totals)
      for (auto& total : of_row) total = _mm512_setzero_ps();
    do {  // At least one iteration: a loop that may be empty compiles to slower code.
      weights.read();
      __m512i sums[rows][count];
      for (int i = 0; i < count; i++) {
        const __m512i correction = _mm512_loadu_si512(x + (planes * count + i) * chunk);
        for (int r = 0; r < rows; r++) sums[r][i] = correction;
      }
      multiply<0>(table, weights.of, x, sums);
      for (int i = 0; i < count; i++) {
        const __m512 units = _mm512_loadu_ps(x + ((planes + 1) * count + i) * chunk);
        for (int r = 0; r < rows; r++)
          totals[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][i]), _mm512_mul_ps(weights.scale(r), units),
                                         totals[r][i]);
      }
      weights.next();
      x += (planes + 2) * count * chunk;
    } while (--chunks);
    for (int i = 0; i < count; i++, y += y_stride)
      for (int r = 0; r < rows; r++) y[r] = Vector::sum(totals[r][i]) * weights.unit_of(r);
  }
};

inline void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const Levels levels(p);
  const ChunkScales blocks(p);
  const WholeBytes stored(p);
  const __m512i table = Int8Vector::table(levels.values);
  ScalesInOrder scales(p, end);
  by_fours(begin, end, [&](auto rows, int64_t row) {
    const BlockedRows<rows, WholeBytes> weights(p, levels.unit, blocks, stored, scales, row);
    with_bits(p, [&](auto bits) {
      with_constant<most_rows>(static_cast<int>(p.m), [&](auto count) {
        if constexpr (bits < 8)
          Tile<bits, rows, count>::run(weights, table, scratch, chunks_of(p), p.y + row, p.rows);
      });
    });
  });
}

}  // namespace few_rows
EQQUANT_END
