// float32 x @ w.T for many rows of the activation, for any `Vector`. Rows of the weight are decoded
// once and transposed, so that a vector holds one column. No horizontal sums are needed, and the
// activation needs no rearrangement.
#pragma once

#include <numeric>
#include <vector>

#include "decode/scales.h"
#include "products/panel_product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Columns and rows per panel. `Vector::size` rows are transposed at a time.
constexpr int64_t panel_rows = side_by_side * Vector::size;
constexpr int64_t columns_of_panel = panel_floats / 64;

// A number of bytes that both runs and vectors divide.
inline int64_t whole_bytes(const Product& p) {
  return p.planes() == 1 ? Vector::size : std::lcm(p.run, int64_t{Vector::size});
}

// True if blocks are whole vectors of bytes, and the activation has enough rows.
inline bool fits_transposed_panels(const Product& p) {
  if (p.m < Vector::rows_for_transposed_panels(p.columns())) return false;
  if (whole_bytes(p) * p.planes() > columns_of_panel) return false;
  return p.blocks == 1 || p.block_bytes() % Vector::size == 0 || in_pairs(p);
}

template <int bits, Scaling scaling>
struct TransposedPanels {
  static constexpr int64_t size = Vector::size, planes = planes_of(bits);
  // Vectors of bytes per row that are decoded before the transpose.
  static constexpr int64_t steps = std::max<int64_t>(1, 8 / planes);

  const Product& p;
  const float* const x;
  const int64_t bytes_at_once = columns_of_panel / planes / whole_bytes(p) * whole_bytes(p);
  Space panel;
  std::vector<float> buffer;
  // (vector of bytes, plane, row, value)
  alignas(4 * size) float decoded[steps * planes * size * size];

  TransposedPanels(const Product& p, const float* x)
      : p(p),
        x(x),
        panel(panel_rows * std::min(p.columns(), columns_of_panel)),
        buffer(p.scale_buffer(panel_rows)) {}

  template <int plane = 0>
  static EQQUANT_INLINE void write(const BlockDecoder<bits, scaling>& decoder,
                                   typename Decoder<bits>::Codes codes, float* to) {
    Vector::store(to + plane * size * size, decoder.template decode<plane>(codes));
    if constexpr (plane + 1 < planes) write<plane + 1>(decoder, codes, to);
  }

  // Decodes a row from byte `begin` on, at most `steps` vectors.
  void decode(const uint8_t* codes, const float* scales, int64_t begin, int64_t end, float* to) {
    const auto levels = Decoder<bits>::levels(p);
    const int64_t block = p.block_bytes() * scales_at_once(scaling);
    BlockDecoder<bits, scaling> decoder;
    int64_t until = 0;
    for (int64_t j = begin; j < end; j += size, to += planes * size * size) {
      if (j >= until) {
        const int64_t b = j / block;
        decoder.begin(levels, scales + b * scales_at_once(scaling));
        until = (b + 1) * block;
      }
      const int64_t left = end - j;
      const Vector::Bytes bytes = left >= size ? Vector::bytes(codes + j)
                                               : Vector::bytes(codes + j, static_cast<int>(left));
      write(decoder, Decoder<bits>::read(bytes), to);
    }
  }

  // Transposes one vector of each of `size` rows to columns, `panel_rows` apart, starting with the value
  // of byte `j` of the panel.
  void turn(const float* from, int64_t j, int64_t count, int64_t plane, float* to) const {
    Vector::Floats x[size];
    for (int r = 0; r < size; r++) x[r] = Vector::load(from + r * size);
    Vector::transpose(x);
    if (planes == 1 || (j % p.run + size <= p.run && count == size)) {
      if (planes > 1) j = (j / p.run * planes + plane) * p.run + j % p.run;
      if (count == size) {
        for (int i = 0; i < size; i++) Vector::store(to + (j + i) * panel_rows, x[i]);
        return;
      }
    }
    for (int64_t i = 0; i < count; i++) {
      const int64_t byte = j + i;
      const int64_t column =
          planes == 1 ? byte : (byte / p.run * planes + plane) * p.run + byte % p.run;
      Vector::store(to + column * panel_rows, x[i]);
    }
  }

  // Decodes bytes `begin` to `end` of at most `size` rows.
  void decode_rows(int64_t row, int rows, const float* scales, int64_t begin, int64_t end,
                   float* to) {
    for (int64_t j = begin; j < end; j += steps * size) {
      const int64_t stop = std::min(end, j + steps * size);
      for (int r = 0; r < size; r++) {
        // Rows beyond the last repeat it, and are not used.
        const int64_t used = std::min(r, rows - 1);
        const uint8_t* codes = p.codes + (row + used) * p.packed;
        __builtin_prefetch(codes + stop);
        decode(codes, scales + used * p.blocks, j, stop, decoded + r * size);
      }
      const float* from = decoded;
      for (int64_t at = j; at < stop; at += size)
        for (int64_t plane = 0; plane < planes; plane++, from += size * size)
          turn(from, at - begin, std::min(size, stop - at), plane, to);
    }
  }

  // Multiplies at most `panel_rows` rows of the weight by the whole activation.
  void run(int64_t row, int rows, const Groups& groups) {
    const float* scales = scales_of(p, row, rows, buffer.data());
    for (int64_t j = 0; j < p.packed; j += bytes_at_once) {
      const int64_t end = std::min(p.packed, j + bytes_at_once);
      for (int r = 0; r < rows; r += size)
        decode_rows(row + r, rows - r, scales + r * p.blocks, j, end, panel.data() + r);
      for (int64_t g = 0; g < groups.count; g++)
        multiply(row, rows, groups.first(g), groups.size(g), j, end);
    }
  }

  void multiply(int64_t row, int rows, int64_t m, int count, int64_t begin, int64_t end) const {
    const float* const from = x + m * p.columns() + begin * planes;
    float* const y = p.y + m * p.rows + row;
    multiply_rows_of_panel(panel.data(), from, p.columns(), (end - begin) * planes, rows, count, y, p.rows, begin > 0);
  }
};

template <int bits>
void run_panels(const Product& p, const float* x, int64_t begin, int64_t end) {
  with_scaling<false>(p, [&](auto scaling) {
    TransposedPanels<bits, scaling> panels(p, x);
    const Groups groups(p.m, Vector::most_at_once);
    for (int64_t row = begin; row < end; row += panel_rows)
      panels.run(row, static_cast<int>(std::min(panel_rows, end - row)), groups);
  });
}

EQQUANT_END
