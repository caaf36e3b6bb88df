// x @ w in int8, for more rows: AMX.
//
// A row of the activation becomes one digit or two, as in digits_amx.cpp, and is the left operand
// as it is. The weight is the right one: see tile_panel.h. Where each of its rows has one scale,
// the activation is multiplied by these before it is rounded.
#include <immintrin.h>

#include <cmath>
#include <memory>
#include <vector>

#include "product.h"
#include "target.h"
#include "unpack.h"

EQQUANT_TARGET_BEGIN(
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,amx-tile,amx-int8,amx-bf16,avx2,fma")
namespace eqquant {
namespace row_digits {

#include "absmax.h"
#include "scales.h"
#include "split.h"
#include "tiles_amx.h"

#include "pieces.h"

#include "tile_panel.h"

// Rows of the activation in one turn, for which the weight is decoded again: a second-level cache
// holds their digits, a panel of the weight, and results.
constexpr int64_t rows_in_turn = 256;

inline int64_t whole_tiles(int64_t m) { return (m + tile_rows - 1) / tile_rows * tile_rows; }

// Filled up with zeros. An odd number of lines of a cache: see `Decoded` in tiled.h.
inline int64_t row_bytes(const Product& p) {
  return tile_bytes * ((p.rows + tile_bytes - 1) / tile_bytes | 1);
}

// Scratch: (digit, row of the activation, row of the weight), and the units of the activation.
inline int64_t digit_bytes(const Product& p) { return whole_tiles(p.m) * row_bytes(p); }
inline float* units_in(const Product& p, char* scratch) {
  return reinterpret_cast<float*>(scratch + p.digits * digit_bytes(p));
}
int64_t scratch_size(const Product& p) {
  return p.digits * digit_bytes(p) + whole_tiles(p.m) * static_cast<int64_t>(sizeof(float));
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  ScaledActivation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = activation.row(i);
    const Units units(absmax_of(x, p.rows), p.digits);
    units_in(p, scratch)[i] = units.unit;
    const __m512 per_unit = _mm512_set1_ps(units.per_unit);
    int8_t* const to = reinterpret_cast<int8_t*>(scratch) + i * row_bytes(p);
    for (int64_t r = 0; r < row_bytes(p); r += lanes) {
      const __m512 some = _mm512_maskz_loadu_ps(r < p.rows ? first(p.rows - r) : 0, x + r);
      round_sixteen(some, per_unit, 0xFFFF, p.digits, to + r, to + digit_bytes(p) + r);
    }
  }
}

// Sums of two tiles of the activation, or of two digits of one, by two of the weight.
struct alignas(64) Sums {
  int32_t of[2][2][tile_rows][lanes];
};

// Tiles 0 to 3 are sums, 4 and 5 the activation, 6 and 7 the weight. `second` is how far the second
// tile of the activation is from the first one.
template <bool two, bool low>
void multiply(const int8_t* w, int64_t tile_stride, int64_t part_stride, const int8_t* x,
              int64_t x_stride, int64_t second, int64_t steps, Sums& sums) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < steps; k++, w += tile_size, x += rows_of_step) {
    _tile_loadd(4, x, x_stride);
    _tile_loadd(6, w, tile_bytes);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, w + tile_stride, tile_bytes);
    _tile_dpbssd(1, 4, 7);
    if constexpr (two) {
      _tile_loadd(5, x + second, x_stride);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    if constexpr (low) {
      _tile_loadd(6, w + part_stride, tile_bytes);
      _tile_dpbssd(2, 4, 6);
      _tile_loadd(7, w + tile_stride + part_stride, tile_bytes);
      _tile_dpbssd(3, 4, 7);
    }
  }
  _tile_stored(0, sums.of[0][0], tile_bytes);
  _tile_stored(1, sums.of[0][1], tile_bytes);
  if constexpr (two) {
    _tile_stored(2, sums.of[1][0], tile_bytes);
    _tile_stored(3, sums.of[1][1], tile_bytes);
  }
}

// Results of a turn, by sixteen columns: (tile of the weight, row of the activation).
struct Results {
  struct alignas(64) Columns {
    float values[lanes];
  };
  const int64_t rows;
  const std::unique_ptr<Columns[]> columns;

  Results(int64_t tiles, int64_t rows) : rows(rows), columns(new Columns[tiles * rows]) {}
  float* at(int64_t tile, int64_t row) const { return columns[tile * rows + row].values; }
};

// Those of sixteen rows of the activation by a tile of the weight, or what is to be added to them.
EQQUANT_INLINE void finish(const Product& p, const int32_t (&high)[tile_rows][lanes],
                           const int32_t (&low)[tile_rows][lanes], const float* x_units,
                           const float (&units)[lanes], bool adds, float* to) {
  for (int r = 0; r < tile_rows; r++, to += lanes) {
    // Not by the product of the units, which may be too small for a float.
    __m512 result = _mm512_mul_ps(sum_of(high[r], low[r], p.digits), _mm512_load_ps(units));
    result = _mm512_mul_ps(result, _mm512_set1_ps(x_units[r]));
    if (adds) result = _mm512_add_ps(result, _mm512_load_ps(to));
    _mm512_store_ps(to, result);
  }
}

// Rows of the activation from `begin` to `end`, which fill tiles but for the last one.
template <int bits>
void multiply_panel(const Product& p, const Panel<bits>& panel, const char* scratch,
                    int64_t begin, int64_t end, int64_t row, int64_t rows,
                    const Results& results) {
  const float* x_units = units_in(p, const_cast<char*>(scratch));
  const bool digits = p.digits > 1, low = panel.parts > 1;
  const int64_t stride = row_bytes(p), tile = tile_rows * stride;
  const int64_t second = digits ? digit_bytes(p) : tile;
  Sums sums;
  for (int64_t t = 0; t < panel.tiles; t += 2)
    for (int64_t i = begin; i < end; i += digits ? tile_rows : 2 * tile_rows) {
      const int8_t* x = reinterpret_cast<const int8_t*>(scratch) + i * stride + row;
      const bool two = digits || i + tile_rows < end;
      const auto product = low ? multiply<true, true>
                               : two ? multiply<true, false> : multiply<false, false>;
      product(panel.tile(t), panel.tile_stride(), panel.part_stride(), x, stride, second,
              Panel<bits>::steps_of(rows), sums);
      for (int64_t k = 0; k < std::min<int64_t>(2, panel.tiles - t); k++)
        for (int64_t x_tile = 0; x_tile < (two && !digits ? 2 : 1); x_tile++) {
          const int64_t at = i + x_tile * tile_rows;
          finish(p, sums.of[x_tile][k], sums.of[1][k], x_units + at, panel.units[t + k],
                 row > 0, results.at(t + k, at - begin));
        }
    }
}

// To where they belong.
void write(const Product& p, const Results& results, const Places* places, int64_t tiles,
           int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++)
    for (int64_t t = 0; t < tiles; t++) {
      const __m512 result = _mm512_load_ps(results.at(t, i - begin));
      const Places& of = places[t];
      for (int k = 0; k < of.count; k++)
        _mm512_mask_storeu_ps(p.y + i * p.columns() + of.column[k], of.some[k], result);
    }
}

template <int bits>
void run_bits(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const std::unique_ptr<Panel<bits>> panel(new Panel<bits>(p, end - begin));
  const Results results(Panel<bits>::tiles_of(std::min(end - begin, panel->most_bytes)),
                        std::min(whole_tiles(p.m), rows_in_turn));
  for (int64_t i = 0; i < p.m; i += rows_in_turn) {
    const int64_t until = std::min(p.m, i + rows_in_turn);
    for (int64_t j = begin; j < end; j += panel->most_bytes) {
      const int64_t bytes = std::min(panel->most_bytes, end - j);
      Pieces pieces(p, j, j + bytes);
      panel->find_places(j, bytes);
      for (int64_t row = 0; row < p.rows; row += panel->most_rows) {
        const int64_t rows = std::min(panel->most_rows, p.rows - row);
        panel->decode(pieces, row, rows, bytes);
        multiply_panel(p, *panel, scratch, i, until, row, rows, results);
      }
      write(p, results, panel->places, panel->tiles, i, until);
    }
  }
}

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const Configured configured;
  with_bits(p, [&](auto bits) { run_bits<bits>(p, scratch, begin, end); });
}

}  // namespace row_digits

extern const Routine row_digits_amx = {row_digits::prepare, row_digits::run,
                                       row_digits::scratch_size, always<64>,
                                       row_digits::why_not_blocks};

}  // namespace eqquant
EQQUANT_TARGET_END
