// int8 x @ w.T by AMX tiles, for codes of 8 bits in long blocks.
//
// Codes are tiles as they are, and are not rounded: the sums of each block are multiplied by its scale. Otherwise a row
// is rounded relative to its largest value, which takes longer than its products with a hundred rows of the activation.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "decode/scales.h"
#include "microkernels/amx/int8_parts.h"
#include "microkernels/amx/tiles.h"
#include "microkernels/amx/x_wt.h"
#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/transpose.h"
#include "runtime/limits.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// True if blocks are whole steps. One part of the activation needs few operations per block, so that with many rows,
// rounding takes less time than the sums of all blocks.
inline bool in_exact_blocks(const Product& p) {
  const int64_t block = p.block_bytes();
  if (p.bits != 8 || p.exponent || p.blocks == 1) return false;
  if (block < limits::int8_long_block || block % tile_bytes != 0) return false;
  return p.parts > 1 || p.m <= limits::tiles_of_blocks * block;
}

// The results of a tile, before they are multiplied by the units of the activation.
struct alignas(64) Totals {
  float of[tile_rows][tile_bytes / 4];  // (row of the weight, row of the activation)
};

// Adds the sums of a block, times the `scales` of the rows, which are `stride` apart.
inline void add_block(const int32_t (&high)[tile_rows][16], const int32_t (&low)[tile_rows][16], int parts,
                      const float* scales, int64_t stride, int rows, Totals& totals) {
  for (int r = 0; r < rows; r++) {
    const __m512 by = _mm512_set1_ps(scales[r * stride]);
    float* const to = totals.of[r];
    _mm512_store_ps(to, _mm512_fmadd_ps(sum_of(high[r], low[r], parts), by, _mm512_load_ps(to)));
  }
}

// Writes the results of rows from `row` on by sixteen rows of the activation from `i` on, which have `units`.
inline void write(const Product& p, const Totals& totals, const float* units, int64_t i, int64_t row, int rows) {
  const __m512 of_x = _mm512_loadu_ps(units + i);
  __m512i y[16];
  for (int r = 0; r < 16; r++) y[r] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(totals.of[r]), of_x));
  transpose(y);
  for (int64_t k = 0; k < std::min<int64_t>(16, p.m - i); k++)
    _mm512_mask_storeu_ps(p.y + (i + k) * p.rows + row, first(rows), _mm512_castsi512_ps(y[k]));
}

// `units` are those of the rows of the activation, whose tiles are in `scratch`.
inline void run_blocks(const Product& p, const Layout<int8_t>& layout, const char* scratch, const float* units,
                       int64_t begin, int64_t end) {
  const bool split = p.parts > 1;
  const int64_t block = p.block_bytes(), tiles = tiles_of(p), step = p.parts * tile_rows * tile_bytes;
  const int64_t in_turn = std::max<int64_t>(2, cached_bytes / layout.tiles() / 2 * 2);
  const Configured configured;
  Sums sums;
  std::vector<Totals> totals(2 * (std::min(tiles, in_turn) + 1));  // (tile of the activation, half)
  std::vector<float> buffer(p.scale_buffer(weight_rows));
  std::vector<uint8_t> last_rows;
  for (int64_t from = 0; from < tiles; from += in_turn)
    for (int64_t row = begin; row < end; row += weight_rows) {
      const int rows = static_cast<int>(std::min<int64_t>(weight_rows, end - row));
      const int64_t to = std::min(tiles, from + in_turn), following = row + weight_rows;
      const float* const scales = scales_of(p, row, rows, buffer.data());
      const uint8_t* codes = p.codes + row * p.packed;
      if (rows < weight_rows) {  // Tiles have all rows.
        last_rows.resize(weight_rows * p.packed);
        std::copy(codes, codes + rows * p.packed, last_rows.begin());
        codes = last_rows.data();
      }
      std::fill(totals.begin(), totals.end(), Totals{});
      for (int64_t b = 0; b < p.blocks; b++) {
        Ahead ahead{p.codes + following * p.packed + b * block, p.packed, block,
                    std::min<int64_t>(weight_rows, end - following)};
        for (int64_t t = from; t < to; t += split ? 1 : 2) {
          const bool two = split || t + 1 < to;
          const auto product = two ? multiply<int8_t, true, true, false, Ahead&>
                                   : multiply<int8_t, true, false, false, Ahead&>;
          const char* const w = reinterpret_cast<const char*>(codes) + b * block;
          const char* const x = scratch + t * layout.tiles() + b * block / tile_bytes * step;
          const int64_t next = split ? tile_rows * tile_bytes : layout.tiles();
          product({w, p.packed, tile_bytes, tile_rows * p.packed, 0}, {x, tile_bytes, step, next, 0},
                  block / tile_bytes, ahead, sums);
          for (int half = 0; half < 2; half++)
            for (int tile = 0; tile < (two && !split ? 2 : 1); tile++)
              add_block(sums.of[half][tile], sums.of[half][1], p.parts, scales + half * tile_rows * p.blocks + b,
                        p.blocks, std::clamp(rows - half * tile_rows, 0, tile_rows),
                        totals[2 * (t + tile - from) + half]);
        }
      }
      for (int64_t t = from; t < to; t++)
        for (int half = 0; half < 2; half++)
          if (const int some = rows - half * tile_rows; some > 0)
            write(p, totals[2 * (t - from) + half], units, t * tile_rows, row + half * tile_rows, some);
    }
}

EQQUANT_END
