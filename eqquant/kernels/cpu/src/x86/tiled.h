// Products by tiles, for any `Element`. Included into a namespace, and under a target.
//
// The decoded weight is the left operand, so that its rows stay rows of a tile. Of the
// activation, on the right, four bytes of each of sixteen rows are next to one another. Both
// are multiplied a *span* of codes at a time, of which a second-level cache holds the decoded
// weight beside a turn of the activation.
//
// An `Element` has these:
//
// - `Number`: what tiles hold, int8 or bfloat16
// - `space(p)`: bytes of scratch beside the tiles, for what `round` leaves there
// - `round(layout, i, x, row, stride)`: row `i` of the activation as `p.digits` rows of numbers
// - `decode(span, row, rows, space)`: rows of the weight, in that space or where they are; and
//   `low_parts()`: whether these have a second part, which is multiplied by the first one of the
//   activation
// - `result(first, high, low, r)`: of row `r` of tiles of sums by rows of the activation from
//   `first` on, `low` of its second digits

#include "absmax.h"
#include "tiles_amx.h"
#include "transpose.h"

// Rows of the weight at once: two tiles. And the activation that a turn takes.
constexpr int rows_at_once = 2 * tile_rows;
constexpr int64_t cached_bytes = 1 << 20;

inline int64_t tiles_of(const Product& p) { return (p.m + tile_rows - 1) / tile_rows; }

// Some bytes of each row of codes, of which the numbers begin at a step.
struct Span {
  int64_t begin, bytes;
  int64_t plane;  // Numbers from one plane to the next.
  int64_t first, steps;
};

// Where the numbers of a row are: a span after the other, and in it the planes, each filled up
// to four bytes, and together to whole steps, of 64 bytes.
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
  // Bytes of a row, and of the tiles that sixteen of the activation are.
  int64_t length() const { return steps() * tile_bytes; }
  int64_t tiles() const { return length() * p.digits * tile_rows; }

  // `use(logical, place, length)` for each run of a row.
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

// Decoded rows of the weight: `rows_at_once`, and then their second parts. Rows that are read at
// once are not a power of two from each other, or a cache has no room for them.
template <class Number>
struct Decoded {
  Number* numbers;
  int64_t stride;

  Number* row(int r, int part = 0) const { return numbers + (part * rows_at_once + r) * stride; }
};

// Scratch is the activation as tiles, (rows of a tile, step, digit), and then `Element`'s.
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
  // Of each of sixteen rows its digits. What is between planes stays zero.
  const int64_t stride = (layout.length() + tile_bytes) / layout.size, row = p.digits * stride;
  std::vector<Number> rounded(tile_rows * row);
  for (int64_t i = begin; i < end;) {
    const int64_t tile = i / tile_rows, stop = std::min(end, (tile + 1) * tile_rows);
    const __mmask16 some = first(stop - tile * tile_rows) & ~first(i % tile_rows);
    for (; i < stop; i++)
      element.round(layout, i, activation.row(i), &rounded[i % tile_rows * row], stride);
    char* to = scratch + tile * layout.tiles();
    for (int64_t step = 0; step < layout.steps(); step++)
      for (int digit = 0; digit < p.digits; digit++, to += tile_rows * tile_bytes) {
        __m512i x[16];
        for (int k = 0; k < 16; k++)
          x[k] = _mm512_loadu_si512(&rounded[k * row + digit * stride + step * layout.of_step]);
        transpose(x);
        for (int k = 0; k < 16; k++) _mm512_mask_storeu_epi32(to + k * tile_bytes, some, x[k]);
      }
  }
}

// How far ahead codes of a span are asked for while others are decoded: some rows, as what follows
// in memory may be of another span.
inline int64_t far_ahead(const Product& p, const Span& span) {
  return std::max<int64_t>(1, (1 << 14) / span.bytes) * p.packed;
}

// What is decoded next, which is asked for while tiles are multiplied, too: some lines of it for
// each step.
struct Ahead {
  const uint8_t* codes;
  int64_t packed, bytes, rows, j = 0;

  EQQUANT_INLINE void ask() {
    for (int i = 0; i < 4; i++) {
      if (j >= bytes) j = 0, codes += packed, rows--;
      if (rows <= 0) return;
      __builtin_prefetch(codes + j, 0, 2);
      j += 64;
    }
  }
};

// Sums of two tiles of the weight by one or two of the activation.
struct alignas(64) Sums {
  int32_t of[2][2][tile_rows][16];  // (of the weight, of the activation, row of each)
};

// Instructions have the numbers of their tiles in them.
#define EQQUANT_MULTIPLY(sum, weight, x)                                  \
  if constexpr (sizeof(typename Element::Number) == 1)                    \
    _tile_dpbssd(sum, weight, x);                                         \
  else                                                                    \
    _tile_dpbf16ps(sum, weight, x)

// Tiles 0 to 3 are sums, 4 and 5 the weight, 6 and 7 the activation. `next` of a digit, or of
// rows, and `step` are from a tile of the activation on to another one.
template <class Element, bool two, bool low>
void multiply(const Decoded<typename Element::Number>& decoded, int64_t steps, const char* x,
              int64_t next, int64_t step, Ahead& ahead, Sums& sums) {
  const int64_t stride = decoded.stride * sizeof(typename Element::Number);
  const int64_t half = tile_rows * stride;
  const char* w = reinterpret_cast<const char*>(decoded.numbers);
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (two) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (; steps; steps--, w += tile_bytes, x += step) {
    ahead.ask();
    _tile_loadd(6, x, tile_bytes);
    _tile_loadd(4, w, stride);
    EQQUANT_MULTIPLY(0, 4, 6);
    _tile_loadd(5, w + half, stride);
    EQQUANT_MULTIPLY(2, 5, 6);
    if constexpr (two) {
      _tile_loadd(7, x + next, tile_bytes);
      EQQUANT_MULTIPLY(1, 4, 7);
      EQQUANT_MULTIPLY(3, 5, 7);
    }
    if constexpr (low) {
      _tile_loadd(4, w + 2 * half, stride);
      EQQUANT_MULTIPLY(1, 4, 6);
      _tile_loadd(5, w + 3 * half, stride);
      EQQUANT_MULTIPLY(3, 5, 6);
    }
  }
  _tile_stored(0, sums.of[0][0], tile_bytes);
  _tile_stored(2, sums.of[1][0], tile_bytes);
  if constexpr (two) {
    _tile_stored(1, sums.of[0][1], tile_bytes);
    _tile_stored(3, sums.of[1][1], tile_bytes);
  }
}

#undef EQQUANT_MULTIPLY

// The results of sixteen rows of the weight, of which the first `rows` are wanted, by a tile of
// the activation from its row `i` on: `p.y`, or what is to be added to it.
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
  const bool low = element.low_parts(), digits = p.digits > 1;
  struct alignas(64) Line {
    char bytes[64];
  };
  const int64_t lines = layout.span(0).steps + 1;
  std::vector<Line> buffer(lines * rows_at_once * (low ? 2 : 1));
  const Decoded<Number> space{reinterpret_cast<Number*>(buffer.data()), lines * layout.of_step};
  const Configured configured;
  Sums sums;
  const int64_t tiles = tiles_of(p), step = p.digits * tile_rows * tile_bytes;
  for (int64_t s = 0; s < layout.count; s++) {
    const Span span = layout.span(s);
    const int64_t in_turn = std::max<int64_t>(2, cached_bytes / (span.steps * step) / 2 * 2);
    for (int64_t first = 0; first < tiles; first += in_turn)
      for (int64_t row = begin; row < end; row += rows_at_once) {
        const int64_t rows = std::min<int64_t>(rows_at_once, end - row);
        const auto decoded = element.decode(span, row, static_cast<int>(rows), space);
        const int64_t last = std::min(tiles, first + in_turn), following = row + rows_at_once;
        Ahead ahead{p.codes + following * p.packed + span.begin, p.packed, span.bytes,
                    std::min<int64_t>(rows_at_once, end - following)};
        for (int64_t t = first; t < last; t += digits ? 1 : 2) {
          const char* x = scratch + t * layout.tiles() + span.first * step;
          const bool two = digits || t + 1 < last;
          const int64_t next = digits ? tile_rows * tile_bytes : layout.tiles();
          const auto product = low   ? multiply<Element, true, true>
                               : two ? multiply<Element, true, false>
                                     : multiply<Element, false, false>;
          product(decoded, span.steps, x, next, step, ahead, sums);
          for (int half = 0; half < 2; half++)
            for (int tile = 0; tile < (two && !digits ? 2 : 1); tile++)
              finish(p, element, sums, half, (t + tile) * tile_rows, tile,
                     row + half * tile_rows, rows - half * tile_rows, s > 0);
        }
      }
  }
}
