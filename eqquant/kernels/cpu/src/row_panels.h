// x @ w in float32 for more rows of the activation, for any `Vector`. Some rows of the weight
// are decoded once, with their scales, into a second-level cache, and multiplied with all of
// the activation, which is read as it is.

#include "panel.h"

// How much of each row is decoded at once, by measuring, and so how many rows.
// Rows of the activation in one turn, for which the weight is decoded again: results of so many
// stay in a second-level cache while rows of the weight are added up, and in few pages.
constexpr int64_t rows_in_turn = 512;
constexpr int64_t panel_columns(int planes) { return planes == 1 || planes > 2 ? 256 : 128; }

// Whether vectors of bytes are parts of blocks, and there are enough rows.
inline bool fits_panels(const Product& p, int64_t begin, int64_t end) {
  if (p.m < Vector::rows_for_panels || begin % Vector::size || end % Vector::size) return false;
  return p.blocks == 1 || p.block_bytes() % Vector::size == 0 || in_pairs(p);
}

template <int bits, Scaling scaling>
struct Panels {
  static constexpr int64_t size = Vector::size, planes = planes_of(bits);
  static constexpr int64_t most_columns = panel_columns(planes);
  static constexpr int64_t most_rows = panel_floats / most_columns;
  static constexpr int64_t bytes_at_once = most_columns / planes;

  Product p;
  const float* all_x;
  std::vector<float> buffer;
  Space decoded;

  Panels(const Product& p, const float* x)
      : p(p),
        all_x(x),
        buffer(p.bfloat16_scales ? rows_at_once * p.blocks : 0),
        decoded(most_columns * std::min(most_rows, p.rows)) {}

  // Where a vector has the ends of two runs, which are half of it each, those of two planes
  // are one vector of columns that follow each other, and so are the others.
  static bool in_halves(const Product& p) { return planes > 1 && 2 * p.run == size; }

  template <int plane = 0>
  static EQQUANT_INLINE void write(const BlockDecoder<bits, scaling>& decoder,
                                   typename Decoder<bits>::Codes codes, float* to,
                                   int64_t vector, int64_t stride, bool halves) {
    const auto at = [&](int64_t v) {
      return to + v / side_by_side * stride + v % side_by_side * size;
    };
    const Vector::Floats out = decoder.template decode<plane>(codes);
    if (!halves) {
      Vector::store(at(vector + plane), out);
    } else if constexpr (planes > 1) {
      alignas(4 * size) float both[size];
      Vector::store(both, out);
      constexpr int64_t half = size / 2, first = plane / 2, odd = plane % 2 * half;
      std::memcpy(at(vector + first) + odd, both, half * sizeof(float));
      std::memcpy(at(vector + planes / 2 + first) + odd, both + half, half * sizeof(float));
    }
    if constexpr (plane + 1 < planes)
      write<plane + 1>(decoder, codes, to, vector, stride, halves);
  }

  // So many bytes of the rows from `row` on: (four vectors, row, vector).
  void decode(Pieces& pieces, int64_t row, int64_t rows, int64_t bytes) {
    const auto levels = Decoder<bits>::levels(p);
    const int64_t stride = rows * side_by_side * size, block = p.block_bytes() * scales_at_once(scaling);
    const int64_t ahead = p.three_bits ? 0 : rows_at_once * p.packed;
    const bool halves = in_halves(p);
    float* to = decoded.data();
    for (int64_t done = 0; done < rows; done += rows_at_once) {
      const int some = static_cast<int>(std::min<int64_t>(rows_at_once, rows - done));
      const uint8_t* codes = pieces.of(row + done, some);
      const float* scales = scales_of(p, row + done, some, buffer.data());
      for (int r = 0; r < some; r++, codes += pieces.row_bytes, scales += p.blocks) {
        BlockDecoder<bits, scaling> decoder;
        int64_t until = 0;
        for (int64_t j = 0; j < bytes; j += size) {
          // Some rows ahead: they are too far apart for the hardware to find out.
          if (j % 64 == 0) __builtin_prefetch(codes + j + ahead);
          if (pieces.begin + j >= until) {
            const int64_t b = (pieces.begin + j) / block;
            decoder.begin(levels, scales + b * scales_at_once(scaling));
            until = (b + 1) * block;
          }
          write(decoder, Decoder<bits>::read(Vector::bytes(codes + j)), to, j / size * planes,
                stride, halves);
        }
        to += side_by_side * size;
      }
    }
  }

  void run(int64_t begin, int64_t bytes, const Groups& groups) {
    const int64_t vectors = bytes / size * planes;
    float* y[most_columns / size + side_by_side];
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
    Pieces pieces(p, begin, begin + bytes);
    for (int64_t row = 0; row < p.rows; row += most_rows) {
      const int64_t rows = std::min(most_rows, p.rows - row);
      decode(pieces, row, rows, bytes);
      for (int64_t g = 0; g < groups.count; g++) {
        const float* x = all_x + groups.first(g) * p.rows + row;
        for (int64_t v = 0; v < vectors; v += side_by_side) {
          float* to[side_by_side];
          for (int i = 0; i < side_by_side; i++) to[i] = y[v + i] + groups.first(g) * y_stride;
          const int some = static_cast<int>(std::min<int64_t>(side_by_side, vectors - v));
          multiply_panel(some, groups.size(g), decoded.data() + v * rows * size, x, p.rows, rows,
                         to, y_stride, row > 0);
        }
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
};

template <int bits, Scaling scaling>
void panels(const Product& p, const float* x, int64_t begin, int64_t end) {
  Panels<bits, scaling> of(p, x);
  const Groups turns(p.m, rows_in_turn);
  constexpr int64_t some = Panels<bits, scaling>::bytes_at_once;
  for (int64_t i = 0; i < turns.count; i++) {
    of.p.m = turns.size(i);
    of.p.y = p.y + turns.first(i) * p.columns();
    of.all_x = x + turns.first(i) * p.rows;
    const Groups groups(of.p.m, Vector::most_at_once);
    for (int64_t j = begin; j < end; j += some) of.run(j, std::min(some, end - j), groups);
  }
}

template <int bits>
void rows_of_many(const Product& p, const float* x, int64_t begin, int64_t end) {
  if constexpr (2 * shortest_block == Vector::size)
    if (in_pairs(p)) return panels<bits, Scaling::pair>(p, x, begin, end);
  panels<bits, Scaling::block>(p, x, begin, end);
}
