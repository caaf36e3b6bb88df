// The layout of the activation in float32 x @ w.T, for any `Vector`: groups of rows, in steps of
// the codes in one vector of bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "decode/float_decoder.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// For few rows, codes are decoded in the product (float_x_wt_gemv.h), for several rows at once. For more
// rows, codes are decoded once (float_x_wt_tiles.h).
constexpr int few_at_once = 4, most_of_group = std::max(few_at_once, Vector::most_at_once);
inline bool are_few(const Product& p) { return p.m <= Vector::few; }

// Groups of rows that are multiplied at once, with sizes as equal as possible.
struct Groups {
  int64_t count;
  // Rows per group, and the number of groups with one more row.
  int64_t rows, larger;

  Groups(int64_t m, int64_t most)
      : count((m + most - 1) / most), rows(m / count), larger(m % count) {}
  explicit Groups(const Product& p) : Groups(p.m, are_few(p) ? few_at_once : Vector::most_at_once) {}
  int64_t first(int64_t i) const { return i * rows + std::min(i, larger); }
  int size(int64_t i) const { return static_cast<int>(rows + (i < larger)); }
};

// Blocks of eight bytes, the shortest, fill half of a large vector, so two blocks share one.
constexpr int64_t shortest_block = 8;
inline bool in_pairs(const Product& p) {
  return 2 * shortest_block == Vector::size && p.block_bytes() == shortest_block &&
         p.blocks % 2 == 0;
}
inline int64_t bytes_at_once(const Product& p) { return p.block_bytes() * (in_pairs(p) ? 2 : 1); }

// Calls `use` with a compile-time constant for the application of scales. Without `by_rows`, the scale of a row is
// applied like the scale of a block.
template <bool by_rows = true, class Use>
void with_scaling(const Product& p, const Use& use) {
  if constexpr (by_rows)
    if (p.blocks == 1) return use(std::integral_constant<Scaling, Scaling::row>());
  if constexpr (2 * shortest_block == Vector::size)
    if (in_pairs(p)) return use(std::integral_constant<Scaling, Scaling::pair>());
  use(std::integral_constant<Scaling, Scaling::block>());
}

inline int64_t steps_of_block(const Product& p) {
  return (bytes_at_once(p) + Vector::size - 1) / Vector::size;
}
// Floats per row in scratch. Each group is (block, vector of its bytes, plane, row, value), padded
// with zeros.
inline int64_t row_stride(const Product& p) {
  return p.packed / bytes_at_once(p) * steps_of_block(p) * p.planes() * Vector::size;
}

inline int64_t activation_scratch(const Product& p) {
  return p.m * row_stride(p) * static_cast<int64_t>(sizeof(float));
}

inline void prepare_activation(const Product& p, char* scratch, int64_t begin, int64_t end) {
  constexpr int64_t size = Vector::size;
  const int64_t block = bytes_at_once(p), stride = row_stride(p), planes = p.planes();
  const Groups groups(p);
  Activation x(p);
  int64_t group = 0;
  for (int64_t i = begin; i < end; i++) {
    const float* from = x.row(i);
    while (groups.first(group + 1) <= i) group++;
    const int64_t first = groups.first(group), step = groups.size(group) * size;
    float* to = reinterpret_cast<float*>(scratch) + first * stride + (i - first) * size;
    // In logical order, the runs of the planes alternate.
    int64_t run = 0;
    for (int64_t b = 0; b < p.packed; b += block)
      for (int64_t j = b; j < b + block; j += size) {
        while (j >= run + p.run) run += p.run;
        const int64_t stop = std::min(b + block, j + size);
        for (int64_t plane = 0; plane < planes; plane++, to += step) {
          const float* planar = from + plane * p.run;
          if (stop <= run + p.run && stop - j == size) {
            Vector::store(to, Vector::load(planar + run * (planes - 1) + j));
            continue;
          }
          for (int64_t k = j, start = run; k < stop; start += p.run) {
            const int64_t length = std::min(stop, start + p.run) - k;
            std::memcpy(to + k - j, planar + start * (planes - 1) + k, length * sizeof(float));
            k += length;
          }
          std::fill(to + stop - j, to + size, 0.0f);
        }
      }
  }
}

EQQUANT_END
