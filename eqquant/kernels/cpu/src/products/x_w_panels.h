// x @ w for many rows of the activation, for any `Vector`. Rows of the weight are decoded once, with their
// scales, into the second-level cache, and multiplied by the whole activation. A `Panel` defines the decoded
// type and its product:
//
// - `most_columns` and `most_rows` (even): the size of a panel
// - `most_at_once`: rows of the activation per step
// - `by_columns`: whether a part of the columns stays in cache for all rows of the activation
// - `decode(pieces, row, rows, bytes)`: decodes `bytes` bytes of the rows from `row` on
// - `multiply(vectors, v, count, m, row, rows, y, y_stride)`: multiplies vectors from `v` on by rows of the
//   activation from `m` on, and adds to the results if rows before `row` exist
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "decode/row_pieces.h"
#include "products/panel_product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Rows of the activation per pass. Each pass decodes the weight again. Their results stay in the
// second-level cache, and in few pages.
constexpr int64_t rows_in_turn = 512;

// True if blocks are whole vectors of bytes.
inline bool fits_panels(const Product& p, int64_t begin, int64_t end) {
  if (begin % Vector::size || end % Vector::size) return false;
  return p.blocks == 1 || p.block_bytes() % Vector::size == 0 || in_pairs(p);
}

// If a vector ends two runs of half its size, the halves of two planes form vectors of consecutive columns.
inline bool in_halves(const Product& p) { return p.planes() > 1 && 2 * p.run == Vector::size; }

// Writes the values of vector `v` in one plane. Vectors are in groups of `side_by_side`, `stride` apart.
template <int planes, int plane>
EQQUANT_INLINE void write_vector(Vector::Floats out, float* to, int64_t v, int64_t stride,
                                 bool halves) {
  constexpr int64_t size = Vector::size;
  const auto at = [&](int64_t i) {
    return to + i / side_by_side * stride + i % side_by_side * size;
  };
  if (!halves) {
    Vector::store(at(v * planes + plane), out);
  } else if constexpr (planes > 1) {
    alignas(4 * size) float both[size];
    Vector::store(both, out);
    constexpr int64_t half = size / 2, first = plane / 2, odd = plane % 2 * half;
    std::memcpy(at(v * planes + first) + odd, both, half * sizeof(float));
    std::memcpy(at(v * planes + planes / 2 + first) + odd, both + half, half * sizeof(float));
  }
}

template <class Panel>
void row_panel(const Product& p, Panel& panel, int64_t first, const Groups& groups, int64_t begin,
               int64_t bytes) {
  constexpr int64_t size = Vector::size;
  const int64_t planes = p.planes(), vectors = bytes / size * planes;
  float* y[Panel::most_columns / size + side_by_side];
  // If a vector contains the end of one run and the start of the next, results are permuted afterwards.
  const bool halves = in_halves(p), in_order = p.run % size == 0 || halves;
  const int64_t y_stride = in_order ? p.columns() : vectors * size;
  std::vector<float> unordered(in_order ? 0 : p.m * y_stride);
  std::fill(std::begin(y), std::end(y), in_order ? p.y : unordered.data());
  for (int64_t v = 0; v < vectors; v++) {
    const int64_t j = v / planes * size, byte = begin + j, plane = v % planes;
    y[v] += halves     ? (begin * planes) + v * size
            : in_order ? (byte / p.run * planes + plane) * p.run + byte % p.run
                       : plane * bytes + j;
  }
  const int64_t slices = (vectors + side_by_side - 1) / side_by_side;
  Pieces pieces(p, begin, begin + bytes);
  for (int64_t row = 0; row < p.rows; row += Panel::most_rows) {
    const int64_t rows = std::min(Panel::most_rows, p.rows - row);
    panel.decode(pieces, row, rows, bytes);
    const auto multiply = [&](int64_t slice, int64_t g) {
      const int64_t v = slice * side_by_side;
      float* to[side_by_side];
      for (int i = 0; i < side_by_side; i++) to[i] = y[v + i] + groups.first(g) * y_stride;
      panel.multiply(static_cast<int>(std::min<int64_t>(side_by_side, vectors - v)), v,
                     groups.size(g), first + groups.first(g), row, rows, to, y_stride);
    };
    if (Panel::by_columns) {
      for (int64_t s = 0; s < slices; s++)
        for (int64_t g = 0; g < groups.count; g++) multiply(s, g);
    } else {
      for (int64_t g = 0; g < groups.count; g++)
        for (int64_t s = 0; s < slices; s++) multiply(s, g);
    }
  }
  for (int64_t m = 0; m < p.m && !in_order; m++) {
    const float* from = unordered.data() + m * y_stride;
    float* to = p.y + m * p.columns();
    for_each_run(p, begin, begin + bytes, [&](int64_t logical, int64_t planar, int64_t length) {
      const int64_t plane = planar / p.packed, byte = planar % p.packed;
      std::memcpy(to + logical, from + plane * bytes + byte - begin, length * sizeof(float));
    });
  }
}

template <class Panel>
void row_panels(const Product& p, Panel panel, int64_t begin, int64_t end) {
  const Groups turns(p.m, rows_in_turn);
  const int64_t some = Panel::most_columns / p.planes();
  Product part = p;
  for (int64_t i = 0; i < turns.count; i++) {
    part.m = turns.size(i);
    part.y = p.y + turns.first(i) * p.columns();
    const Groups groups(part.m, Panel::most_at_once);
    for (int64_t j = begin; j < end; j += some)
      row_panel(part, panel, turns.first(i), groups, j, std::min(some, end - j));
  }
}

EQQUANT_END
