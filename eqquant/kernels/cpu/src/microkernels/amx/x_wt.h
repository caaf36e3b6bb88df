// x @ w.T by AMX tiles, for any `Element`.
//
// The decoded weight is the left operand: its rows are rows of a tile. The activation is the right operand: a row
// of a tile has four bytes of each of sixteen rows of the activation. Both are multiplied a *span* of codes at a
// time. The second-level cache holds the decoded span and a part of the activation.
//
// An `Element` provides:
//
// - `Number`: the type of the values in tiles, int8 or bfloat16
// - `space(p)`: the bytes of scratch that `round` uses in addition to the tiles
// - `round(layout, i, x, row, stride)`: rounds row `i` of the activation to `p.parts` rows of numbers
// - `decode(span, row, rows, space)`: decodes rows of the weight into `space`, or returns their place
// - `low_parts()`: whether decoded rows have a low part, which is multiplied by the high part of the activation
// - `result(first, high, low, r)`: the results of row `r` of sums, for rows of the activation from `first` on
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "microkernels/amx/tiles.h"
#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/transpose.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Rows of the weight per step (two tiles), and bytes of the activation per pass.
constexpr int weight_rows = 2 * tile_rows;
constexpr int64_t cached_bytes = 1 << 20;

inline int64_t tiles_of(const Product& p) { return (p.m + tile_rows - 1) / tile_rows; }

// Bytes of each row of codes. Their numbers begin at step `first`.
struct Span {
  int64_t begin, bytes;
  int64_t plane;  // Numbers from one plane to the next.
  int64_t first, steps;
};

// The layout of the numbers of a row: (span, plane, byte). A plane is padded to four bytes, and a span to whole steps
// of 64 bytes.
template <class Number>
struct Layout {
  static constexpr int64_t size = sizeof(Number), of_step = tile_bytes / size;
  const Product& p;
  int64_t bytes, count;

  explicit Layout(const Product& p)
      : p(p),
        bytes(std::min(p.packed, std::max<int64_t>(64, 4096 / size / p.planes()))),
        count((p.packed + bytes - 1) / bytes) {}

  Span span(int64_t i) const {
    Span out{i * bytes, std::min(bytes, p.packed - i * bytes), 0, i * steps(bytes), 0};
    out.plane = plane(out.bytes), out.steps = steps(out.bytes);
    return out;
  }
  int64_t steps() const { return span(count - 1).first + span(count - 1).steps; }
  // The bytes of a row, and of the tiles of sixteen rows of the activation.
  int64_t length() const { return steps() * tile_bytes; }
  int64_t tiles() const { return length() * p.parts * tile_rows; }

  // Calls `use(logical, place, length)` for each run of a row.
  template <class Use>
  void for_each_run(const Use& use) const {
    for (int64_t i = 0; i < count; i++) {
      const Span s = span(i);
      eqquant::for_each_run(p, s.begin, s.begin + s.bytes,
                            [&](int64_t logical, int64_t planar, int64_t length) {
                              const int64_t plane = planar / p.packed;
                              use(logical,
                                  s.first * of_step + plane * s.plane + planar % p.packed - s.begin,
                                  length);
                            });
    }
  }

 private:
  static int64_t plane(int64_t bytes) { return (bytes * size + 3) / 4 * 4 / size; }
  int64_t steps(int64_t bytes) const {
    return (plane(bytes) * p.planes() + of_step - 1) / of_step;
  }
};

// Decoded rows of the weight: `weight_rows` high parts, and then their low parts. Rows that are read together must
// not be a power of two apart, because they would compete for the same cache sets.
template <class Number>
struct Decoded {
  Number* numbers;
  int64_t stride;

  Number* row(int r, int part = 0) const { return numbers + (part * weight_rows + r) * stride; }
};

// Scratch contains the activation as tiles (tile, step, part), and then the scratch of the `Element`.
template <class Element>
int64_t scratch_size(const Product& p) {
  const Layout<typename Element::Number> layout(p);
  return tiles_of(p) * layout.tiles() + Element::space(p);
}

template <class Element>
char* space_in(const Product& p, const Layout<typename Element::Number>& layout, char* scratch) {
  return scratch + tiles_of(p) * layout.tiles();
}

template <class Element>
void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  using Number = typename Element::Number;
  const Layout<Number> layout(p);
  Element element(p, space_in<Element>(p, layout, scratch));
  Activation activation(p);
  // The parts of sixteen rows. The padding between planes stays zero.
  const int64_t stride = (layout.length() + tile_bytes) / layout.size, row = p.parts * stride;
  std::vector<Number> rounded(tile_rows * row);
  for (int64_t i = begin; i < end;) {
    const int64_t tile = i / tile_rows, stop = std::min(end, (tile + 1) * tile_rows);
    const __mmask16 some = first(stop - tile * tile_rows) & ~first(i % tile_rows);
    for (; i < stop; i++)
      element.round(layout, i, activation.row(i), &rounded[i % tile_rows * row], stride);
    char* to = scratch + tile * layout.tiles();
    for (int64_t step = 0; step < layout.steps(); step++)
      for (int part = 0; part < p.parts; part++, to += tile_rows * tile_bytes) {
        __m512i x[16];
        for (int k = 0; k < 16; k++)
          x[k] = _mm512_loadu_si512(&rounded[k * row + part * stride + step * layout.of_step]);
        transpose(x);
        for (int k = 0; k < 16; k++) _mm512_mask_storeu_epi32(to + k * tile_bytes, some, x[k]);
      }
  }
}

// The prefetch distance while a span is decoded: some rows, because the next bytes in memory may belong to another
// span.
inline int64_t far_ahead(const Product& p, const Span& span) {
  return std::max<int64_t>(1, (1 << 14) / span.bytes) * p.packed;
}

// Prefetches the rows that are decoded next, while tiles are multiplied: four cache lines per step.
struct Ahead {
  const uint8_t* codes;
  int64_t packed, bytes, rows, j = 0;

  EQQUANT_INLINE void operator()() {
    for (int i = 0; i < 4; i++) {
      if (j >= bytes) j = 0, codes += packed, rows--;
      if (rows <= 0) return;
      __builtin_prefetch(codes + j, 0, 2);
      j += 64;
    }
  }
};

// Writes the results of sixteen rows of the weight by a tile of the activation to `p.y`, or adds them. The first
// `rows` rows are used, and the tile starts at row `i` of the activation.
template <class Element>
void finish(const Product& p, const Element& element, const Sums& sums, int half, int64_t i,
            int tile, int64_t row, int64_t rows, bool adds) {
  if (rows <= 0) return;
  __m512i y[16];
  const auto& of = sums.of[half];
  for (int r = 0; r < 16; r++)
    y[r] = _mm512_castps_si512(element.result(i, of[tile][r], of[1][r], half * tile_rows + r));
  transpose(y);
  const __mmask16 some = first(rows);
  for (int64_t k = 0; k < std::min<int64_t>(16, p.m - i); k++) {
    float* to = p.y + (i + k) * p.rows + row;
    __m512 result = _mm512_castsi512_ps(y[k]);
    if (adds) result = _mm512_add_ps(result, _mm512_maskz_loadu_ps(some, to));
    _mm512_mask_storeu_ps(to, some, result);
  }
}

template <class Element>
void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  using Number = typename Element::Number;
  const Layout<Number> layout(p);
  Element element(p, space_in<Element>(p, layout, const_cast<char*>(scratch)));
  const bool low = element.low_parts(), split = p.parts > 1;
  struct alignas(64) Line {
    char bytes[64];
  };
  const int64_t lines = layout.span(0).steps + 1;
  std::vector<Line> buffer(lines * weight_rows * (low ? 2 : 1));
  const Decoded<Number> space{reinterpret_cast<Number*>(buffer.data()), lines * layout.of_step};
  const Configured configured;
  Sums sums;
  const int64_t tiles = tiles_of(p), step = p.parts * tile_rows * tile_bytes;
  for (int64_t s = 0; s < layout.count; s++) {
    const Span span = layout.span(s);
    const int64_t in_turn = std::max<int64_t>(2, cached_bytes / (span.steps * step) / 2 * 2);
    for (int64_t first = 0; first < tiles; first += in_turn)
      for (int64_t row = begin; row < end; row += weight_rows) {
        const int64_t rows = std::min<int64_t>(weight_rows, end - row);
        const auto decoded = element.decode(span, row, static_cast<int>(rows), space);
        const int64_t last = std::min(tiles, first + in_turn), following = row + weight_rows;
        Ahead ahead{p.codes + following * p.packed + span.begin, p.packed, span.bytes,
                    std::min<int64_t>(weight_rows, end - following)};
        for (int64_t t = first; t < last; t += split ? 1 : 2) {
          const char* x = scratch + t * layout.tiles() + span.first * step;
          const bool two = split || t + 1 < last;
          const int64_t next = split ? tile_rows * tile_bytes : layout.tiles();
          const auto product = low   ? multiply<Number, true, true, true, Ahead&>
                               : two ? multiply<Number, true, true, false, Ahead&>
                                     : multiply<Number, true, false, false, Ahead&>;
          const int64_t stride = decoded.stride * layout.size, half = tile_rows * stride;
          product({reinterpret_cast<const char*>(decoded.numbers), stride, tile_bytes, half, 2 * half},
                  {x, tile_bytes, step, next, 0}, span.steps, ahead, sums);
          for (int half = 0; half < 2; half++)
            for (int tile = 0; tile < (two && !split ? 2 : 1); tile++)
              finish(p, element, sums, half, (t + tile) * tile_rows, tile,
                     row + half * tile_rows, rows - half * tile_rows, s > 0);
        }
      }
  }
}

EQQUANT_END
