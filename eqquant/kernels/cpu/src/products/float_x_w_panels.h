// float32 x @ w for many rows of the activation, which needs no rearrangement. For any `Vector`.
#pragma once

#include <vector>

#include "decode/scales.h"
#include "products/x_w_panels.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// True if the activation has enough rows.
inline bool in_float_panels(const Product& p, int64_t begin, int64_t end) {
  return p.m >= Vector::rows_for_panels && fits_panels(p, begin, end);
}

template <int bits, Scaling scaling>
struct FloatRowPanel {
  static constexpr int64_t size = Vector::size, planes = planes_of(bits);
  // The measured best width of a panel, which determines its number of rows.
  static constexpr int64_t most_columns = planes == 1 || planes > 2 ? 256 : 128;
  static constexpr int64_t most_rows = panel_floats / most_columns;
  static constexpr int most_at_once = Vector::most_at_once;
  static constexpr bool by_columns = false;

  const Product& p;
  const float* x;
  std::vector<float> buffer;
  Space decoded;

  FloatRowPanel(const Product& p, const float* x)
      : p(p),
        x(x),
        buffer(p.scale_buffer(rows_at_once)),
        decoded(most_columns * std::min(most_rows, p.rows)) {}

  template <int plane = 0>
  static EQQUANT_INLINE void write(const BlockDecoder<bits, scaling>& decoder,
                                   typename Decoder<bits>::Codes codes, float* to, int64_t v,
                                   int64_t stride, bool halves) {
    write_vector<planes, plane>(decoder.template decode<plane>(codes), to, v, stride, halves);
    if constexpr (plane + 1 < planes) write<plane + 1>(decoder, codes, to, v, stride, halves);
  }

  // (four vectors, row, vector)
  void decode(Pieces& pieces, int64_t row, int64_t rows, int64_t bytes) {
    const auto levels = Decoder<bits>::levels(p);
    const int64_t stride = rows * side_by_side * size, block = p.block_bytes() * scales_at_once(scaling);
    const int64_t ahead = p.is_unpacked() ? 0 : rows_at_once * p.packed;
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
          // Prefetch some rows ahead, because rows are too far apart for the hardware prefetcher.
          if (j % 64 == 0) __builtin_prefetch(codes + j + ahead);
          if (pieces.begin + j >= until) {
            const int64_t b = (pieces.begin + j) / block;
            decoder.begin(levels, scales + b * scales_at_once(scaling));
            until = (b + 1) * block;
          }
          write(decoder, Decoder<bits>::read(Vector::bytes(codes + j)), to, j / size, stride,
                halves);
        }
        to += side_by_side * size;
      }
    }
  }

  void multiply(int vectors, int64_t v, int count, int64_t m, int64_t row, int64_t rows,
                float* const* y, int64_t y_stride) const {
    multiply_panel<most_at_once>(OfFloats(), vectors, count, decoded.data() + v * rows * size,
                                 x + m * p.rows + row, p.rows, rows, y, y_stride, row > 0);
  }
};

template <int bits>
void run_x_w_panels(const Product& p, const float* x, int64_t begin, int64_t end) {
  if constexpr (2 * shortest_block == Vector::size)
    if (in_pairs(p))
      return row_panels(p, FloatRowPanel<bits, Scaling::pair>(p, x), begin, end);
  row_panels(p, FloatRowPanel<bits, Scaling::block>(p, x), begin, end);
}

EQQUANT_END
