// A part of a weight as int8 tiles, the right operand of x @ w by AMX.
//
// A row of a tile contains four rows of the weight side by side, in sixteen columns. If each row has one scale, codes
// are decoded to levels. Otherwise the scales are part of the int8 values, relative to the largest value of a block in
// the rows that are decoded at once.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>

#include "decode/row_pieces.h"
#include "microkernels/amx/int8_parts.h"
#include "microkernels/amx/tiles.h"
#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/scales.h"
#include "runtime/target.h"

EQQUANT_BEGIN

constexpr int64_t lanes = 16, half = lanes / 2, rows_of_step = 64,
                  tile_size = tile_rows * tile_bytes;
// The columns that are decoded at once, and the int8 values of each column: the first-level cache holds two tiles.
constexpr int64_t columns_at_once = 512, values_at_once = 1024;
// The prefetch distance in rows, because rows are too far apart for the hardware prefetcher.
constexpr int64_t rows_ahead = 64;

// True if sixteen bytes belong to two blocks.
inline bool in_pairs(const Product& p) { return p.blocks > 1 && p.block_bytes() == half; }

// The places of the results of a tile: each is a group of its columns.
struct Places {
  int count = 0;
  __mmask16 some[lanes];
  int64_t column[lanes];  // The column of lane 0, if the group contained it.
};

// Columns of rows of the weight, as tiles: (sixteen bytes, plane, part, step of 64 rows).
template <int bits>
class Panel {
  static constexpr int planes = 8 / bits;
  static constexpr int64_t most_tiles =
      std::min(columns_at_once, lanes * lanes * planes) / lanes;
  struct alignas(64) Line {
    int8_t bytes[64];
  };

  const Product& p;
  const bool pairs = in_pairs(p);  // Sixteen bytes belong to two blocks.
  const float largest;  // The largest level.
  const bool exact;     // Nothing is rounded.
  const LevelTables level_tables;
  const Float8Tables float8_tables;
  const float unit;  // The unit of the int8 values of the weight, without scales.
  int64_t steps;
  std::unique_ptr<Line[]> values;

 public:
  const int parts = exact ? 1 : p.parts;
  // A register holds the scales of all blocks in `most_bytes`.
  const int64_t most_rows = values_at_once / parts,
                most_bytes = most_tiles / planes * (pairs ? half : lanes);
  int64_t tiles = 0;
  // One more, because two tiles are multiplied at once.
  alignas(64) float units[most_tiles + 1][lanes];
  Places places[most_tiles + 1];

  // `bytes` is the number of bytes of a row.
  Panel(const Product& p, int64_t bytes)
      : p(p),
        largest(largest_level(p)),
        exact(is_exact_int8(p)),
        level_tables(p.levels, bits < 8 ? largest : 1),
        float8_tables(p.exponent ? p.exponent : 4, largest),
        unit(exact      ? 1
             : bits < 8 ? 256 * level_tables.unit / largest_split
                        : 256 * Units(largest, largest_split).unit) {
    steps = steps_of(std::min(most_rows, p.rows));
    values.reset(new Line[(tiles_of(std::min(bytes, most_bytes)) + 1) * tile_stride() / 64]);
  }

  static int64_t steps_of(int64_t rows) { return (rows + rows_of_step - 1) / rows_of_step; }
  static int64_t tiles_of(int64_t bytes) { return (bytes + lanes - 1) / lanes * planes; }
  // The distances between parts of a tile, and between tiles. The second is not a power of two. `Decoded` in
  // x_wt.h has the reason.
  int64_t part_stride() const { return steps * tile_size; }
  int64_t tile_stride() const { return parts * part_stride() + 64; }
  const char* tile(int64_t i) const {
    return reinterpret_cast<const char*>(values[0].bytes) + i * tile_stride();
  }

  void find_places(int64_t begin, int64_t bytes) {
    tiles = tiles_of(bytes);
    for (Places& of : places) of.count = 0;
    for (int64_t j = 0; j < bytes; j += lanes)
      for_each_run(p, begin + j, begin + std::min(bytes, j + lanes),
                   [&](int64_t logical, int64_t planar, int64_t length) {
                     const int64_t plane = planar / p.packed, lane = planar % p.packed - begin - j;
                     Places& of = places[j / lanes * planes + plane];
                     of.column[of.count] = logical - lane;
                     of.some[of.count++] = first(length) << lane;
                   });
  }

  void decode(Pieces& pieces, int64_t row, int64_t rows, int64_t bytes) {
    steps = steps_of(rows);
    const bool in_blocks = p.blocks > 1;
    const int64_t begin = pieces.begin, block = p.block_bytes(), first_block = begin / block;
    const __mmask16 some = first((begin + bytes - 1) / block + 1 - first_block);
    std::fill_n(units[0], tiles * lanes, unit);
    const __m512 share = in_blocks ? share_of_largest(row, rows, begin, bytes, some)
                                   : _mm512_setzero_ps();
    const int64_t ahead = p.is_unpacked() ? 0 : rows_ahead * p.packed;
    const uint8_t* codes = nullptr;
    alignas(64) int16_t int16_scales[lanes][4];
    std::fill_n(int16_scales[0], 4, static_cast<int16_t>(largest_split));
    Tables tables;
    if (bits < 8) level_tables.of(int16_scales[0], tables.high[0], tables.low[0]);
    if (bits < 8 && exact) tables.high[0] = bytes_of_levels(p.levels);
    for (int64_t r = 0; r < rows; r += 4) {
      if (r % rows_at_once == 0)
        codes = pieces.of(row + r, static_cast<int>(std::min<int64_t>(rows_at_once, rows - r)));
      const uint8_t* of[4];
      alignas(64) float shares[4][lanes];
      __m512 scales[4];
      for (int k = 0; k < 4; k++) {
        // Rows after the last one repeat it, because the activation has zeros there.
        const int64_t at = std::min(r + k, rows - 1);
        of[k] = codes + at % rows_at_once * pieces.row_bytes;
        if (!in_blocks) continue;
        scales[k] = _mm512_mul_ps(scales_at(p, row + at, first_block, some), share);
        if (bits == 8) _mm512_store_ps(shares[k], scales[k]);
      }
      if (bits < 8 && in_blocks) to_int16(scales, int16_scales);
      int8_t* to = values[0].bytes + r / rows_of_step * tile_size + r % rows_of_step * lanes;
      int64_t b = -1, until = in_blocks ? 0 : bytes;
      for (int64_t j = 0; j < bytes; j += lanes, to += planes * tile_stride()) {
        if (j % 64 == 0)
          for (const uint8_t* of_row : of) __builtin_prefetch(of_row + j + ahead, 0, 2);
        if (j >= until) {
          until = b < 0 ? block - begin % block : until + block, b++;
          if (bits < 8) level_tables.of(int16_scales[b], tables.high[0], tables.low[0]);
          if (bits < 8 && pairs) {
            level_tables.of(int16_scales[++b], tables.high[1], tables.low[1]);
            until += block;
          }
        }
        const int64_t count = bytes - j;
        if constexpr (bits < 8)
          pairs ? look_up<true>(side_by_side(of, j, count), tables, to)
                : look_up<false>(side_by_side(of, j, count), tables, to);
        else if (!in_blocks)
          write(side_by_side(of, j, count), to);
        else
          write_scaled(of, j, first(count), shares, b, to);
      }
    }
  }

 private:
  struct Tables {
    __m512i high[2] = {}, low[2] = {};
  };

  // Returns the factors for scales after which the largest scale of each block is the largest int16, or the unit of
  // 8-bit codes. Sets the units of the tiles.
  __m512 share_of_largest(int64_t row, int64_t rows, int64_t begin, int64_t bytes,
                          __mmask16 some) {
    const int64_t block = p.block_bytes(), first_block = begin / block;
    __m512 most = _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; r++)
      most = larger(most, scales_at(p, row + r, first_block, some));
    alignas(64) float of_block[lanes];
    _mm512_store_ps(of_block, most);
    alignas(64) float shares[lanes];
    for (int b = 0; b < lanes; b++) {
      const float share = 1 / of_block[b];
      shares[b] = std::isfinite(share) ? share : 0;
      if (!std::isfinite(of_block[b])) of_block[b] = NAN;
    }
    for (int64_t i = 0; i < tiles; i++)
      for (int64_t k = 0; k < lanes; k += half) {
        const int64_t b = (begin + i / planes * lanes + k) / block - first_block;
        std::fill_n(units[i] + k, half, unit * of_block[std::min(b, lanes - 1)]);
      }
    const float most_share = bits < 8 ? largest_split : Units(largest, largest_split).per_unit;
    return _mm512_mul_ps(_mm512_load_ps(shares), _mm512_set1_ps(most_share));
  }

  // Rounds the scales of four rows to int16. The result is (block, row).
  static void to_int16(const __m512 (&scales)[4], int16_t (&to)[lanes][4]) {
    __m512i of[4];
    for (int k = 0; k < 4; k++) of[k] = _mm512_cvtps_epi32(scales[k]);
    const __m512i a = _mm512_mask_mov_epi16(of[0], 0xAAAAAAAA, _mm512_slli_epi32(of[1], 16)),
                  b = _mm512_mask_mov_epi16(of[2], 0xAAAAAAAA, _mm512_slli_epi32(of[3], 16));
    const __m512i low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
    const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                  second_half = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_store_si512(to[0], _mm512_permutex2var_epi64(low, first_half, high));
    _mm512_store_si512(to[8], _mm512_permutex2var_epi64(low, second_half, high));
  }

  // Returns at most sixteen bytes of each of four rows, by column.
  static EQQUANT_INLINE __m512i side_by_side(const uint8_t* const (&of)[4], int64_t j,
                                             int64_t count) {
    alignas(64) static constexpr uint8_t by_column[64] = {
        0,  16, 32, 48, 1,  17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21,
        37, 53, 6,  22, 38, 54, 7,  23, 39, 55, 8,  24, 40, 56, 9,  25, 41, 57, 10, 26, 42, 58,
        11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
    const auto put = [&](const auto& load) {
      __m512i out = _mm512_castsi128_si512(load(of[0] + j));
      out = _mm512_inserti32x4(out, load(of[1] + j), 1);
      out = _mm512_inserti32x4(out, load(of[2] + j), 2);
      return _mm512_inserti32x4(out, load(of[3] + j), 3);
    };
    const __m512i rows =
        count >= lanes
            ? put([](const uint8_t* at) {
                return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
              })
            : put([&](const uint8_t* at) { return _mm_maskz_loadu_epi8(first(count), at); });
    return _mm512_permutexvar_epi8(_mm512_load_si512(by_column), rows);
  }

  // Looks up sixteen codes in four rows. If `pairs`, the two halves of the columns belong to two blocks.
  template <bool pairs, int plane = 0>
  EQQUANT_INLINE void look_up(__m512i codes, const Tables& tables, int8_t* to) const {
    const __m512i shifted = plane ? _mm512_srli_epi16(codes, plane * bits) : codes;
    // The index is four bits of the code, then the row, and then the half.
    constexpr int of_row = 0x30201000, of_half = 0x40404040 * pairs;
    const __m512i places = _mm512_inserti64x4(_mm512_set1_epi32(of_row),
                                              _mm256_set1_epi32(of_row + of_half), 1);
    const __m512i index =
        _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi8(15), places, 0xEA);
    const auto of = [&](const __m512i(&table)[2]) {
      return pairs ? _mm512_permutex2var_epi8(table[0], index, table[1])
                   : _mm512_permutexvar_epi8(index, table[0]);
    };
    int8_t* const at = to + plane * tile_stride();
    _mm512_store_si512(at, of(tables.high));
    if (parts > 1) _mm512_store_si512(at + part_stride(), of(tables.low));
    if constexpr ((plane + 1) * bits < 8) look_up<pairs, plane + 1>(codes, tables, to);
  }

  // Writes 8-bit codes: integers unchanged, or float8.
  EQQUANT_INLINE void write(__m512i codes, int8_t* to) const {
    if (!p.exponent) return _mm512_store_si512(to, codes);
    _mm512_store_si512(to, float8_tables.look_up(float8_tables.high, codes));
    if (parts > 1)
      _mm512_store_si512(to + part_stride(), float8_tables.look_up(float8_tables.low, codes));
  }

  EQQUANT_INLINE void write_scaled(const uint8_t* const (&of)[4], int64_t j, __mmask16 some,
                                   const float (&shares)[4][lanes], int64_t b, int8_t* to) const {
    __m512i x[4];
    for (int k = 0; k < 4; k++) {
      const __m512 values = values_of(_mm_maskz_loadu_epi8(some, of[k] + j), p.exponent);
      x[k] = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(shares[k][b])));
    }
    if (parts > 1) _mm512_store_si512(to + part_stride(), lowest_bytes(x));
    for (__m512i& of_row : x) of_row = upper(of_row);
    _mm512_store_si512(to, lowest_bytes(x));
  }

  static EQQUANT_INLINE __m512i lowest_bytes(const __m512i (&x)[4]) {
    constexpr __mmask64 second = 0x2222222222222222ull;
    const __m512i a = _mm512_mask_mov_epi8(x[0], second, _mm512_slli_epi32(x[1], 8)),
                  b = _mm512_mask_mov_epi8(x[2], second, _mm512_slli_epi32(x[3], 8));
    return _mm512_mask_mov_epi16(a, 0xAAAAAAAA, _mm512_slli_epi32(b, 16));
  }
};

EQQUANT_END
