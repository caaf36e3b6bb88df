// int8 x @ w.T for one or two rows of the activation and tables with a scale for each block, in AVX-512 VNNI.
//
// A lookup in registers decodes codes to int8 levels. The activation is rounded to int8 with a unit for each block of
// the weight, at most 64 bytes of its codes. Sums of products are multiplied by both units.
//
// Levels have an offset, because the instruction reads them as unsigned. Sums start with the correction. Integer codes
// are such levels, and need no lookup.
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

// Levels as unsigned bytes: a level is `unit` times the difference of its byte and `zero`. The unit is the largest level
// over 127, or the common divisor of the levels.
struct Levels {
  alignas(16) uint8_t values[16] = {};
  float unit;
  int zero = Int8Vector::middle;
  bool are_codes;  // True if the byte of each code is the code, so that no lookup is needed.

  explicit Levels(const Product& p) {
    const float most = largest_level(p);
    unit = p.level_unit > 0 && most <= 127 * p.level_unit ? p.level_unit : most / 127;
    const float per_unit = unit > 0 && std::isfinite(1 / unit) ? 1 / unit : 0;
    int whole[16];
    for (int i = 0; i < 16; i++) whole[i] = static_cast<int>(std::lrint(p.levels[i] * per_unit));
    are_codes = whole[0] <= 0;
    for (int i = 1; i < 1 << p.bits; i++) are_codes &= whole[i] == whole[0] + i;
    if (are_codes) zero = -whole[0];
    for (int i = 0; i < 16; i++) values[i] = static_cast<uint8_t>(whole[i] + zero);
  }
};

// A row of the activation, whose values are read in the order of the planes.
class Planes {
  const int64_t packed, step;
  int64_t run;
  const float* x;
  std::vector<float> in_order;

 public:
  const int planes;

  // Up to `step` values of a plane are read at once.
  Planes(const Product& p, const float* row, int64_t step)
      : packed(p.packed), step(step), run(p.run), x(row), planes(p.planes()) {
    if (run % step == 0) return;
    in_order.resize(p.columns());
    for_each_run(p, 0, packed, [&](int64_t logical, int64_t position, int64_t length) {
      std::memcpy(&in_order[position], row + logical, length * sizeof(float));
    });
    x = in_order.data(), run = packed;
  }
  // Calls `use(values, plane)` for the values of each plane from a byte on.
  template <class Use>
  EQQUANT_INLINE void read(int64_t byte, const Use& use) const {
    const __mmask16 some = first(std::clamp<int64_t>(packed - byte, 0, step));
    const float* const from = x + byte / run * run * planes + byte % run;
    for (int plane = 0; plane < planes; plane++) use(_mm512_maskz_loadu_ps(some, from + plane * run), plane);
  }
};

// The activation is (chunk, register, row, 64 bytes): a register of int8 for each plane, then the correction and the
// unit of each lane.
inline int64_t scratch_size(const Product& p) {
  return p.m > most_rows ? 0 : p.m * chunks_of(p) * (p.planes() + 2) * chunk;
}

// Rounds the values of a chunk, and writes one register for each plane, `stride` bytes apart. `group` values of each
// plane share a unit.
inline void round_chunk(const Planes& x, int64_t byte, int64_t group, int64_t step, const Units* common, int zero,
                        char* to, int64_t stride) {
  alignas(64) float units[16];
  for (int64_t begin = 0; begin < chunk; begin += group) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t i = begin; !common && i < begin + group; i += step)
      x.read(byte + i, [&](__m512 values, int) { most = larger(most, values); });
    const auto largest = _mm512_reduce_max_epi32(_mm512_castps_si512(most));  // NaN is the largest.
    const Units of = common ? *common : Units(_mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest))), 127);
    for (int64_t i = begin; i < begin + group; i += 4) units[i / 4] = of.unit;
    const __m512 factor = _mm512_set1_ps(of.per_unit);
    for (int64_t i = begin; i < begin + group; i += step)
      x.read(byte + i, [&](__m512 values, int plane) {
        const __m128i rounded = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(values, factor)));
        char* const bytes = to + plane * stride + i;
        // A masked store takes many times as long.
        step < 16 ? std::memcpy(bytes, &rounded, step) : std::memcpy(bytes, &rounded, 16);
      });
  }
  __m512i correction = _mm512_setzero_si512();
  for (int plane = 0; plane < x.planes; plane++)
    correction = _mm512_dpbusd_epi32(correction, _mm512_set1_epi8(static_cast<char>(zero)),
                                     _mm512_loadu_si512(to + plane * stride));
  _mm512_storeu_si512(to + x.planes * stride, _mm512_sub_epi32(_mm512_setzero_si512(), correction));
  _mm512_storeu_ps(to + (x.planes + 1) * stride, _mm512_load_ps(units));
}

inline void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const int64_t group = p.blocks > 1 ? std::min(chunk, p.block_bytes()) : chunk, step = std::min<int64_t>(group, 16);
  const int zero = Levels(p).zero;
  Activation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* const row = activation.row(i);
    const Units common(check_row(p, row), 127);
    const Planes x(p, row, step);
    const int64_t stride = p.m * chunk;
    char* to = scratch + i * chunk;
    for (int64_t c = 0; c < chunks_of(p); c++, to += (x.planes + 2) * stride)
      round_chunk(x, c * chunk, group, step, p.rounds_x ? &common : nullptr, zero, to, stride);
  }
}

// The operands of all tiles.
struct Operands {
  const Levels levels;
  const ChunkScales blocks;
  const WholeBytes stored;
  NumbersInOrder scales;
  RowOffsets offsets;

  Operands(const Product& p, int64_t end)
      : levels(p), blocks(p), stored(p), scales(p.scales, p.blocks, end), offsets(p, end) {}
};

template <int bits, int rows, int count, bool looks_up>
struct Tile {
  static constexpr int planes = 8 / bits;

  template <int plane>
  static EQQUANT_INLINE void multiply(__m512i table, const __m512i* codes, const char* x, __m512i (&sums)[rows][count]) {
    __m512i weight[rows];
    for (int r = 0; r < rows; r++)
      weight[r] = looks_up ? Int8Vector::template decode<bits, plane>(table, codes[r])
                           : Int8Vector::template code<bits, plane>(codes[r]);
    for (int i = 0; i < count; i++) {
      const __m512i some = _mm512_loadu_si512(x + (plane * count + i) * chunk);
      for (int r = 0; r < rows; r++) sums[r][i] = Int8Vector::add_in_tile(sums[r][i], weight[r], some);
    }
    if constexpr (plane + 1 < planes) multiply<plane + 1>(table, codes, x, sums);
  }

  // Multiplies rows from `row` on by the activation `x`.
  static void run(const Product& p, Operands& from, int64_t row, const char* x) {
    BlockedRows<rows, WholeBytes> weights(p, from.levels.unit, from.blocks, from.stored, from.scales, row);
    const __m512i table = Int8Vector::table(from.levels.values);
    int64_t chunks = chunks_of(p);
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
    __m512 all[rows][count];  // Not `totals`, which would not stay in registers.
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < count; i++) all[r][i] = _mm512_mul_ps(totals[r][i], _mm512_set1_ps(weights.unit_of(r)));
    from.offsets.add(row, weights.scales, 0, all);
    float* y = p.y + row;
    for (int i = 0; i < count; i++, y += p.rows) {
      alignas(16) float of[4];
      if constexpr (rows == 4)
        _mm_store_ps(of, Vector::sum_four(all[0][i], all[1][i], all[2][i], all[3][i]));
      else
        for (int r = 0; r < rows; r++) of[r] = Vector::sum(all[r][i]);
      std::memcpy(y, of, rows * sizeof(float));
    }
  }
};

inline void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  Operands from(p, end);
  const auto multiply = [&](auto bits, auto count, auto looks_up) {
    by_fours(begin, end, [&](auto rows, int64_t row) {
      Tile<bits, rows, count, looks_up>::run(p, from, row, scratch);
    });
  };
  with_bits(p, [&](auto bits) {
    if constexpr (bits < 8)
      with_constant<most_rows>(static_cast<int>(p.m), [&](auto count) {
        from.levels.are_codes ? multiply(bits, count, std::false_type()) : multiply(bits, count, std::true_type());
      });
  });
}

}  // namespace few_rows
EQQUANT_END
