// float32 x @ w.T for few rows of the activation, for any `Vector`: a GEMV-like kernel that decodes a
// vector of codes in registers and uses it at once. Only codes are read from memory.
#pragma once

#include "decode/scales.h"
#include "products/float_activation.h"
#include "products/float_x_wt_tiles.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// The product of `rows` rows of the weight and `count` rows of the activation. Keep values that must
// stay in registers in local variables and arguments: compilers leave struct members in memory.
template <int bits, int rows, int count, Scaling scaling>
struct Gemv {
  using Floats = Vector::Floats;
  using Codes = typename Decoder<bits>::Codes;
  using BlockDecoders = BlockDecoder<bits, scaling>[rows];
  using Sums = Floats[rows][count];

  template <int plane>
  static EQQUANT_INLINE void multiply(const BlockDecoders& decoders, const Codes* codes,
                                      const float* x, Sums& sums) {
    Floats weight[rows];
    for (int r = 0; r < rows; r++)
      weight[r] = decoders[r].template decode<plane>(codes[r]);
    for (int i = 0; i < count; i++) {
      const Floats some = Vector::load(x + (plane * count + i) * Vector::size);
      for (int r = 0; r < rows; r++)
        sums[r][i] = Vector::multiply_add(weight[r], some, sums[r][i]);
    }
    if constexpr ((plane + 1) * bits < 8) multiply<plane + 1>(decoders, codes, x, sums);
  }

  template <class Size>
  static EQQUANT_INLINE void step(const Product& p, const BlockDecoders& decoders,
                                  const uint8_t* from, const float* x, Size size, Sums& sums) {
    Codes codes[rows];
    for (int r = 0; r < rows; r++)
      codes[r] = Decoder<bits>::read(bytes_of(from + r * p.packed, size));
    multiply<0>(decoders, codes, x, sums);
  }

  static void run(const Product& p, int64_t block, const float* x, const float* scales,
                  int64_t row, float* y) {
    constexpr int64_t values = planes_of(bits) * count * Vector::size;
    const int64_t whole = block / Vector::size * Vector::size;
    const uint8_t* codes = p.codes + row * p.packed;
    const int64_t far = p.far_from(codes);
    const auto levels = Decoder<bits>::levels(p);
    Sums sums;
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < count; i++) sums[r][i] = Vector::zero();
    for (int64_t b = 0; b < p.blocks; b += scales_at_once(scaling)) {
      BlockDecoders decoders;
      for (int r = 0; r < rows; r++) decoders[r].begin(levels, scales + r * p.blocks + b);
      int64_t j = b / scales_at_once(scaling) * block;
      for (const int64_t end = j + whole; j < end; j += Vector::size, x += values) {
        if (j % 64 == 0)
          for (int r = 0; r < rows; r++) prefetch(codes + r * p.packed + j, far);
        step(p, decoders, codes + j, x, Whole{}, sums);
      }
      if (whole < block) {
        step(p, decoders, codes + j, x, static_cast<int>(block - whole), sums);
        x += values;
      }
    }
    y += row;
    for (int i = 0; i < count; i++, y += p.rows) {
      if constexpr (rows == 4) {
        auto four = Vector::sum_four(sums[0][i], sums[1][i], sums[2][i], sums[3][i]);
        if (scaling == Scaling::row) four = Vector::multiply(four, Vector::load_four(scales));
        Vector::store(y, four);
        continue;
      }
      for (int r = 0; r < rows; r++) {
        const float sum = Vector::sum(sums[r][i]);
        y[r] = scaling == Scaling::row ? sum * scales[r] : sum;
      }
    }
  }
};

// Use four rows of the weight per load of the activation, if there are registers for their sums.
// Otherwise all rows are one group.
constexpr int rows_with(int count) { return 4 * count <= Vector::sums ? 4 : 2; }
static_assert(rows_with(few_at_once) == 4 || Vector::few <= few_at_once);

template <int bits, int rows>
void gemv_rows(const Product& p, const Groups& groups, const float* x, const float* scales, int64_t row) {
  const int64_t block = bytes_at_once(p), stride = row_stride(p);
  for (int64_t g = 0; g < groups.count; g++) {
    const float* from = x + groups.first(g) * stride;
    float* y = p.y + groups.first(g) * p.rows;
    with_constant<few_at_once>(groups.size(g), [&](auto count) {
      if constexpr (rows == rows_with(count))
        with_scaling<scales_rows(bits)>(p, [&](auto scaling) {
          Gemv<bits, rows, count, scaling>::run(p, block, from, scales, row, y);
        });
    });
  }
}

template <int bits>
void run_gemv(const Product& p, const float* x, int64_t begin, int64_t end) {
  const Groups groups(p);
  ScalesInOrder scales(p.scales, p.blocks, end);
  int64_t row = begin;
  if (rows_with(groups.size(0)) == 4)
    for (; row + 4 <= end; row += 4) gemv_rows<bits, 4>(p, groups, x, scales.of(row, 4), row);
  else if constexpr (rows_with(few_at_once) == 2)
    for (; row + 2 <= end; row += 2) gemv_rows<bits, 2>(p, groups, x, scales.of(row, 2), row);
  // One to three remaining rows.
  if (row < end) run_tiles<bits>(p, x, row, end);
}

EQQUANT_END
