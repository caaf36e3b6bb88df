// The part of the offsets in a product, for any `Vector`. All values of a block share one offset. So x @ w.T needs
// only the sum of the activation over each block, and x @ w only one number per block of the result. This is a
// product with one column per block, which is added to the result of any routine.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "decode/offsets.h"
#include "decode/scales.h"
#include "products/panel_product.h"
#include "runtime/absmax.h"
#include "runtime/limits.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Rows of the weight per panel in x @ w, and columns per panel.
constexpr int64_t rows_of_offsets = 128, offsets_at_once = side_by_side * Vector::size;

inline int64_t whole_vectors(int64_t count) { return (count + Vector::size - 1) / Vector::size * Vector::size; }

// Scratch contains the activation for x @ w. Otherwise it contains the sums of each row of the activation over blocks,
// padded with zeros to whole vectors.
inline int64_t offset_scratch(const Product& p) {
  return p.contract_rows ? plain_scratch(p) : p.m * whole_vectors(p.blocks) * int64_t{sizeof(float)};
}

inline void prepare_offsets(const Product& p, char* scratch, int64_t begin, int64_t end) {
  if (p.contract_rows) return prepare_plain(p, scratch, begin, end);
  const int64_t size = p.columns(), stride = whole_vectors(p.blocks), block = size / p.blocks;
  Activation x(p, p.rounds_x);
  for (int64_t i = begin; i < end; i++) {
    const float* row = x.row(i);
    float* const to = reinterpret_cast<float*>(scratch) + i * stride;
    for (int64_t b = 0; b < p.blocks; b++) {
      const float* const of = row + b * block;
      Vector::Floats sum = Vector::zero();
      int64_t k = 0;
      for (; k + Vector::size <= block; k += Vector::size)
        sum = Vector::multiply_add(Vector::all(1), Vector::load(of + k), sum);
      to[b] = Vector::sum(sum);
      for (; k < block; k++) to[b] += of[k];
    }
    std::fill(to + p.blocks, to + stride, 0.0f);
  }
}

// x @ w.T for few rows of the activation.
inline void add_unturned(const Product& p, const float* sums, int64_t begin, int64_t end) {
  constexpr int64_t size = Vector::size, at_once = 16;
  const int64_t stride = whole_vectors(p.blocks), whole = p.blocks / size * size;
  const int rest = static_cast<int>(p.blocks - whole);
  std::vector<float> offsets(2 * at_once * p.blocks);
  for (int64_t first = begin; first < end; first += at_once) {
    const int64_t some = std::min(at_once, end - first);
    decode_offsets_of_rows(p, first, some, offsets.data());
    for (int64_t i = 0; i < some; i += 4) {
      const int64_t rows = std::min<int64_t>(4, some - i);
      const float* of_row[4];
      for (int64_t r = 0; r < 4; r++) of_row[r] = offsets.data() + (i + std::min(r, rows - 1)) * p.blocks;
      for (int64_t m = 0; m < p.m; m++) {
        const float* const x = sums + m * stride;
        Vector::Floats of[4] = {Vector::zero(), Vector::zero(), Vector::zero(), Vector::zero()};
        for (int64_t b = 0; b < whole; b += size) {
          const Vector::Floats sum = Vector::load(x + b);
          for (int r = 0; r < 4; r++) of[r] = Vector::multiply_add(Vector::load(of_row[r] + b), sum, of[r]);
        }
        if (rest) {
          const Vector::Floats sum = Vector::load(x + whole);
          for (int r = 0; r < 4; r++)
            of[r] = Vector::multiply_add(Vector::load(of_row[r] + whole, rest), sum, of[r]);
        }
        float four[4], *const y = p.y + m * p.rows + first + i;
        Vector::store(four, Vector::sum_four(of[0], of[1], of[2], of[3]));
        for (int64_t r = 0; r < rows; r++) y[r] += four[r];
      }
    }
  }
}

// x @ w.T for more rows of the activation: rows of offsets are transposed to a panel.
inline void add_turned(const Product& p, const float* sums, int64_t begin, int64_t end) {
  constexpr int64_t size = Vector::size;
  const int64_t stride = whole_vectors(p.blocks);
  std::vector<float> offsets(2 * size * p.blocks + size);  // Whole vectors are read.
  Space panel(offsets_at_once * stride);
  const Groups groups(p.m, Vector::most_at_once);
  for (int64_t row = begin; row < end; row += offsets_at_once) {
    const int rows = static_cast<int>(std::min(offsets_at_once, end - row));
    for (int64_t first = 0; first < rows; first += size) {
      decode_offsets_of_rows(p, row + first, std::min(size, rows - first), offsets.data());
      for (int64_t b = 0; b < stride; b += size) {
        Vector::Floats x[size];
        for (int r = 0; r < size; r++) x[r] = Vector::load(offsets.data() + r * p.blocks + b);
        Vector::transpose(x);
        for (int i = 0; i < size; i++) Vector::store(panel.data() + (b + i) * offsets_at_once + first, x[i]);
      }
    }
    for (int64_t g = 0; g < groups.count; g++)
      multiply_rows_of_panel(panel.data(), sums + groups.first(g) * stride, stride, p.blocks, rows, groups.size(g),
                             p.y + groups.first(g) * p.rows + row, p.rows, true);
  }
}

// x @ w for bytes `begin` to `end` of all rows.
inline void add_contracted(const Product& p, const float* x, int64_t begin, int64_t end) {
  const int64_t block = p.block_bytes(), first = begin / block, blocks = (end - 1) / block + 1 - first;
  const int64_t stride = (blocks + offsets_at_once - 1) / offsets_at_once * offsets_at_once;
  std::vector<float> sums(p.m * stride);
  Space panel(rows_of_offsets * offsets_at_once);
  const Groups groups(p.m, Vector::most_at_once);
  for (int64_t b = 0; b < blocks; b += offsets_at_once) {
    const int64_t some = std::min(offsets_at_once, blocks - b);
    const int vectors = static_cast<int>(whole_vectors(some) / Vector::size);
    std::fill(panel.data(), panel.data() + rows_of_offsets * offsets_at_once, 0.0f);
    for (int64_t row = 0; row < p.rows; row += rows_of_offsets) {
      const int64_t rows = std::min(rows_of_offsets, p.rows - row);
      for (int64_t r = 0; r < rows; r++)
        decode_offsets(p, row + r, first + b, some, panel.data() + r * offsets_at_once);
      for (int64_t g = 0; g < groups.count; g++) {
        float* to[side_by_side];
        for (int v = 0; v < side_by_side; v++)
          to[v] = sums.data() + groups.first(g) * stride + b + v * Vector::size;
        multiply_panel<Vector::most_at_once>(OfFloats(), vectors, groups.size(g), panel.data(),
                                             x + groups.first(g) * p.rows + row, p.rows, rows, to, stride, true);
      }
    }
  }
  for (int64_t m = 0; m < p.m; m++)
    for_each_run(p, begin, end, [&](int64_t logical, int64_t planar, int64_t length) {
      float* to = p.y + m * p.columns() + logical;
      for (int64_t j = planar % p.packed, stop = j + length; j < stop;) {
        const int64_t b = j / block, until = std::min(stop, (b + 1) * block);
        const float offset = sums[m * stride + b - first];
        for (; j < until; j++) *to++ += offset;
      }
    });
}

inline void add_offsets(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  if (p.contract_rows) return add_contracted(p, plain_x(p, scratch), begin, end);
  const auto add = p.m <= limits::offsets_by_rows ? add_unturned : add_turned;
  add(p, reinterpret_cast<const float*>(scratch), begin, end);
}

constexpr Routine offsets_routine = {prepare_offsets, add_offsets, offset_scratch, always<1>};

EQQUANT_END
