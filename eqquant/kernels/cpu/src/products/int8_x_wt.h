// int8 x @ w.T for any `Int8Vector`: products of bytes are summed in groups of four.
//
// A row of the activation is `unit * high` (int8), or `unit * (high + low / 254)` (int8x2): two int8 parts, which
// keep 15 bits. If the instruction requires an unsigned operand, an offset makes levels unsigned, and the
// activation determines the correction of each sum. Sums have 32 bits and wrap around, which is correct if the
// true sum fits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "decode/levels.h"
#include "decode/scales.h"
#include "microkernels/decoded_rows.h"
#include "microkernels/int8_panel.h"
#include "microkernels/int8_vector.h"
#include "runtime/absmax.h"
#include "runtime/limits.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

constexpr float low_per_high = 254;

// The unit of a row of the activation, and the sum of each part.
struct RowUnit {
  float unit;
  uint32_t sums[2];
};

using Bytes = Int8Vector::Bytes;
using Sums = Int8Vector::Sums;

// For few rows and integer levels, rows of the weight are decoded in registers. Otherwise some rows of the
// weight are decoded first, and multiplied as a `Panel` or as `DecodedRows`. Both provide:
//
// - `lanes` of the rows, in up to `most_vectors`; `most_at_once` rows of the activation are multiplied at once
// - `short_row`: the bytes of rows of the weight that are not decoded in registers if the panel pays. Horizontal sums
//   take most of the time of such rows.
// - `vectors_for(length)`: the number of vectors for rows of `length` bytes
// - `take(rows, length, vector, vectors)`: copies `lanes` decoded rows
// - `multiply(vectors, x, stride, length, count, totals)`: multiplies the copied rows by `count` int8 rows of
//   the activation, `stride` bytes apart; totals are (row of the activation, vector, lane)
// - `cached_bytes`: bytes of the activation per pass

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The layout of an int8 row of the activation. Each plane is padded with zeros, to whole registers if the weight is
// decoded in registers, and otherwise to four bytes. Rows that are read together must not be a power of two
// apart, because they would compete for the same cache sets.
struct Layout {
  static constexpr int64_t gap = 64;
  bool few;
  int64_t plane, row;  // The distance to the next plane and row.
  int64_t length;      // Bytes per row, without padding.

  explicit Layout(const Product& p)
      : few(p.m * p.parts <= limits::int8_in_registers && is_exact_int8(p) &&
            (p.columns() > Panel::short_row || !Panel::pays(p.m * p.parts, p.columns()))),
        plane(round_up(p.packed, few ? Int8Vector::size : 4)),
        row(0),
        length(round_up(plane * p.planes(), Int8Vector::size)) {
    row = few ? length : length + gap;
  }
};

// Scratch contains the activation (m, part, plane, byte), and then the unit of each row.
inline int8_t* int8_in(char* scratch) { return reinterpret_cast<int8_t*>(scratch); }
inline RowUnit* units_in(const Product& p, const Layout& of, char* scratch) {
  return reinterpret_cast<RowUnit*>(scratch + p.m * p.parts * of.row);
}

// An upper bound for all levels, which are not known yet.
inline int64_t scratch_size(const Product& p) {
  const int64_t row = round_up(p.packed, Int8Vector::size) * p.planes() + Layout::gap;
  return p.m * (p.parts * row + static_cast<int64_t>(sizeof(RowUnit)));
}

inline void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const Layout layout(p);
  const int64_t columns = p.columns();
  Activation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = activation.row(i);
    int8_t* parts = int8_in(scratch) + i * p.parts * layout.row;
    RowUnit& row = units_in(p, layout, scratch)[i];
    const Units units(check_row(p, x), 127);
    row.unit = units.unit;
    for (int part = 0; part < p.parts; part++) {
      int8_t* const of = parts + part * layout.row;
      for (int plane = 0; plane < p.planes(); plane++)
        std::memset(of + plane * layout.plane + p.packed, 0, layout.plane - p.packed);
      const int64_t used = p.planes() * layout.plane;
      std::memset(of + used, 0, layout.row - used);
    }
    Sums sums[2] = {Int8Vector::zero(), Int8Vector::zero()};
    for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t planar, int64_t length) {
      int8_t* high = parts + planar / p.packed * layout.plane + planar % p.packed;
      if (p.parts == 1)
        Int8Vector::split<1>(x + logical, length, units.per_unit, high, nullptr, sums);
      else
        Int8Vector::split<2>(x + logical, length, units.per_unit, high, high + layout.row, sums);
    });
    for (int part = 0; part < 2; part++) row.sums[part] = Int8Vector::total(sums[part]);
  }
}

// The levels as bytes, and their offset.
struct ByteLevels {
  Bytes table;
  uint32_t offset;
};

inline ByteLevels byte_levels(const Product& p) {
  alignas(16) uint8_t table[16] = {};
  if (p.bits == 8) return {Int8Vector::table(table), Int8Vector::middle};
  float least = 0;
  for (int i = 0; Int8Vector::middle && i < 16; i++) least = std::min(least, p.levels[i]);
  for (int i = 0; i < 16; i++)
    table[i] = static_cast<uint8_t>(static_cast<int>(p.levels[i] - least));
  return {Int8Vector::table(table), static_cast<uint32_t>(-least)};
}

// The rest of a row from byte `j` on, at most one register.
EQQUANT_INLINE Bytes bytes_at(const Product& p, const uint8_t* row, int64_t j) {
  const int64_t left = p.packed - j;
  return left >= Int8Vector::size ? Int8Vector::load(row + j) : Int8Vector::load(row + j, left);
}

// Writes the results of rows of the activation by `lanes` rows of the weight. The first `rows` lanes are used.
// Totals of consecutive int8 rows of the activation are `stride` apart.
template <int lanes>
EQQUANT_INLINE void finish(const Product& p, uint32_t offset, const uint32_t* totals, int64_t stride,
                           const RowUnit* of, int64_t count, const float* units, int rows, float* y) {
  // Arrays of floats, so that compilers use vectors.
  const auto part = [&](const uint32_t* of_part, uint32_t sum_of_x, float(&sums)[lanes]) {
    for (int r = 0; r < lanes; r++)
      sums[r] = static_cast<float>(static_cast<int32_t>(of_part[r] - offset * sum_of_x));
  };
  const auto write = [&](const RowUnit& of_row, float(&sums)[lanes], float* to) {
    for (int r = 0; r < lanes; r++) sums[r] = sums[r] * of_row.unit * units[r];
    std::memcpy(to, sums, rows >= lanes ? sizeof sums : rows * sizeof(float));
  };
  alignas(64) float sums[lanes], low[lanes];
  if (p.parts == 1)
    for (int64_t i = 0; i < count; i++, y += p.rows) {
      part(totals + i * stride, of[i].sums[0], sums);
      write(of[i], sums, y);
    }
  else
    for (int64_t i = 0; i < count / 2; i++, y += p.rows) {
      part(totals + 2 * i * stride, of[i].sums[0], sums);
      part(totals + (2 * i + 1) * stride, of[i].sums[1], low);
      for (int r = 0; r < lanes; r++) sums[r] += low[r] / low_per_high;
      write(of[i], sums, y);
    }
}

// Products of some rows of the weight. Several partial sums avoid waiting for the previous addition.
template <int bits, int rows, int count, int partial>
struct Tile {
  Sums sums[partial][count * rows];

  template <int plane>
  static EQQUANT_INLINE void multiply(Bytes table, const Bytes* codes, const int8_t* x,
                                      int64_t stride, Sums* sums) {
    Bytes weight[rows];
    for (int r = 0; r < rows; r++)
      weight[r] = Int8Vector::template decode<bits, plane>(table, codes[r]);
    for (int i = 0; i < count; i++) {
      const Bytes some = Int8Vector::load(x + (i * (8 / bits) + plane) * stride);
      for (int r = 0; r < rows; r++)
        sums[i * rows + r] = Int8Vector::add(sums[i * rows + r], weight[r], some);
    }
    if constexpr ((plane + 1) * bits < 8) multiply<plane + 1>(table, codes, x, stride, sums);
  }

  static EQQUANT_INLINE void step(const Product& p, Bytes table, const uint8_t* codes,
                                  const int8_t* x, int64_t stride, int64_t j, int64_t far, Sums* sums) {
    Bytes some_codes[rows];
    for (int r = 0; r < rows; r++) {
      const uint8_t* of_row = codes + r * p.packed;
      some_codes[r] = bytes_at(p, of_row, j);
      if (rows > 1) prefetch(of_row + j, far);
      prefetch_near(of_row + j);
    }
    multiply<0>(table, some_codes, x + j, stride, sums);
  }

  // `x` is `count` int8 rows of the activation, starting at row `first`, with planes `stride` apart.
  EQQUANT_INLINE void run(const Product& p, const ByteLevels& levels, const int8_t* x,
                          int64_t stride, const RowUnit* of, const float* scales, int64_t row,
                          int64_t first) {
    const uint8_t* codes = p.codes + row * p.packed;
    const int64_t far = p.far_from(codes);
    for (auto& some : sums)
      for (auto& sum : some) sum = Int8Vector::zero();
    int64_t j = 0;
    for (; j + partial * Int8Vector::size <= p.packed; j += partial * Int8Vector::size)
      for (int k = 0; k < partial; k++)
        step(p, levels.table, codes, x, stride, j + k * Int8Vector::size, far, sums[k]);
    for (; j < p.packed; j += Int8Vector::size)
      step(p, levels.table, codes, x, stride, j, far, sums[0]);
    constexpr int each = count * rows, all = partial * each;
    alignas(16) uint32_t total[(all + 3) / 4 * 4];
    for (int i = 0; i < all; i += 4) {
      Sums four[4];
      for (int k = 0; k < 4; k++)
        four[k] = i + k < all ? sums[(i + k) / each][(i + k) % each] : Int8Vector::zero();
      Int8Vector::store_totals(total + i, four);
    }
    for (int i = each; i < all; i++) total[i % each] += total[i];
    const int64_t m = first / p.parts;
    finish<rows>(p, levels.offset, total, rows, of + m, count, scales, rows, p.y + m * p.rows + row);
  }
};

template <int bits, int rows, int partial = 1>
void multiply_in_registers(const Product& p, const Layout& layout, const ByteLevels& levels, char* scratch,
                           const float* scales, int64_t row) {
  const int8_t* x = int8_in(scratch);
  const RowUnit* of = units_in(p, layout, scratch);
  const int64_t count = p.m * p.parts, ld = layout.row, plane = layout.plane;
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    Tile<bits, rows, 4, partial>().run(p, levels, x + i * ld, plane, of, scales, row, i);
  for (; i + 2 <= count; i += 2)
    Tile<bits, rows, 2, partial>().run(p, levels, x + i * ld, plane, of, scales, row, i);
  for (; i < count; i++)
    Tile<bits, rows, 1, partial>().run(p, levels, x + i * ld, plane, of, scales, row, i);
}

template <int bits>
void run_in_registers(const Product& p, const Layout& layout, char* scratch, int64_t begin,
               int64_t end) {
  const ByteLevels levels = byte_levels(p);
  ScalesInOrder scales(p.scales, p.blocks, end);
  int64_t row = begin;
  // If codes need no decoding, one row of the activation is bound by memory, and a sequential read is fastest.
  if constexpr (bits == 8)
    if (p.m * p.parts == 1 && !p.is_small())
      for (; row < end; row++)
        multiply_in_registers<bits, 1, 2>(p, layout, levels, scratch, scales.of(row, 1), row);
  for (; row + 4 <= end; row += 4)
    multiply_in_registers<bits, 4>(p, layout, levels, scratch, scales.of(row, 4), row);
  for (; row < end; row++) multiply_in_registers<bits, 1>(p, layout, levels, scratch, scales.of(row, 1), row);
}

// For more rows of the activation, and for levels without a common step: some rows are decoded once.

struct alignas(Int8Vector::size) Register {
  uint8_t bytes[Int8Vector::size];
};

// Rounds a blocked row to integers with a common step. 127 steps are the largest scale times the largest
// level. Returns the step.
template <int bits>
float round_row(const Product& p, const float* scales, float largest, const uint8_t* codes,
                uint8_t* to, int64_t stride) {
  const int64_t block = p.block_bytes();
  float most = 0;
  for (int64_t b = 0; b < p.blocks; b++) {
    if (!std::isfinite(scales[b])) return NAN;
    most = std::max(most, std::fabs(scales[b]));
  }
  const float unit = most * largest / 127;
  const float per_unit = unit > 0 && std::isfinite(1 / unit) ? 1 / unit : 0;
  const int power = spare_bits(largest);
  for (int64_t b = 0, j = 0; b < p.blocks; b++, j += block)
    Int8Vector::round_block<bits>(p.levels, scales[b] * per_unit, power, block, codes + j, to + j, stride);
  return unit;
}

// Decodes a row to bytes, in the order of the activation. A plane may write beyond its end before the next plane is
// written, and the last plane up to one register beyond the row.
template <int bits, int plane = 0>
void decode_row(const Product& p, Bytes table, const uint8_t* codes, uint8_t* to,
                int64_t stride) {
  for (int64_t j = 0; j < p.packed; j += Int8Vector::size)
    Int8Vector::store(to + plane * stride + j,
                    Int8Vector::template decode<bits, plane>(table, bytes_at(p, codes, j)));
  if constexpr ((plane + 1) * bits < 8) decode_row<bits, plane + 1>(p, table, codes, to, stride);
}

template <int bits, class Decoded>
void run_decoded(const Product& p, const Layout& layout, char* scratch, int64_t begin,
                 int64_t end) {
  constexpr int lanes = Decoded::lanes, most_at_once = Decoded::most_at_once;
  ByteLevels levels{Bytes{}, Int8Vector::middle};
  // int8 has no 128.
  const float largest = std::min(bits == 8 ? 127.0f : INFINITY, largest_level(p));
  const bool exact = is_exact_int8(p);
  if (exact) levels = byte_levels(p);
  const int8_t* x = int8_in(scratch);
  const RowUnit* of = units_in(p, layout, scratch);
  const int64_t stride = layout.row, length = layout.length, count = p.m * p.parts;
  const int at_once = lanes * Decoded::vectors_for(length);
  // The int8 rows of the activation that fit in the cache.
  const int64_t in_turn =
      std::max<int64_t>(1, Decoded::cached_bytes / stride / most_at_once) * most_at_once;
  // Includes space for writes beyond the last row.
  std::vector<Register> decoded(lanes * length / Int8Vector::size + 1);
  Decoded weights(at_once * length);
  std::vector<float> buffer(p.scale_buffer(at_once));
  for (int64_t first = 0; first < count; first += in_turn)
    for (int64_t row = begin; row < end; row += at_once) {
      const int rows = static_cast<int>(std::min<int64_t>(at_once, end - row));
      const int vectors = (rows + lanes - 1) / lanes;
      const float* scales = scales_of(p, row, rows, buffer.data());
      alignas(64) float units[lanes * Decoded::most_vectors] = {};
      for (int r = 0; r < rows; r++) {
        const uint8_t* codes = p.codes + (row + r) * p.packed;
        uint8_t* const to = decoded[0].bytes + r % lanes * length;
        if (exact) {
          units[r] = scales[r];
          decode_row<bits>(p, levels.table, codes, to, layout.plane);
        } else {
          units[r] =
              round_row<bits>(p, scales + r * p.blocks, largest, codes, to, layout.plane);
        }
        if (r % lanes == lanes - 1 || r == rows - 1)
          weights.take(decoded[0].bytes, length, r / lanes, vectors);
      }
      const int64_t last = std::min(count, first + in_turn);
      for (int64_t i = first; i < last; i += most_at_once) {
        alignas(64) uint32_t totals[most_at_once * lanes * Decoded::most_vectors];
        const int64_t some = std::min<int64_t>(most_at_once, last - i), m = i / p.parts;
        weights.multiply(vectors, x + i * stride, stride, length, static_cast<int>(some), totals);
        for (int v = 0; v < vectors; v++)
          finish<lanes>(p, levels.offset, totals + v * lanes, vectors * lanes, of + m, some,
                        units + v * lanes, rows - v * lanes,
                        p.y + m * p.rows + row + v * lanes);
      }
    }
}

template <int bits>
void run_bits(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const Layout layout(p);
  if (layout.few) return run_in_registers<bits>(p, layout, scratch, begin, end);
  const bool pays = Panel::pays(p.m * p.parts, layout.length);
  const auto decoded = pays ? run_decoded<bits, Panel> : run_decoded<bits, DecodedRows>;
  decoded(p, layout, scratch, begin, end);
}

inline void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  char* from = const_cast<char*>(scratch);  // Only read.
  with_bits(p, [&](auto bits) { run_bits<bits>(p, from, begin, end); });
}

inline const char* why_not(const Product& p) {
  if (p.exponent) return "floats of 8 bits need a float kernel";
  if (p.parts == 2 && p.blocks != 1) return "int8x2 needs one scale for each row";
  return nullptr;
}

constexpr Routine int8_x_wt_routine = {prepare, run, scratch_size, always<16>, why_not};

EQQUANT_END
