// float32 x @ w, for any `Vector`. For few rows of the activation: adds each row of the weight, times a number, to
// the result.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "decode/row_pieces.h"
#include "decode/scales.h"
#include "products/float_x_w_panels.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Rows of the weight per update of the result in memory. From four rows of the activation on, use more,
// because the results take more of the time.
constexpr int most_rows_at_once = 128;

// Values in registers are passed as arguments. float_x_wt_gemv.h has the reason.
template <int bits, int vectors, int count, int blocks = 1>
struct Rows {
  using Floats = Vector::Floats;
  static constexpr int planes = planes_of(bits);
  using Codes = typename Decoder<bits>::Codes;
  using Levels = typename Decoder<bits>::Levels;
  using Sums = Floats[vectors][planes][count];
  // Each vector contains two blocks, and its values are multiplied by their scales. Otherwise the scales are
  // part of the multipliers of rows.
  static constexpr bool in_halves = blocks > vectors;

  template <int plane, class Size>
  static EQQUANT_INLINE void move(Sums& sums, float* out, int64_t ld, int64_t stride, int v,
                                  bool in, Size size) {
    for (int i = 0; i < count; i++) {
      float* at = out + i * ld + plane * stride + v * Vector::size;
      if (in)
        sums[v][plane][i] = floats_of(at, size);
      else
        write(at, sums[v][plane][i], size);
    }
    if constexpr (plane + 1 < planes) move<plane + 1>(sums, out, ld, stride, v, in, size);
  }

  template <int plane>
  static EQQUANT_INLINE void add(Sums& sums, const Levels& levels, Codes codes, Floats scale,
                                 const Floats* x, int v) {
    Floats weight = Decoder<bits>::template decode<plane>(levels, codes);
    if (in_halves) weight = Vector::multiply(weight, scale);
    for (int i = 0; i < count; i++)
      sums[v][plane][i] = Vector::multiply_add(weight, x[i], sums[v][plane][i]);
    if constexpr (plane + 1 < planes) add<plane + 1>(sums, levels, codes, scale, x, v);
  }

  // The multiplier of each row, for each block of the vectors. `scales` are the scales of the rows for one
  // block.
  using Factors = float[count][most_rows_at_once][in_halves ? 1 : blocks];

  static EQQUANT_INLINE void multiply(const Product& p, const float* x, const float* scales,
                                      int64_t row, int rows, Factors& factors) {
    if constexpr (blocks == 1) {
      for (int r = 0; r < rows; r += Vector::size) {
        const Floats scale = Vector::load(scales + r);
        const int some = std::min(rows - r, Vector::size);
        for (int i = 0; i < count; i++)
          Vector::store(&factors[i][r][0],
                        Vector::multiply(Vector::load(x + i * p.rows + row + r, some), scale));
      }
    } else {
      for (int r = 0; r < rows; r++, scales += p.blocks)
        for (int i = 0; i < count; i++) {
          const float of_row = x[i * p.rows + row + r];
          if constexpr (blocks == 4) {
            const float all[] = {of_row, of_row, of_row, of_row};
            Vector::store(factors[i][r], Vector::multiply(Vector::load_four(scales),
                                                          Vector::load_four(all)));
          } else {
            for (int b = 0; b < blocks; b++) factors[i][r][b] = of_row * scales[b];
          }
        }
    }
  }

  // `out` is a piece of the result in plane order, with planes `stride` apart.
  template <class Size>
  static EQQUANT_INLINE void run(const Product& p, const float* x, const float* scales,
                                 int64_t row, int rows, const uint8_t* codes,
                                 int64_t row_bytes, float* out, int64_t ld, int64_t stride,
                                 Size size) {
    const Levels levels = Decoder<bits>::levels(p);
    alignas(64) Factors factors;
    if constexpr (!in_halves) multiply(p, x, scales, row, rows, factors);
    Sums sums;
    for (int v = 0; v < vectors; v++) move<0>(sums, out, ld, stride, v, true, size);
    for (int r = 0; r < rows; r++, codes += row_bytes) {
      // Prefetch, because rows are too far apart for the hardware prefetcher. The first-level cache cannot hold
      // the codes of many rows.
      rows > rows_at_once ? __builtin_prefetch(codes + 128, 0, 2)
                          : __builtin_prefetch(codes + 128);
      Floats factor[count], scale = Vector::zero();
      if constexpr (in_halves)
        for (int i = 0; i < count; i++) factor[i] = Vector::all(x[i * p.rows + row + r]);
      for (int v = 0; v < vectors; v++) {
        if constexpr (in_halves)
          scale = Vector::halves(scales[r * p.blocks + 2 * v], scales[r * p.blocks + 2 * v + 1]);
        else if (v * blocks % vectors == 0)
          for (int i = 0; i < count; i++)
            factor[i] = Vector::all(factors[i][r][v * blocks / vectors]);
        const Vector::Bytes bytes = bytes_of(codes + v * Vector::size, size);
        add<0>(sums, levels, Decoder<bits>::read(bytes), scale, factor, v);
      }
    }
    for (int v = 0; v < vectors; v++) move<0>(sums, out, ld, stride, v, false, size);
  }
};

// Vectors per step, limited by the registers for sums.
constexpr int vectors_with(int planes, int count) {
  const int most = Vector::sums / planes / count;
  return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

template <int bits, int count>
struct RowsOfGroup {
  static constexpr int planes = planes_of(bits), vectors = vectors_with(planes, count);
  static constexpr int64_t wide = vectors * Vector::size;

  const Product& p;
  const float *x, *scales;
  int64_t row;
  int rows;
  const uint8_t* codes;
  int64_t row_bytes, begin, end;
  float* out;
  int64_t ld, stride;

  template <int taken, int blocks, class Size>
  EQQUANT_INLINE void take(int64_t j, const float* scales, Size size) const {
    Rows<bits, taken, count, blocks>::run(p, x, scales, row, rows, codes + j - begin,
                                          row_bytes, out + j - begin, ld, stride, size);
  }
  // Processes vectors of several blocks, and returns the end position.
  template <int blocks>
  int64_t across(int64_t block) const {
    int64_t j = begin;
    for (; j + wide <= end; j += wide) take<vectors, blocks>(j, scales + j / block, Whole{});
    return j;
  }

  void run() const {
    const int64_t block = p.block_bytes();
    int64_t j = begin;
    if (begin % block == 0 && block < wide) {
      if constexpr (vectors >= 4)
        if (4 * block == wide) j = across<4>(block);
      if constexpr (vectors >= 2)
        if (2 * block == wide) j = across<2>(block);
      if constexpr (2 * shortest_block == Vector::size)
        if (block == shortest_block) j = across<2 * vectors>(block);
    }
    for (int64_t b = j / block; j < end; b++) {
      // Up to the end of the block, which has one scale.
      const int64_t stop = std::min(end, (b + 1) * block);
      alignas(64) float of_rows[most_rows_at_once] = {};
      for (int r = 0; r < rows; r++) of_rows[r] = scales[r * p.blocks + b];
      for (; j + wide <= stop; j += wide) take<vectors, 1>(j, of_rows, Whole{});
      for (; j < stop; j += Vector::size)
        take<1, 1>(j, of_rows, static_cast<int>(std::min<int64_t>(Vector::size, stop - j)));
      j = stop;
    }
  }
};

template <int bits>
void run_x_w_bits(const Product& p, const float* x, int64_t begin, int64_t end) {
  if (in_float_panels(p, begin, end)) return run_x_w_panels<bits>(p, x, begin, end);
  constexpr int planes = planes_of(bits), most = std::clamp(Vector::sums / planes, 1, Vector::most_of_rows);
  const int64_t stride = end - begin, ld = planes * stride, columns = p.columns();
  const int at_once = p.m < 4 ? rows_at_once : most_rows_at_once;
  std::vector<float> out(p.m * ld), buffer(p.scale_buffer(at_once));
  const Groups groups(p.m, most);
  Pieces pieces(p, begin, end, at_once);
  for (int64_t row = 0; row < p.rows; row += at_once) {
    const int some = static_cast<int>(std::min<int64_t>(at_once, p.rows - row));
    const float* scales = scales_of(p, row, some, buffer.data());
    const uint8_t* codes = pieces.of(row, some);
    for (int64_t g = 0; g < groups.count; g++) {
      const int64_t m = groups.first(g);
      with_constant<most>(groups.size(g), [&](auto count) {
        RowsOfGroup<bits, count>{p, x + m * p.rows, scales, row, some, codes,
                                 pieces.row_bytes, begin, end, out.data() + m * ld, ld, stride}
            .run();
      });
    }
  }
  for (int64_t i = 0; i < p.m; i++) {
    const float* from = out.data() + i * ld;
    float* to = p.y + i * columns;
    for_each_run(p, begin, end, [=, &p](int64_t logical, int64_t planar, int64_t length) {
      const int64_t plane = planar / p.packed, byte = planar % p.packed;
      std::memcpy(to + logical, from + plane * stride + byte - begin, length * sizeof(float));
    });
  }
}

inline void run_x_w(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_codes(p, [&](auto bits) { run_x_w_bits<bits>(p, plain_x(p, scratch), begin, end); });
}

inline void prepare_x_w(const Product& p, char* scratch, int64_t begin, int64_t end) {
  check_rows(p, begin, end);
  prepare_plain(p, scratch, begin, end);
}

constexpr Routine float_x_w_routine = {prepare_x_w, run_x_w, plain_scratch, always<64>};

EQQUANT_END
