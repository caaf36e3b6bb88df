// Rounding by plain loops, which the compiler vectorises. Divisions are exact, sums are pairwise, and no operations are contracted.
#pragma once

#include <cfloat>
#include <cstring>
#include <limits>
#include <vector>

#include "encode/rounding.h"
#include "runtime/absmax.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// The sum of `of(u[i])` by halves: the second half is added to the first until one value remains.
template <class Of>
EQQUANT_INLINE float sum_of(const float* u, int64_t size, float* scratch, Of of) {
  if (size == 1) return of(u[0]);
  int64_t half = 1;
  while (2 * half < size) half *= 2;
  for (int64_t i = 0; i < size - half; i++) scratch[i] = of(u[i]) + of(u[i + half]);
  for (int64_t i = size - half; i < half; i++) scratch[i] = of(u[i]);
  while (half > 1) {
    half /= 2;
    float* __restrict first = scratch;
    const float* __restrict second = scratch + half;
    for (int64_t i = 0; i < half; i++) first[i] += second[i];
  }
  return scratch[0];
}

// NaN passes, here and below.
inline float bounded(const Rounding& r, float scale, float absmax) {
  if (!(absmax > 0)) return 0;
  return scale < FLT_MIN ? FLT_MIN : scale > r.largest_scale ? r.largest_scale : scale;
}

inline void divide(const float* __restrict x, int64_t size, float by, float* __restrict out) {
  by = by > 0 ? by : 1;
  for (int64_t i = 0; i < size; i++) out[i] = x[i] / by;
}

inline void to_int8(const float* __restrict x, int64_t size, float scale, float* __restrict y) {
  const float by = scale > 0 ? scale : 1;
  for (int64_t i = 0; i < size; i++) {
    float code = x[i] / by;
    code = code < -127 ? -127 : code > 127 ? 127 : code;
    code = code + without_fraction - without_fraction;  // No negative zero.
    y[i] = (code == code ? code : 0) * scale;
  }
}

inline void to_table(const Rounding& r, const float* __restrict x, float scale,
                     float* __restrict y) {
  const float by = scale > 0 ? scale : 1;
  float level[16], boundary[15];
  for (int i = 0; i < 16; i++) level[i] = r.levels[i] * scale;
  for (int i = 0; i < 15; i++) boundary[i] = r.boundaries[i];
  for (int64_t j = 0; j < r.block; j++) {
    const float unit = x[j] / by;
    float out = level[0];
    for (int i = 0; i < 15; i++) out = unit > boundary[i] ? level[i + 1] : out;
    y[j] = out;
  }
}

inline void to_ternary(const Rounding& r, const float* __restrict x, float absmax, float* unit,
                       float* scratch, float* __restrict y) {
  const int64_t size = r.block;
  const float count = static_cast<float>(size);
  const auto magnitude = [](float u) { return __builtin_fabsf(u); };
  divide(x, size, absmax, unit);
  const float mean_magnitude = sum_of(unit, size, scratch, magnitude) / count;
  float threshold = mean_magnitude / 2;
  if (r.by_deviation) {
    const float mean = sum_of(unit, size, scratch, [](float u) { return u; }) / count;
    const float squares = sum_of(unit, size, scratch, [](float u) { return u * u; }) / count;
    const float variance = squares - mean * mean;
    threshold = __builtin_sqrtf(variance > 0 ? variance : variance == variance ? 0 : variance) / 2;
  }
  float scale = mean_magnitude;
  if (r.least_squares) {
    const auto beyond = [=](float u) { return __builtin_fabsf(u) > threshold; };
    const float how_many =
        sum_of(unit, size, scratch, [=](float u) { return beyond(u) ? 1.0f : 0.0f; });
    const float total = sum_of(unit, size, scratch, [=](float u) {
      return beyond(u) ? __builtin_fabsf(u) : 0.0f;
    });
    scale = total / (how_many > 1 ? how_many : 1);
  }
  scale = bounded(r, scale * absmax, absmax);
  const float zero = 0 * scale;
  for (int64_t i = 0; i < size; i++) {
    const float one = x[i] < 0 ? -scale : scale;
    y[i] = __builtin_fabsf(unit[i]) > threshold ? one : zero;
  }
}

inline void to_binary(const Rounding& r, const float* __restrict x, float absmax, float* unit,
                      float* scratch, float* __restrict y) {
  divide(x, r.block, absmax, unit);
  const auto magnitude = [](float u) { return __builtin_fabsf(u); };
  const float mean =
      sum_of(unit, r.block, scratch, magnitude) / static_cast<float>(r.block);
  const float scale = bounded(r, mean * absmax, absmax);
  for (int64_t i = 0; i < r.block; i++) y[i] = x[i] < 0 ? -scale : scale;
}

inline void round_rows(const Rounding& r, int64_t begin, int64_t end) {
  std::vector<float> unit(r.block), scratch(r.block);
  for (int64_t row = begin; row < end; row++) {
    bool bad = false;
    for (int64_t at = row * r.size; at < (row + 1) * r.size; at += r.block) {
      const float* x = r.x + at;
      float* y = r.y + at;
      float absmax = absmax_of(x, r.block);
      if (!(absmax <= FLT_MAX)) bad = true, absmax = std::numeric_limits<float>::infinity();
      switch (r.kind) {
        case Levels::int8:
          to_int8(x, r.block, bounded(r, absmax / 127, absmax), y);
          break;
        case Levels::table: to_table(r, x, bounded(r, absmax, absmax), y); break;
        case Levels::ternary: to_ternary(r, x, absmax, unit.data(), scratch.data(), y); break;
        case Levels::binary: to_binary(r, x, absmax, unit.data(), scratch.data(), y); break;
      }
    }
    r.problems[row] = bad;
  }
}

// The scale is NaN if a value is not finite. It is 1 if it would be subnormal: all codes are then zero.
inline void round_int8_rows(const Int8Rounding& r, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float* __restrict x = r.x + row * r.size;
    int8_t* __restrict codes = r.codes + row * r.size;
    const float absmax = absmax_of(x, r.size);
    float scale = absmax * (1 / 127.0f);
    if (absmax < 127 * FLT_MIN) scale = 1;
    if (!(absmax <= FLT_MAX)) scale = std::numeric_limits<float>::quiet_NaN();
    r.scales[row] = scale;
    const float per_scale = 1 / scale;
    for (int64_t i = 0; i < r.size; i++) {
      const float shifted = x[i] * per_scale + without_fraction;  // The lowest bits are the code.
      int32_t bits;
      std::memcpy(&bits, &shifted, sizeof bits);
      codes[i] = static_cast<int8_t>(bits);
    }
  }
}

EQQUANT_END
