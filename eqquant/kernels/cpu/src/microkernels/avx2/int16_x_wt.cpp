// int16 x @ w.T, for weights with a scale for each block, in AVX2.
//
// A row of the activation is rounded to int16 with one unit. Codes are decoded to int16 levels in registers, for up to
// two rows of the activation at once, and sums of products are multiplied by the scale of their block.
//
// Sums of products fit into 32 bits, because the norms of both operands are limited (`largest_norm`).
#define EQQUANT_TARGET_AVX2
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "decode/levels.h"
#include "decode/scales.h"
#include "microkernels/avx2/int16_codes.h"
#include "microkernels/avx2/vector.h"
#include "products/by_fours.h"
#include "products/int16_levels.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

// The rows of the activation that are multiplied at once by four rows of the weight: registers hold no more sums.
constexpr int64_t most_at_once = 2;

// A group of rows of the activation is (register, row, lane).
int64_t row_size(const Product& p) { return chunks_of(p) * registers_of(p.bits) * lanes; }
int64_t group_of(const Product& p, int64_t row) {
  return std::min(most_at_once, p.m - row / most_at_once * most_at_once);
}

// Rounds a row of the activation to int16.
void round_row(const Product& p, const float* x, float per_unit, int16_t* row, int64_t stride) {
  if (p.packed % chunk)
    for (int64_t i = 1; i <= registers_of(p.bits); i++)
      store(row + (chunks_of(p) * registers_of(p.bits) - i) * stride, _mm256_setzero_si256());
  const __m256 factor = _mm256_set1_ps(per_unit);
  for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t planar, int64_t length) {
    const int plane = static_cast<int>(planar / p.packed);
    const int64_t byte = planar % p.packed;
    for (int64_t i = 0, count; i < length; i += count) {
      const int64_t j = byte + i;
      count = std::min(8 - j % 8, length - i);
      int16_t* const to = row + place_of(j, plane, p.bits, stride);
      if (count == 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), rounded(_mm256_loadu_ps(x + logical + i), factor));
        continue;
      }
      alignas(16) int16_t some[8];
      const __m256 values = Vector::load(x + logical + i, static_cast<int>(count));
      _mm_store_si128(reinterpret_cast<__m128i*>(some), rounded(values, factor));
      std::memcpy(to, some, count * sizeof(int16_t));
    }
  });
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const int64_t of_sum = registers_of(p.bits);
  // An upper bound for the norm of a lane of the weight.
  const float of_weight = levels_of(p).largest * std::sqrt(2.0f * static_cast<float>(of_sum));
  const float most = largest_norm * largest_norm / of_weight;
  Activation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* const x = activation.row(i);
    const int64_t in_group = i % most_at_once, stride = group_of(p, i) * lanes;
    int16_t* const row = int16_in(scratch) + (i - in_group) * row_size(p) + in_group * lanes;
    const float absmax = check_row(p, x);
    units_in(p, row_size(p), scratch)[i] = round_to_int16(
        absmax, most, [&](float per_unit) { round_row(p, x, per_unit, row, stride); },
        [&] { return norm_of_lanes(row, stride, chunks_of(p) * of_sum, of_sum); });
  }
}

// The operands of all tiles.
struct Operands {
  const Product& p;
  const Levels levels;
  const Tables tables;
  ScalesInOrder scales, offsets;

  Operands(const Product& p, int64_t end)
      : p(p), levels(levels_of(p)), tables(levels.values), scales(p.scales, p.blocks, end),
        offsets(p.offsets, p.blocks, end) {}
};

// `shared` is the number of blocks in a chunk: 1, or a part of one block; 2; or 4. With 4, the two registers of a plane
// belong to different blocks.
template <int bits, int rows, int count, int shared>
struct Tile {
  using Sums = __m256[rows][count];
  static constexpr int parts = shared == 4 ? 2 : 1;

  template <int plane>
  static EQQUANT_INLINE void multiply(const Tables& tables, __m256i codes, const int16_t* x,
                                      __m256i (&products)[parts][count]) {
    __m256i weight[2];
    decode<bits, plane>(tables, codes, weight);
    for (int k = 0; k < 2; k++)
      for (int i = 0; i < count; i++) {
        const __m256i product = _mm256_madd_epi16(weight[k], load(x + ((2 * plane + k) * count + i) * lanes));
        __m256i& of = products[k % parts][i];
        of = plane || k >= parts ? _mm256_add_epi32(of, product) : product;
      }
    if constexpr ((plane + 1) * bits < 8) multiply<plane + 1>(tables, codes, x, products);
  }

  // The scales of a chunk of a row.
  static EQQUANT_INLINE void read_scales(const float* from, __m256 (&scales)[parts]) {
    __m256 all;
    if constexpr (shared == 1) {
      scales[0] = _mm256_broadcast_ss(from);
      return;
    }
    if constexpr (shared == 2) all = _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(from)));
    if constexpr (shared == 4) all = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
    for (int k = 0; k < parts; k++) {
      const int of_second = parts + k;
      scales[k] =
          _mm256_permutevar_ps(all, _mm256_setr_epi32(k, k, k, k, of_second, of_second, of_second, of_second));
    }
  }

  // Multiplies a chunk of each row. Codes of rows are `stride` bytes apart, and scales `stride_of_scales`.
  static EQQUANT_INLINE void step(const Tables& tables, const uint8_t* codes, int64_t stride, const float* scales,
                                  int64_t stride_of_scales, const int16_t* x, Sums& sums) {
    for (int r = 0; r < rows; r++) {
      __m256i products[parts][count];
      multiply<0>(tables, load(codes + r * stride), x, products);
      __m256 of_chunk[parts];
      read_scales(scales + r * stride_of_scales, of_chunk);
      for (int k = 0; k < parts; k++)
        for (int i = 0; i < count; i++)
          sums[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[k][i]), of_chunk[k], sums[r][i]);
    }
  }

  // The part of the offsets. All values of a block share one, so it needs only the sums of the activation.
  static EQQUANT_INLINE void add_offsets(const Product& p, const float* scales, const float* offsets,
                                         int64_t first_of_x, Sums& sums) {
    const int64_t stride = (p.blocks + Vector::size - 1) / Vector::size * Vector::size;
    for (int64_t b = 0; b < p.blocks; b += Vector::size) {
      const int some = static_cast<int>(std::min<int64_t>(Vector::size, p.blocks - b));
      for (int r = 0; r < rows; r++) {
        const int64_t at = r * p.blocks + b;
        const __m256 offset = _mm256_fmadd_ps(Vector::load(scales + at, some), _mm256_set1_ps(p.shift),
                                              Vector::load(offsets + at, some));
        for (int i = 0; i < count; i++)
          sums[r][i] = _mm256_fmadd_ps(offset, _mm256_loadu_ps(p.block_sums + (first_of_x + i) * stride + b),
                                       sums[r][i]);
      }
    }
  }

  // Multiplies rows from `row` on by `count` rows of the activation, from `first_of_x` on.
  static void run(Operands& of, int64_t row, const int16_t* x, const float* units, int64_t first_of_x) {
    const Product& p = of.p;
    const Tables tables = of.tables;  // A local variable, because compilers leave members of arguments in memory.
    const float* const scales = of.scales.of(row, rows);
    const uint8_t* const codes = p.codes + row * p.packed;
    const int64_t block = p.block_bytes(), whole = p.packed / chunk * chunk;
    constexpr int64_t step_of_x = registers_of(bits) * count * lanes;
    Sums sums;
    for (auto& of_row : sums)
      for (auto& sum : of_row) sum = _mm256_setzero_ps();
    const int64_t chunks_of_block = std::max<int64_t>(1, block / chunk);
    const float* from = scales;
    int64_t j = 0;
    for (int64_t left = chunks_of_block; j < whole; j += chunk, x += step_of_x) {
      for (int r = 0; r < rows; r++) prefetch(codes + r * p.packed + j), prefetch_near(codes + r * p.packed + j);
      step(tables, codes + j, p.packed, from, p.blocks, x, sums);
      if (--left == 0) from += shared, left = chunks_of_block;
    }
    if (j < p.packed) {  // Copies, because registers must not read beyond the end.
      if (shared == 1) from = scales;  // There is one block.
      uint8_t last[rows][chunk] = {};
      float of_last[rows][shared] = {};
      for (int r = 0; r < rows; r++) {
        std::copy(codes + r * p.packed + j, codes + (r + 1) * p.packed, last[r]);
        std::copy(from + r * p.blocks, scales + (r + 1) * p.blocks, of_last[r]);
      }
      step(tables, last[0], chunk, of_last[0], shared, x, sums);
    }
    // Do not multiply the units first, because their product may underflow.
    Sums all;  // Not `sums`, which would not stay in registers.
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < count; i++)
        all[r][i] = _mm256_mul_ps(_mm256_mul_ps(sums[r][i], _mm256_set1_ps(of.levels.unit)),
                                  _mm256_set1_ps(units[i]));
    if (p.block_sums) add_offsets(p, scales, of.offsets.of(row, rows), first_of_x, all);
    float* y = p.y + first_of_x * p.rows + row;
    for (int i = 0; i < count; i++, y += p.rows) {
      if constexpr (rows == 4)
        Vector::store(y, Vector::sum_four(all[0][i], all[1][i], all[2][i], all[3][i]));
      else
        for (int r = 0; r < rows; r++) y[r] = Vector::sum(all[r][i]);
    }
  }
};

template <int bits, int shared>
void run_tiles(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  Operands of(p, end);
  char* const from = const_cast<char*>(scratch);  // Only read.
  const int16_t* const x = int16_in(from);
  const float* const units = units_in(p, row_size(p), from);
  by_fours(begin, end, [&](auto rows, int64_t row) {
    for (int64_t i = 0; i < p.m; i += most_at_once)
      with_constant<most_at_once>(static_cast<int>(group_of(p, i)), [&](auto count) {
        Tile<bits, rows, count, shared>::run(of, row, x + i * row_size(p), units + i, i);
      });
  });
}

template <int bits>
void run_bits(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const int64_t block = p.block_bytes();
  if (p.blocks == 1 || block >= chunk) return run_tiles<bits, 1>(p, scratch, begin, end);
  if constexpr (bits == 4)
    if (block < half) return run_tiles<bits, 4>(p, scratch, begin, end);
  run_tiles<bits, 2>(p, scratch, begin, end);
}

int64_t scratch_size(const Product& p) { return scratch_of(p, row_size(p)); }

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_bits(p, [&](auto bits) { run_bits<bits>(p, scratch, begin, end); });
}

bool adds_offsets(const Product&) { return true; }

const char* why_not(const Product& p) {
  if (p.exponent) return "floats of 8 bits need a float kernel";
  const int64_t block = p.block_bytes();
  if (p.blocks == 1 || block % chunk == 0 || block == half || (block == half / 2 && p.bits == 4)) return nullptr;
  return "blocks must have 16 bytes, or 8 bytes of 4-bit codes, or a multiple of 32 bytes";
}

}  // namespace
EQQUANT_END

namespace eqquant {
extern const Routine int16_x_wt_avx2 = {avx2::prepare, avx2::run,     avx2::scratch_size, always<8>,
                                        avx2::why_not, nullptr, avx2::adds_offsets};
}  // namespace eqquant
