// int8 x @ w by AMX tiles.
//
// A row of the activation has one or two int8 parts, as in int8_x_wt.cpp, and is the left operand. The weight is the
// right operand (x_w_panel.h). If each row of the weight has one scale, the activation is multiplied by the scales
// before it is rounded.
#define EQQUANT_TARGET_AMX
#include <immintrin.h>

#include <algorithm>
#include <memory>

#include "decode/row_pieces.h"
#include "microkernels/amx/int8_parts.h"
#include "microkernels/amx/tiles.h"
#include "microkernels/amx/x_w_panel.h"
#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/scales.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

// Rows of the activation per pass. Each pass decodes the weight again. The second-level cache holds their int8
// values, a panel of the weight, and results.
constexpr int64_t rows_in_turn = 256;

inline int64_t whole_tiles(int64_t m) { return (m + tile_rows - 1) / tile_rows * tile_rows; }

// The bytes of an int8 row of the activation, padded with zeros to an odd number of cache lines. `Decoded` in
// x_wt.h has the reason.
inline int64_t row_bytes(const Product& p) {
  return tile_bytes * ((p.rows + tile_bytes - 1) / tile_bytes | 1);
}

// Scratch contains the activation (part, row of the activation, row of the weight), and then its units.
inline int64_t part_bytes(const Product& p) { return whole_tiles(p.m) * row_bytes(p); }
inline float* units_in(const Product& p, char* scratch) {
  return reinterpret_cast<float*>(scratch + p.parts * part_bytes(p));
}
int64_t scratch_size(const Product& p) {
  return p.parts * part_bytes(p) + whole_tiles(p.m) * static_cast<int64_t>(sizeof(float));
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  ScaledActivation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = activation.row(i);
    const Units units(activation.check(p, i), largest_of(p.parts));
    units_in(p, scratch)[i] = units.unit;
    const __m512 per_unit = _mm512_set1_ps(units.per_unit);
    int8_t* const to = reinterpret_cast<int8_t*>(scratch) + i * row_bytes(p);
    for (int64_t r = 0; r < row_bytes(p); r += lanes) {
      const __m512 some = _mm512_maskz_loadu_ps(r < p.rows ? first(p.rows - r) : 0, x + r);
      round_sixteen(some, per_unit, 0xFFFF, p.parts, to + r, to + part_bytes(p) + r);
    }
  }
}

// Results of a pass, in groups of sixteen columns: (tile of the weight, row of the activation).
struct Results {
  struct alignas(64) Columns {
    float values[lanes];
  };
  const int64_t rows;
  const std::unique_ptr<Columns[]> columns;

  Results(int64_t tiles, int64_t rows) : rows(rows), columns(new Columns[tiles * rows]) {}
  float* at(int64_t tile, int64_t row) const { return columns[tile * rows + row].values; }
};

// Writes the results of sixteen rows of the activation by a tile of the weight, or adds them.
EQQUANT_INLINE void finish(const Product& p, const int32_t (&high)[tile_rows][lanes],
                           const int32_t (&low)[tile_rows][lanes], const float* x_units,
                           const float (&units)[lanes], bool adds, float* to) {
  for (int r = 0; r < tile_rows; r++, to += lanes) {
    // Do not multiply the units first, because their product may underflow.
    __m512 result = _mm512_mul_ps(sum_of(high[r], low[r], p.parts), _mm512_load_ps(units));
    result = _mm512_mul_ps(result, _mm512_set1_ps(x_units[r]));
    if (adds) result = _mm512_add_ps(result, _mm512_load_ps(to));
    _mm512_store_ps(to, result);
  }
}

// Multiplies rows `begin` to `end` of the activation by a panel. The last tile may be partial.
template <int bits>
void multiply_panel(const Product& p, const Panel<bits>& panel, const char* scratch,
                    int64_t begin, int64_t end, int64_t row, int64_t rows,
                    const Results& results) {
  const float* x_units = units_in(p, const_cast<char*>(scratch));
  const bool split = p.parts > 1, low = panel.parts > 1;
  const int64_t stride = row_bytes(p), tile = tile_rows * stride;
  const int64_t second = split ? part_bytes(p) : tile;
  Sums sums;
  for (int64_t t = 0; t < panel.tiles; t += 2)
    for (int64_t i = begin; i < end; i += split ? tile_rows : 2 * tile_rows) {
      const char* x = scratch + i * stride + row;
      const bool two = split || i + tile_rows < end;
      const auto nothing = [] {};
      using Nothing = decltype(nothing);
      const auto product = low   ? multiply<int8_t, false, true, true, Nothing&>
                           : two ? multiply<int8_t, false, true, false, Nothing&>
                                 : multiply<int8_t, false, false, false, Nothing&>;
      product({panel.tile(t), tile_bytes, tile_size, panel.tile_stride(), panel.part_stride()},
              {x, stride, rows_of_step, second, 0}, Panel<bits>::steps_of(rows), nothing, sums);
      for (int64_t k = 0; k < std::min<int64_t>(2, panel.tiles - t); k++)
        for (int64_t x_tile = 0; x_tile < (two && !split ? 2 : 1); x_tile++) {
          const int64_t at = i + x_tile * tile_rows;
          finish(p, sums.of[k][x_tile], sums.of[k][1], x_units + at, panel.units[t + k],
                 row > 0, results.at(t + k, at - begin));
        }
    }
}

// Writes results to their places.
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

}  // namespace
EQQUANT_END

namespace eqquant {
extern const Routine int8_x_w_amx = {amx::prepare, amx::run, amx::scratch_size, always<64>,
                                     amx::why_not_blocks};
}  // namespace eqquant
