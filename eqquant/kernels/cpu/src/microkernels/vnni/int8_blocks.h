// int8x2 x @ w.T for many rows of the activation and codes of 8 bits in blocks, in AVX-512 VNNI. Codes are not rounded:
// the sum of each block is multiplied by the scale of the block.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "decode/scales.h"
#include "microkernels/vnni/int8_panel.h"
#include "products/int8_x_wt.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace by_blocks {

constexpr int parts = 2;

// True if blocks are long enough for the work at the end of each. For one part of the activation, rounding rows of the
// weight to integers with a common step is faster.
inline bool serves(const Product& p) {
  return p.parts == parts && p.bits == 8 && !p.exponent && p.blocks > 1 && p.block_bytes() >= limits::int8_long_block &&
         p.block_bytes() % 4 == 0;
}

// Behind the int8 rows of the activation and their units: the corrections of the sums, (int8 row, block). Weights have
// an offset, because the instruction reads them as unsigned.
inline int64_t corrections_of(const Product& p) { return p.m * parts * p.blocks; }
inline int64_t scratch_size(const Product& p) {
  return EQQUANT_NAMESPACE::scratch_size(p) + 64 + corrections_of(p) * int64_t{sizeof(int32_t)};
}
inline int32_t* corrections_in(const Product& p, char* scratch) {
  return reinterpret_cast<int32_t*>(scratch + (EQQUANT_NAMESPACE::scratch_size(p) + 63) / 64 * 64);
}

inline void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  EQQUANT_NAMESPACE::prepare(p, scratch, begin, end);
  const Layout layout(p);
  const int64_t block = p.block_bytes();
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(Int8Vector::middle));
  for (int64_t i = begin * parts; i < end * parts; i++) {
    const int8_t* x = int8_in(scratch) + i * layout.row;
    int32_t* const to = corrections_in(p, scratch) + i * p.blocks;
    for (int64_t b = 0; b < p.blocks; b++, x += block) {
      __m512i sum = _mm512_setzero_si512();
      for (int64_t j = 0; j < block; j += 64)
        sum = _mm512_dpbusd_epi32(sum, offset, Int8Vector::load(x + j, block - j));
      to[b] = -_mm512_reduce_add_epi32(sum);
    }
  }
}

// The results of some rows of the activation by the rows of a panel: (row of the activation, vector, lane).
struct alignas(64) Results {
  float of[Panel::most_at_once][Panel::most_vectors * Panel::lanes];
};

// Adds the sums of a block, which are (int8 row, vector, lane), times the `scales` of the lanes.
inline void add_block(const uint32_t* totals, const int32_t* corrections, int64_t blocks, const float* scales,
                      int count, int vectors, Results& results) {
  const auto sum = [&](int row, int v) {
    const __m512i total = _mm512_load_si512(totals + (row * vectors + v) * Panel::lanes);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(total, _mm512_set1_epi32(corrections[row * blocks])));
  };
  for (int i = 0; i < count / parts; i++)
    for (int v = 0; v < vectors; v++) {
      const __m512 low = sum(i * parts + 1, v);
      const __m512 of = _mm512_fmadd_ps(low, _mm512_set1_ps(1 / low_per_high), sum(i * parts, v));
      float* const to = results.of[i] + v * Panel::lanes;
      _mm512_store_ps(to, _mm512_fmadd_ps(of, _mm512_load_ps(scales + v * Panel::lanes), _mm512_load_ps(to)));
    }
}

inline void run(const Product& p, const char* scratch_of_product, int64_t begin, int64_t end) {
  char* const scratch = const_cast<char*>(scratch_of_product);  // Only read.
  constexpr int lanes = Panel::lanes;
  const Layout layout(p);
  const int8_t* const x = int8_in(scratch);
  const RowUnit* const units = units_in(p, layout, scratch);
  const int32_t* const corrections = corrections_in(p, scratch);
  const int64_t block = p.block_bytes(), count = p.m * parts;
  const int vectors_of_panel = Panel::vectors_for(layout.length), at_once = lanes * vectors_of_panel;
  // An even number of int8 rows, so that both parts of a row are multiplied at once.
  const int64_t in_turn =
      std::max<int64_t>(1, Panel::cached_bytes / layout.row / Panel::most_at_once) * Panel::most_at_once;
  // Includes space for writes beyond the last row.
  std::vector<Register> decoded(lanes * layout.length / Int8Vector::size + 1);
  Panel panel(at_once * layout.length);
  std::vector<float> buffer(p.scale_buffer(at_once));
  std::vector<Panel::Vector> of_blocks(p.blocks * vectors_of_panel);  // (block, vector, lane)
  float* const scales = reinterpret_cast<float*>(of_blocks.data());
  for (int64_t first = 0; first < count; first += in_turn)
    for (int64_t row = begin; row < end; row += at_once) {
      const int rows = static_cast<int>(std::min<int64_t>(at_once, end - row));
      const int vectors = (rows + lanes - 1) / lanes;
      const float* const stored = scales_of(p, row, rows, buffer.data());
      for (int r = 0; r < rows; r++) {
        for (int64_t b = 0; b < p.blocks; b++) scales[b * vectors * lanes + r] = stored[r * p.blocks + b];
        decode_row<8>(p, Bytes{}, p.codes + (row + r) * p.packed, decoded[0].bytes + r % lanes * layout.length,
                      layout.plane);
        if (r % lanes == lanes - 1 || r == rows - 1)
          panel.take(decoded[0].bytes, layout.length, r / lanes, vectors);
      }
      const int64_t last = std::min(count, first + in_turn);
      for (int64_t i = first; i < last; i += Panel::most_at_once) {
        alignas(64) uint32_t totals[Panel::most_at_once * lanes * Panel::most_vectors];
        Results results = {};
        const int some = static_cast<int>(std::min<int64_t>(Panel::most_at_once, last - i));
        for (int64_t b = 0; b < p.blocks; b++) {
          panel.multiply(vectors, x + i * layout.row + b * block, layout.row, block, some, totals, b * block);
          add_block(totals, corrections + i * p.blocks + b, p.blocks, scales + b * vectors * lanes, some, vectors,
                    results);
        }
        for (int64_t k = 0; k < some / parts; k++) {
          const int64_t m = i / parts + k;
          float* const to = p.y + m * p.rows + row;
          for (int r = 0; r < rows; r++) to[r] = results.of[k][r] * units[m].unit;
        }
      }
    }
}

}  // namespace by_blocks
EQQUANT_END
