// x @ w.T for few rows of the activation and weights with a scale for each block, in AVX2.
//
// Codes are decoded in registers, for up to two rows of the activation at once. Sums of products are multiplied by the
// scale of their block. `Codes` multiplies a chunk of codes, as int16 or int8. It provides:
//
// - `Stored`: reads a chunk of codes
// - `shared`: the number of blocks in a chunk: 1, or a part of one block; 2; or 4
// - `parts`: the number of registers of its products, which differ in their scales
// - `scale_of(part, lane)`: the block of a lane of such a register
// - `registers_of_x`: the registers of a row of the activation that belong to a chunk. Those of several rows alternate.
// - `multiply(tables, codes, x, products)`: the products of a chunk with each row of the activation
// - `scaled(scale, x, count, i)`: the scale of the products with row `i` of `count`
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "decode/scales.h"
#include "microkernels/avx2/vector.h"
#include "products/by_tiles.h"
#include "products/unrolled.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Bytes of a chunk and of its halves, and of a register.
constexpr int64_t chunk = 32, half = 16, of_register = 32;
// The rows of the weight and of the activation that are multiplied at once: registers hold no more sums.
constexpr int rows_together = 4;
constexpr int64_t most_at_once = 2;

inline int64_t chunks_of(const Product& p) { return (p.packed + chunk - 1) / chunk; }
inline int64_t group_of(const Product& p, int64_t row) {
  return std::min(most_at_once, p.m - row / most_at_once * most_at_once);
}
inline int blocks_of_chunk(const Product& p) {
  return p.blocks == 1 || p.block_bytes() >= chunk ? 1 : static_cast<int>(chunk / p.block_bytes());
}

EQQUANT_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
EQQUANT_INLINE void store(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }

// The codes of a plane, one in each byte.
template <int bits, int plane>
EQQUANT_INLINE __m256i code(__m256i codes) {
  const __m256i shifted = plane ? _mm256_srli_epi16(codes, plane * bits) : codes;
  return _mm256_and_si256(shifted, _mm256_set1_epi8((1 << bits) - 1));
}

// Tables of bytes of levels. A lookup reads four bits, which contain several short codes. Each of these has its own
// table, so that codes need fewer shifts.
template <int bits>
struct NibbleTables {
  static constexpr int codes_of_nibble = 4 / bits;
  __m256i of_place[codes_of_nibble];

  // `byte(code)` is the byte of a code.
  template <class Byte>
  explicit NibbleTables(const Byte& byte) {
    for (int place = 0; place < codes_of_nibble; place++) {
      uint8_t bytes[of_register];
      for (int i = 0; i < of_register; i++)
        bytes[i] = static_cast<uint8_t>(byte(i % 16 >> place * bits & ((1 << bits) - 1)));
      of_place[place] = load(bytes);
    }
  }
  // The bytes of the codes of a plane.
  template <int plane>
  EQQUANT_INLINE __m256i look_up(__m256i codes) const {
    return _mm256_shuffle_epi8(of_place[plane % codes_of_nibble], code<4, plane / codes_of_nibble>(codes));
  }
};

// Reads codes that need no unpacking.
struct WholeBytes {
  static constexpr int bytes = chunk;  // The stored bytes of a chunk.

  static int64_t bytes_of_row(const Product& p) { return p.packed; }
  static EQQUANT_INLINE __m256i read(const uint8_t* stored) { return load(stored); }
};

// The operands of all tiles. `units` has a unit for each row of the activation, or is null.
template <class Codes>
struct Operands {
  const Product& p;
  const typename Codes::Tables tables;
  const float unit_of_levels;
  const char* const x;
  const float* const units;
  ScalesInOrder scales, offsets;

  Operands(const Product& p, const typename Codes::Levels& levels, const char* x, const float* units, int64_t end)
      : p(p), tables(levels), unit_of_levels(levels.unit), x(x), units(units), scales(p.scales, p.blocks, end),
        offsets(p.offsets, p.blocks, end) {}
};

template <class Codes, int count>
struct Tile {
  static constexpr int rows = rows_together;
  using Sums = __m256[rows][count];
  using Stored = typename Codes::Stored;
  static constexpr int parts = Codes::parts, shared = Codes::shared;

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
      const auto of = [&](int lane) { return Codes::scale_of(k, lane); };
      scales[k] = _mm256_permutevar_ps(all, _mm256_setr_epi32(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7)));
    }
  }

  // Multiplies a chunk of each row. Codes of rows are `stride` bytes apart, and scales `stride_of_scales`. `far` is for
  // `prefetch`.
  static EQQUANT_INLINE void step(const typename Codes::Tables& tables, const uint8_t* codes, int64_t stride,
                                  int64_t far, const float* scales, int64_t stride_of_scales, const char* x,
                                  Sums& sums) {
    unrolled<rows>([&](auto r) {
      prefetch(codes + r * stride, far), prefetch_near(codes + r * stride);
      __m256i products[parts][count];
      Codes::multiply(tables, Stored::read(codes + r * stride), x, products);
      __m256 of_chunk[parts];
      read_scales(scales + r * stride_of_scales, of_chunk);
      unrolled<parts>([&](auto k) {
        unrolled<count>([&](auto i) {
          sums[r][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[k][i]), Codes::scaled(of_chunk[k], x, count, i),
                                       sums[r][i]);
        });
      });
    });
  }

  // The part of the offsets. All values of a block share one, so it needs only the sums of the activation.
  static EQQUANT_INLINE void add_offsets(const Product& p, const float* scales, const float* offsets,
                                         int64_t first_of_x, Sums& sums) {
    const int64_t stride = (p.blocks + Vector::size - 1) / Vector::size * Vector::size;
    const int64_t whole = p.blocks / Vector::size * Vector::size;
    const auto rest = static_cast<int>(p.blocks - whole);
    const auto add = [&](int64_t b, auto is_whole) {
      unrolled<rows>([&](auto r) {
        const int64_t at = r * p.blocks + b;
        // A masked load takes many times as long with some CPUs (Zen 1).
        const __m256 scale = is_whole ? Vector::load(scales + at) : Vector::load(scales + at, rest);
        const __m256 own = is_whole ? Vector::load(offsets + at) : Vector::load(offsets + at, rest);
        const __m256 offset = _mm256_fmadd_ps(scale, _mm256_set1_ps(p.shift), own);
        unrolled<count>([&](auto i) {
          const __m256 of_x = _mm256_loadu_ps(p.block_sums + (first_of_x + i) * stride + b);
          sums[r][i] = _mm256_fmadd_ps(offset, of_x, sums[r][i]);
        });
      });
    };
    for (int64_t b = 0; b < whole; b += Vector::size) add(b, std::true_type());
    if (rest) add(whole, std::false_type());
  }

  // Multiplies rows from `row` on by `count` rows of the activation, from `first_of_x` on.
  static void run(Operands<Codes>& of, int64_t row, int64_t first_of_x) {
    constexpr int64_t step_of_x = Codes::registers_of_x * of_register;
    const Product& p = of.p;
    const auto tables = of.tables;  // A local variable, because compilers leave members of arguments in memory.
    const float* const scales = of.scales.of(row, rows);
    const int64_t row_bytes = Stored::bytes_of_row(p);
    const uint8_t* const codes = p.codes + row * row_bytes;
    const int64_t far = p.far_from(codes);
    const char* x = of.x + first_of_x * chunks_of(p) * step_of_x;
    // Registers must not read beyond the last row.
    const int64_t readable = row_bytes - (Stored::bytes < chunk && row + rows == p.rows ? 1 : 0);
    const int64_t block = p.block_bytes(), whole = readable / Stored::bytes * Stored::bytes;
    Sums sums;
    unrolled<rows>([&](auto r) { unrolled<count>([&](auto i) { sums[r][i] = _mm256_setzero_ps(); }); });
    const int64_t chunks_of_block = std::max<int64_t>(1, block / chunk);
    const float* from = scales;
    int64_t j = 0;
    for (int64_t left = chunks_of_block; j < whole; j += Stored::bytes, x += count * step_of_x) {
      step(tables, codes + j, row_bytes, far, from, p.blocks, x, sums);
      if (--left == 0) from += shared, left = chunks_of_block;
    }
    Sums all;  // Not `sums`, which would not stay in registers.
    unrolled<rows>([&](auto r) { unrolled<count>([&](auto i) { all[r][i] = sums[r][i]; }); });
    if (j < row_bytes) {  // Copies, because registers must not read beyond the end.
      if (p.blocks == 1) from = scales;
      uint8_t last[rows][chunk] = {};
      float of_last[rows][shared] = {};
      for (int r = 0; r < rows; r++) {
        std::copy(codes + r * row_bytes + j, codes + (r + 1) * row_bytes, last[r]);
        std::copy(from + r * p.blocks, scales + (r + 1) * p.blocks, of_last[r]);
      }
      step(tables, last[0], chunk, far, of_last[0], shared, x, all);
    }
    // Do not multiply the units first, because their product may underflow.
    for (int i = 0; i < count; i++) {
      const __m256 unit = _mm256_set1_ps(of.units ? of.units[first_of_x + i] : 1);
      for (int r = 0; r < rows; r++)
        all[r][i] = _mm256_mul_ps(_mm256_mul_ps(all[r][i], _mm256_set1_ps(of.unit_of_levels)), unit);
    }
    if (p.block_sums) add_offsets(p, scales, of.offsets.of(row, rows), first_of_x, all);
    float* y = p.y + first_of_x * p.rows + row;
    for (int i = 0; i < count; i++, y += p.rows)
      Vector::store(y, Vector::sum_four(all[0][i], all[1][i], all[2][i], all[3][i]));
  }
};

// Multiplies rows `begin` to `end` of the weight by all rows of the activation.
template <class Codes>
void run_tiles(const Product& p, const typename Codes::Levels& levels, const char* x, const float* units,
               int64_t begin, int64_t end) {
  Operands<Codes> of(p, levels, x, units, end);
  by_tiles<rows_together>(begin, end, [&](int64_t row) {
    for (int64_t i = 0; i < p.m; i += most_at_once)
      with_constant<most_at_once>(static_cast<int>(group_of(p, i)),
                                  [&](auto count) { Tile<Codes, count>::run(of, row, i); });
  });
}

// Calls `use(bits, shared)` with the numbers of bits and of blocks in a chunk as compile-time constants.
template <class Use>
void with_layout(const Product& p, const Use& use) {
  with_bits(p, [&](auto bits) {
    switch (blocks_of_chunk(p)) {
      case 1: return use(bits, std::integral_constant<int, 1>());
      case 2: return use(bits, std::integral_constant<int, 2>());
      default:
        if constexpr (bits == 4) use(bits, std::integral_constant<int, 4>());
    }
  });
}

// Returns the reason against a product, or null.
inline const char* why_not_in_chunks(const Product& p) {
  if (p.exponent) return "floats of 8 bits need a float kernel";
  if (p.rows < rows_of_tile) return "there must be at least 8 rows";
  const int64_t block = p.block_bytes();
  if (p.blocks == 1 || block % chunk == 0 || block == half || (block == half / 2 && p.bits == 4)) return nullptr;
  return "blocks must have 16 bytes, or 8 bytes of 4-bit codes, or a multiple of 32 bytes";
}

inline bool adds_offsets(const Product&) { return true; }

EQQUANT_END
