// float32 x @ w.T for many rows of the activation, for any `Vector`. A tile of the weight is decoded once,
// into the first-level cache, and multiplied by all rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "decode/scales.h"
#include "products/float_activation.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Rows of the weight per product; a multiple of them per tile, to reuse loads of the activation; and the
// approximate number of values per tile.
constexpr int at_once = 4, quads = 2, tile_values = 384;
// Bytes of the activation in the second-level cache. A larger activation takes several passes.
constexpr int64_t cached_bytes = 1 << 19;

// A vector in memory, aligned so that it does not cross cache lines.
struct alignas(4 * Vector::size) Line {
  float values[Vector::size];
};

// Decodes `steps` steps of each row, from step `step` of block `block`, at byte `byte`.
struct Chunk {
  int64_t steps, block, step, byte;
  // The prefetch distance: the hardware prefetcher would restart at each row.
  int64_t ahead;
};

// Four rows of a tile, and a group of rows of the activation.
struct Task {
  const float* w;     // (vector, row)
  const float* x;     // (vector, row of the activation)
  int64_t vectors;
  Line* sums;         // (row of the activation, row)
  float* y;
  int64_t y_stride;
  const float* scales;  // of the rows, if they are not in `w` already
  int rows;             // of the result: the last four may be fewer
};

// Independent of the codes, so it is compiled once for all formats.
template <int count>
void multiply(const Task& task) {
  using Floats = Vector::Floats;
  constexpr int64_t size = Vector::size;
  Floats sums[at_once][count];
  Line* const of = task.sums;
  for (int r = 0; r < at_once; r++)
    for (int i = 0; i < count; i++) sums[r][i] = Vector::load(of[i * at_once + r].values);
  const float *w = task.w, *x = task.x;
  const float* const end = w + task.vectors * at_once * size;
  do {
    Floats some[count];
    for (int i = 0; i < count; i++) some[i] = Vector::load(x + i * size);
    for (int r = 0; r < at_once; r++) {
      const Floats weight = Vector::load(w + r * size);
      for (int i = 0; i < count; i++)
        sums[r][i] = Vector::multiply_add(weight, some[i], sums[r][i]);
    }
    w += at_once * size, x += count * size;
  } while (w < end);  // At least one iteration: a loop that may be empty compiles to slower code.
  for (int r = 0; r < at_once; r++)
    for (int i = 0; i < count; i++) Vector::store(of[i * at_once + r].values, sums[r][i]);
}

// Writes complete sums to the result.
inline void finish(const Task& task, int count) {
  const int rows = std::min(at_once, task.rows);
  float scales[at_once] = {1, 1, 1, 1}, four[at_once];
  if (task.scales) std::memcpy(scales, task.scales, rows * sizeof(float));
  const auto scale = Vector::load_four(scales);
  for (int i = 0; i < count; i++) {
    const Line* of = task.sums + i * at_once;
    const auto sum = Vector::multiply(
        Vector::sum_four(Vector::load(of[0].values), Vector::load(of[1].values),
                         Vector::load(of[2].values), Vector::load(of[3].values)),
        scale);
    float* y = task.y + i * task.y_stride;
    if (rows == at_once) {
      Vector::store(y, sum);
    } else {
      Vector::store(four, sum);
      std::memcpy(y, four, rows * sizeof(float));
    }
  }
}

template <int bits, Scaling scaling>
struct Tiles {
  static constexpr int64_t size = Vector::size, planes = planes_of(bits);
  // The layout of a tile: (row / 4, step, plane, row % 4, value).
  static constexpr int64_t plane_stride = at_once * size, step_stride = planes * plane_stride;
  static constexpr int64_t most_steps = std::max<int64_t>(1, tile_values / (planes * size));
  static constexpr int64_t quad_stride = most_steps * step_stride;

  const Product& p;
  const Groups groups;
  const int64_t block = bytes_at_once(p), block_steps = steps_of_block(p);
  const int64_t steps = p.packed / block * block_steps, stride = row_stride(p);
  alignas(64) float tile[quads * quad_stride];

  using Codes = typename Decoder<bits>::Codes;
  template <int plane = 0>
  static EQQUANT_INLINE void write(const BlockDecoder<bits, scaling>& decoder, Codes codes,
                                   float* to) {
    Vector::store(to + plane * plane_stride, decoder.template decode<plane>(codes));
    if constexpr (plane + 1 < planes) write<plane + 1>(decoder, codes, to);
  }

  void decode(int64_t row, int rows, const float* scales, Chunk chunk, float* to) const {
    const auto levels = Decoder<bits>::levels(p);
    const int64_t whole = block / size, rest = block % size;
    const uint8_t* codes[at_once];
    const float* of_row[at_once];
    for (int r = 0; r < at_once; r++) {
      // Rows beyond the last repeat it, and are not used.
      const int64_t used = std::min(r, rows - 1);
      codes[r] = p.codes + (row + used) * p.packed;
      of_row[r] = scales + used * p.blocks + chunk.block * scales_at_once(scaling);
    }
    int64_t left = chunk.steps, step = chunk.step;
    for (int64_t b = 0, j = chunk.byte; left > 0; b += scales_at_once(scaling), step = 0) {
      BlockDecoder<bits, scaling> decoders[at_once];
      for (int r = 0; r < at_once; r++) decoders[r].begin(levels, of_row[r] + b);
      const int64_t some = std::min(left, whole - step), end = j + some * size;
      for (; j < end; j += size, to += step_stride) {
        if (j % 64 == 0)
          for (int r = 0; r < at_once; r++) __builtin_prefetch(codes[r] + j + chunk.ahead);
        for (int r = 0; r < at_once; r++)
          write(decoders[r], Decoder<bits>::read(Vector::bytes(codes[r] + j)), to + r * size);
      }
      left -= some;
      if (rest && left > 0) {
        for (int r = 0; r < at_once; r++) {
          const Vector::Bytes last = Vector::bytes(codes[r] + j, static_cast<int>(rest));
          write(decoders[r], Decoder<bits>::read(last), to + r * size);
        }
        j += rest, left--, to += step_stride;
      }
    }
  }

  // Multiplies at most a tile of `rows` rows of the weight by groups of the activation. Sums are
  // (row / 4, row of the activation, row % 4).
  void run(const float* x, int64_t row, int rows, const float* scales, int64_t begin,
           int64_t end, Line* sums) {
    const int used = (rows + at_once - 1) / at_once;
    const int64_t first = groups.first(begin), taken = groups.first(end) - first;
    std::memset(sums, 0, used * taken * at_once * sizeof(Line));
    for (int64_t s = 0; s < steps; s += most_steps) {
      Chunk chunk{std::min(most_steps, steps - s), s / block_steps, s % block_steps};
      chunk.byte = chunk.block * block + chunk.step * size;
      const bool last = s + chunk.steps == steps;
      chunk.ahead = last ? quads * at_once * p.packed - chunk.byte : chunk.steps * size;
      for (int q = 0; q < used; q++)
        decode(row + q * at_once, rows - q * at_once, scales + q * at_once * p.blocks, chunk,
               tile + q * quad_stride);
      for (int64_t g = begin; g < end; g++)
        for (int q = 0; q < used; q++) {
          const int64_t m = groups.first(g), n = q * at_once;
          const int size_of_group = groups.size(g);
          const Task task{
              tile + q * quad_stride,
              x + m * stride + s * planes * size_of_group * size,
              chunk.steps * planes,
              sums + (q * taken + m - first) * at_once,
              p.y + m * p.rows + row + n,
              p.rows,
              scaling == Scaling::row ? scales + n : nullptr,
              rows - static_cast<int>(n),
          };
          with_constant<most_of_group>(size_of_group,
                                       [&](auto count) { multiply<count>(task); });
          if (last) finish(task, size_of_group);
        }
    }
  }
};

template <int bits, Scaling scaling>
void all_tiles(const Product& p, const float* x, int64_t begin, int64_t end) {
  constexpr int64_t of_tile = quads * at_once;
  Tiles<bits, scaling> tiles{p, Groups(p)};
  const Groups& groups = tiles.groups;
  const int64_t bytes_of_group = (groups.rows + 1) * tiles.stride * 4;
  const int64_t in_turn = std::clamp<int64_t>(cached_bytes / bytes_of_group, 1, groups.count);
  std::vector<Line> sums(of_tile * in_turn * (groups.rows + 1));
  std::vector<float> buffer(p.scale_buffer(of_tile));
  for (int64_t group = 0; group < groups.count; group += in_turn)
    for (int64_t row = begin; row < end; row += of_tile) {
      const int rows = static_cast<int>(std::min(of_tile, end - row));
      tiles.run(x, row, rows, scales_of(p, row, rows, buffer.data()), group,
                std::min(groups.count, group + in_turn), sums.data());
    }
}

template <int bits>
void run_tiles(const Product& p, const float* x, int64_t begin, int64_t end) {
  with_scaling<scales_rows(bits)>(p, [&](auto scaling) { all_tiles<bits, scaling>(p, x, begin, end); });
}

EQQUANT_END
