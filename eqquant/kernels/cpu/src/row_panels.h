// x @ w for more rows of the activation, for any `Vector`. Some rows of the weight are decoded
// once, with their scales, into a second-level cache, and multiplied with all of the activation.
// What is decoded, and how that is multiplied, is a `Panel`:
//
// - `most_columns` are decoded at once, of `most_rows`, which is even
// - `most_at_once` rows of the activation are multiplied at once
// - `by_columns`: whether a part of the columns stays in a cache for all rows of the activation
// - `decode(pieces, row, rows, bytes)`: so many bytes of the rows from `row` on
// - `multiply(vectors, v, count, m, row, rows, y, y_stride)`: some vectors of these from `v` on
//   by rows of the activation from `m` on; adds to the results, if there are rows before `row`

#include "panel.h"

// Rows of the activation in one turn, for which the weight is decoded again: results of so many
// stay in a second-level cache while rows of the weight are added up, and in few pages.
constexpr int64_t rows_in_turn = 512;

// Whether vectors of bytes are parts of blocks.
inline bool fits_panels(const Product& p, int64_t begin, int64_t end) {
  if (begin % Vector::size || end % Vector::size) return false;
  return p.blocks == 1 || p.block_bytes() % Vector::size == 0 || in_pairs(p);
}

// Where a vector has the ends of two runs, which are half of it each, those of two planes are one
// vector of columns that follow each other, and so are the others.
inline bool in_halves(const Product& p) { return p.planes() > 1 && 2 * p.run == Vector::size; }

// Writes what vector `v` of some bytes has of a plane. Vectors are in groups of `side_by_side`,
// `stride` after each other.
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
  // Where a vector has the end of one run and the start of the next, results are put into
  // their order afterwards.
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
