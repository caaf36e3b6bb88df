// Codes of some rows, with the scale of each block, in AVX-512 VNNI.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "decode/scales.h"
#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/scales.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

constexpr int64_t chunk = 64;  // Bytes of codes.

inline int64_t chunks_of(const Product& p) { return (p.packed + chunk - 1) / chunk; }

// The scales of a row, chunk by chunk. A chunk has `of_chunk` blocks, or a block has `chunks_of_block` chunks.
struct ChunkScales {
  // Double quantization has an exponent for 256 blocks.
  static constexpr int64_t blocks_of_exponent = 256;
  // `exponents` are the exponents of a row; 0 for other types of scales.
  int64_t blocks, of_chunk, chunks_of_block, exponents;
  // The index of the scale of each lane, and the number of scales per chunk.
  __m512i lanes, step;

  explicit ChunkScales(const Product& p)
      : blocks(p.blocks),
        of_chunk(blocks > 1 ? std::max<int64_t>(1, chunk / p.block_bytes()) : 1),
        chunks_of_block(std::max<int64_t>(1, (p.block_bytes() + chunk - 1) / chunk)),
        exponents(p.scales.type == ScaleType::uint8 && p.scales.outer_type == ScaleType::exponent &&
                          p.scales.outer_blocks == blocks_of_exponent
                      ? p.scales.outer_count(blocks)
                      : 0) {
    alignas(64) int32_t of[16];
    for (int i = 0; i < 16; i++) of[i] = static_cast<int32_t>(i * of_chunk / 16);
    lanes = _mm512_load_si512(of);
    step = _mm512_set1_epi32(static_cast<int>(of_chunk));
  }
  // Reads the scales of a chunk with the first block `block`.
  EQQUANT_INLINE __m512 read(const float* scales, int64_t block) const {
    const __mmask16 some = first(std::min(of_chunk, blocks - block));
    return _mm512_permutexvar_ps(lanes, _mm512_maskz_loadu_ps(some, scales + block));
  }
};
struct Place {
  int64_t block, chunks;

  Place(const ChunkScales& of, int64_t c)
      : block(c / of.chunks_of_block * of.of_chunk), chunks(c % of.chunks_of_block) {}
  EQQUANT_INLINE void next(const ChunkScales& of) {
    if (++chunks == of.chunks_of_block) block += of.of_chunk, chunks = 0;
  }
};

// Reads `rows` rows chunk by chunk: codes in `of`, and a scale for each lane.
template <int rows, class Stored>
struct BlockedRows {
  static constexpr int64_t scales_at_once = 16;
  const ChunkScales& blocks;
  const Stored stored;
  const uint8_t* codes;
  int64_t row_bytes, far, left;  // Stored bytes of a row, how far to prefetch, and remaining unpacked bytes.
  Numbers scales;           // Unused for `integers` times powers of two, which are read as they are stored.
  const uint8_t *integers, *exponents;
  Place place;
  __m512i lanes, of[rows];
  __m512 some_scales[rows];
  alignas(16) float units[4];

  // Always inlined: otherwise the members of a local variable stay in memory.
  EQQUANT_INLINE BlockedRows(const Product& p, float level_unit, const ChunkScales& blocks, const Stored& stored,
                             NumbersInOrder& in_order, int64_t row)
      : blocks(blocks), stored(stored), codes(p.codes + row * stored.bytes_of_row(p)),
        row_bytes(stored.bytes_of_row(p)), far(p.far_from(codes)), left(p.packed),
        scales(blocks.exponents ? Numbers() : in_order.of(row, rows)),
        integers(static_cast<const uint8_t*>(p.scales.inner) + row * p.blocks),
        exponents(static_cast<const uint8_t*>(p.scales.outer) + row * blocks.exponents), place(blocks, 0) {
    // A power of two for the whole row is part of the unit.
    const __m128 unit = _mm_set1_ps(level_unit);
    _mm_store_ps(units, blocks.exponents == 1 ? _mm_mul_ps(unit, powers<rows>(exponents)) : unit);
    read_scales();
  }
  // Decodes the powers of two of `count` rows, one byte each. 255 is NaN.
  template <int count>
  static EQQUANT_INLINE __m128 powers(const uint8_t* exponents) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, exponents, count);
    const __m128i wide = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(static_cast<int>(bytes)));
    const __m128i nan = _mm_cmpeq_epi32(wide, _mm_set1_epi32(255));
    return _mm_castsi128_ps(_mm_or_si128(_mm_slli_epi32(wide, 23), nan));
  }
  // Reads sixteen scales of each row. A chunk has fewer, and looks them up. The scales of all rows are a stream of
  // their own, which is prefetched step by step.
  EQQUANT_INLINE void read_scales() {
    lanes = blocks.lanes;
    const int64_t from = place.block;
    const __mmask16 some = first(std::min(scales_at_once, blocks.blocks - from));
    if (!blocks.exponents) {
      // Two loops, because a branch for each row takes 5% of the time of a product.
      if (scales.are_halves)
        for (int r = 0; r < rows; r++) some_scales[r] = scales.halves(r * blocks.blocks + from, some);
      else
        for (int r = 0; r < rows; r++) some_scales[r] = scales.floats(r * blocks.blocks + from, some);
      for (int r = 0; r < rows; r++) scales.prefetch(rows * from + r * scales_at_once + 2048);
      return;
    }
    __builtin_prefetch(integers + rows * from + 2048, 0, 2);
    for (int r = 0; r < rows; r++) {
      const __m128i bytes = _mm_maskz_loadu_epi8(some, integers + r * blocks.blocks + from);
      some_scales[r] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
      if (blocks.exponents == 1) continue;
      const __m128 power = powers<1>(exponents + r * blocks.exponents + from / ChunkScales::blocks_of_exponent);
      some_scales[r] = _mm512_mul_ps(some_scales[r], _mm512_broadcastss_ps(power));
    }
  }
  EQQUANT_INLINE void read() {
    if (left >= chunk) {
      for (int r = 0; r < rows; r++) {
        of[r] = stored.read(codes + r * row_bytes);
        if (!Stored::is_prefetched) continue;
        prefetch(codes + r * row_bytes, far);
        prefetch_near(codes + r * row_bytes);  // 24% less time for rows of 288 bytes (Zen 4).
      }
    } else {
      for (int r = 0; r < rows; r++) of[r] = stored.read(codes + r * row_bytes, left);
    }
  }
  // The scale of each 32-bit lane of a row.
  EQQUANT_INLINE __m512 scale(int r) const { return _mm512_permutexvar_ps(lanes, some_scales[r]); }
  EQQUANT_INLINE void next() {
    codes += stored.bytes, left -= chunk;
    const int64_t before = place.block;
    place.next(blocks);
    if (place.block == before) return;
    lanes = _mm512_add_epi32(lanes, blocks.step);
    if (place.block % scales_at_once == 0 && place.block < blocks.blocks) read_scales();
  }
  EQQUANT_INLINE float unit_of(int r) const { return units[r]; }
};

// The part of the offsets of some rows in a product.
class RowOffsets {
  const int64_t blocks;
  const float shift;
  const float* const sums;
  NumbersInOrder in_order;

 public:
  RowOffsets(const Product& p, int64_t end)
      : blocks(p.blocks), shift(p.shift), sums(p.block_sums), in_order(p.offsets, p.blocks, end) {}
  // True if the offsets of a product are added while it is multiplied.
  static bool serve(const Product& p) { return p.offsets.inner && ChunkScales(p).exponents == 0; }
  // Adds the part of rows from `row` on, which have `scales`, in products with `count` rows of the activation from
  // `first_of_x` on.
  template <int rows, int count>
  EQQUANT_INLINE void add(int64_t row, const Numbers& scales, int64_t first_of_x, __m512 (&totals)[rows][count]) {
    if (!sums) return;
    const Numbers offsets = in_order.of(row, rows);
    const int64_t stride = (blocks + 15) / 16 * 16;
    const __m512 of_scale = _mm512_set1_ps(shift);
    for (int64_t b = 0; b < blocks; b += 16) {
      const __mmask16 some = first(blocks - b);
      __m512 x[count];
      for (int i = 0; i < count; i++) x[i] = _mm512_loadu_ps(sums + (first_of_x + i) * stride + b);
      for (int r = 0; r < rows; r++) {
        const int64_t at = r * blocks + b;
        const __m512 offset = _mm512_fmadd_ps(scales.read(at, some), of_scale, offsets.read(at, some));
        for (int i = 0; i < count; i++) totals[r][i] = _mm512_fmadd_ps(offset, x[i], totals[r][i]);
      }
    }
  }
};

EQQUANT_END
