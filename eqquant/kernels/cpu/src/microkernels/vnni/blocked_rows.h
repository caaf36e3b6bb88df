// Codes of some rows, with the scale of each block, in AVX-512 VNNI.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "decode/scales.h"
#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/scales.h"
#include "products/unrolled.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

constexpr int64_t chunk = 64;  // Bytes of codes.

inline int64_t chunks_of(const Product& p) { return (p.packed + chunk - 1) / chunk; }

// The scales of a row, chunk by chunk. A chunk has `of_chunk` blocks, or a block has `chunks_of_block` chunks.
//
// A group has one scale and one sum of integers: it is a block, or some chunks of a longer block. A span has sixteen
// groups, whose scales are read at once.
struct ChunkScales {
  // Double quantization has an exponent for 256 blocks.
  static constexpr int64_t blocks_of_exponent = 256;
  static constexpr int64_t groups_of_span = 16;
  // `exponents` are the exponents of a row; 0 for other types of scales.
  int64_t blocks, of_chunk, chunks_of_block, exponents;
  int64_t chunks_of_group = 1, groups_of_block, chunks_of_span;
  bool are_in_spans;  // True if a span has whole blocks, and otherwise only groups of one block.
  // The block of each group of a span; the group of each lane; and the number of groups that a chunk, or a group, has.
  __m512i of_group, lanes, step;

  // `most_chunks` is the limit of a group.
  explicit ChunkScales(const Product& p, int64_t most_chunks = 1)
      : blocks(p.blocks),
        of_chunk(blocks > 1 ? std::max<int64_t>(1, chunk / p.block_bytes()) : 1),
        chunks_of_block(std::max<int64_t>(1, (p.block_bytes() + chunk - 1) / chunk)),
        exponents(p.scales.type == ScaleType::uint8 && p.scales.outer_type == ScaleType::exponent &&
                          p.scales.outer_blocks == blocks_of_exponent
                      ? p.scales.outer_count(blocks)
                      : 0) {
    for (int64_t i = 2; i <= std::min(most_chunks, chunks_of_block); i++)
      if (chunks_of_block % i == 0) chunks_of_group = i;
    groups_of_block = chunks_of_block / chunks_of_group;
    chunks_of_span = groups_of_span / of_chunk * chunks_of_group;
    are_in_spans = groups_of_span % groups_of_block == 0;
    alignas(64) int32_t of[16], block[16];
    for (int i = 0; i < 16; i++) of[i] = static_cast<int32_t>(i * of_chunk / 16);
    for (int i = 0; i < 16; i++) block[i] = static_cast<int32_t>(are_in_spans ? i / groups_of_block : 0);
    lanes = _mm512_load_si512(of), of_group = _mm512_load_si512(block);
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

// Reads `rows` rows chunk by chunk: codes in `of`, and a scale for each lane. The scales of a span are in registers,
// where lanes look them up.
template <int rows, class Stored>
struct BlockedRows {
  const ChunkScales& blocks;
  const Stored stored;
  const uint8_t* codes;
  int64_t row_bytes, far, left;  // Stored bytes of a row, how far to prefetch, and remaining unpacked bytes.
  Numbers scales;           // Unused for `integers` times powers of two, which are read as they are stored.
  const uint8_t *integers, *exponents;
  int64_t group, after = 0, chunks = 0;  // The first group of the span, the group after it, and the chunks that remain.
  int64_t block = 0, of_block;  // The first block after the span; and its groups, unless spans have whole blocks.
  __m512i lanes, of[rows];
  __m512 of_span[rows];
  alignas(16) float units[rows];

  // Always inlined: otherwise the members of a local variable stay in memory.
  EQQUANT_INLINE BlockedRows(const Product& p, float level_unit, const ChunkScales& blocks, const Stored& stored,
                             NumbersInOrder& in_order, int64_t row)
      : blocks(blocks), stored(stored), codes(p.codes + row * stored.bytes_of_row(p)),
        row_bytes(stored.bytes_of_row(p)), far(p.far_from(codes)), left(p.packed),
        scales(blocks.exponents ? Numbers() : in_order.of(row, rows)),
        integers(static_cast<const uint8_t*>(p.scales.inner) + row * p.blocks),
        exponents(static_cast<const uint8_t*>(p.scales.outer) + row * blocks.exponents),
        of_block(blocks.groups_of_block) {
    // A power of two for the whole row is part of the unit.
    const __m128 unit = _mm_set1_ps(level_unit);
    for (int r = 0; r < rows; r += 4)
      _mm_store_ps(units + r, blocks.exponents == 1 ? _mm_mul_ps(unit, powers<4>(exponents + r)) : unit);
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
  // Reads the scales of the next span, which begins with the first chunk. Called in one place of a loop, because the
  // code for all types of scales is long.
  EQQUANT_INLINE void next_span() {
    const int64_t groups = blocks.are_in_spans ? ChunkScales::groups_of_span
                                               : std::min(ChunkScales::groups_of_span, of_block);
    lanes = blocks.lanes;
    chunks = blocks.are_in_spans ? blocks.chunks_of_span : groups * blocks.chunks_of_group;
    group = after, after += groups;
    read_scales(block, blocks.are_in_spans ? first(blocks.blocks - block) : 1);
    of_block -= groups;
    if (blocks.are_in_spans)
      block += ChunkScales::groups_of_span / blocks.groups_of_block;
    else if (!of_block)
      block++, of_block = blocks.groups_of_block;
    if (blocks.groups_of_block == 1) return;
    for (__m512& scale : of_span) scale = _mm512_permutexvar_ps(blocks.of_group, scale);
  }
  // Reads the scales of blocks from `block` on. The scales of all rows are a stream of their own, which is prefetched
  // step by step.
  EQQUANT_INLINE void read_scales(int64_t block, __mmask16 some) {
    if (!blocks.exponents) {
      // Several loops, because a branch for each row takes 5% of the time of a product.
      if (scales.type == Numbers::integers) {
        for (int r = 0; r < rows; r++) of_span[r] = scales.times_halves(r * blocks.blocks + block, some);
        for (int r = 0; r < rows; r += 4)
          scales.prefetch_integers(rows * block + r * ChunkScales::groups_of_span + 2048);
        return;
      }
      if (scales.type == Numbers::float16)
        for (int r = 0; r < rows; r++) of_span[r] = scales.halves(r * blocks.blocks + block, some);
      else
        for (int r = 0; r < rows; r++) of_span[r] = scales.floats(r * blocks.blocks + block, some);
      for (int r = 0; r < rows; r++) scales.prefetch(rows * block + r * ChunkScales::groups_of_span + 2048);
      return;
    }
    __builtin_prefetch(integers + rows * block + 2048, 0, 2);
    for (int r = 0; r < rows; r++) {
      const __m128i bytes = _mm_maskz_loadu_epi8(some, integers + r * blocks.blocks + block);
      of_span[r] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
      if (blocks.exponents == 1) continue;
      const __m128 power = powers<1>(exponents + r * blocks.exponents + block / ChunkScales::blocks_of_exponent);
      of_span[r] = _mm512_mul_ps(of_span[r], _mm512_broadcastss_ps(power));
    }
  }
  EQQUANT_INLINE void read() {
    if (left >= Stored::least_left)
      for (int r = 0; r < rows; r++) of[r] = stored.read(codes + r * row_bytes);
    else
      for (int r = 0; r < rows; r++) of[r] = stored.read(codes + r * row_bytes, left);
    for (int r = 0; r < rows; r++) {
      prefetch(codes + r * row_bytes, far);
      prefetch_near(codes + r * row_bytes);  // 24% less time for rows of 288 bytes (Zen 4).
    }
  }
  // The scale of each 32-bit lane of a row.
  EQQUANT_INLINE __m512 scale(int r) const { return _mm512_permutexvar_ps(lanes, of_span[r]); }
  EQQUANT_INLINE void next_chunk() { codes += stored.bytes, left -= chunk, chunks--; }
  EQQUANT_INLINE void next_group() { lanes = _mm512_add_epi32(lanes, blocks.step); }
  EQQUANT_INLINE float unit_of(int r) const { return units[r]; }
};

// The part of the offsets of some rows in a product.
class RowOffsets {
  const int64_t blocks;
  // The multiple of a scale that is part of the offset, added with the scales of a span or with the offsets.
  const float of_span, shift;
  const float* const sums;
  NumbersInOrder in_order;

  int64_t stride() const { return (blocks + 15) / 16 * 16; }

 public:
  // With `by_spans`, the caller calls `add_span` for each span.
  RowOffsets(const Product& p, int64_t end, bool by_spans = false)
      : blocks(p.blocks), of_span(by_spans ? p.shift : 0), shift(by_spans ? 0 : p.shift), sums(p.block_sums),
        in_order(p.offsets, p.blocks, end, true) {}
  // True if the offsets of a product are added while it is multiplied.
  static bool serve(const Product& p) { return p.offsets.inner && ChunkScales(p).exponents == 0; }
  // Adds the part of the scales `of` of a span, which has a block for each lane from block `b` on.
  template <int rows, int count>
  EQQUANT_INLINE void add_span(int64_t b, const __m512 (&of)[rows], __m512 (&totals)[rows][count]) const {
    if (!sums || of_span == 0) return;
    unrolled<count>([&](auto i) {
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(sums + i * stride() + b), _mm512_set1_ps(of_span));
      unrolled<rows>([&](auto r) { totals[r][i] = _mm512_fmadd_ps(of[r], x, totals[r][i]); });
    });
  }
  // Adds the part of rows from `row` on, which have `scales`, in products with `count` rows of the activation from
  // `first_of_x` on.
  template <int rows, int count>
  EQQUANT_INLINE void add(int64_t row, const Numbers& scales, int64_t first_of_x, __m512 (&totals)[rows][count]) {
    if (!sums) return;
    const Numbers offsets = in_order.of(row, rows);
    for (int64_t b = 0; b < blocks; b += 16) {
      const __mmask16 some = first(blocks - b);
      __m512 x[count];
      for (int i = 0; i < count; i++) x[i] = _mm512_loadu_ps(sums + (first_of_x + i) * stride() + b);
      for (int r = 0; r < rows; r++) {
        const int64_t at = r * blocks + b;
        __m512 offset = offsets.read(at, some);
        if (shift != 0) offset = _mm512_fmadd_ps(scales.read(at, some), _mm512_set1_ps(shift), offset);
        for (int i = 0; i < count; i++) totals[r][i] = _mm512_fmadd_ps(offset, x[i], totals[r][i]);
      }
    }
  }
};

EQQUANT_END
