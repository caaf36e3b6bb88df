// Scales of consecutive blocks of a row, in AVX-512.
#pragma once

#include <immintrin.h>

#include <vector>

#include "decode/scales.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// Loads the scales of up to sixteen blocks, from block `b` of a row on.
EQQUANT_INLINE __m512 scales_at(const Product& p, int64_t row, int64_t b, __mmask16 some) {
  if (!p.scale_buffer(1))
    return _mm512_maskz_loadu_ps(some, static_cast<const float*>(p.scales) + row * p.blocks + b);
  alignas(64) float scales[16];
  decode_scales(p, row, b, __builtin_popcount(some), scales);
  return _mm512_maskz_load_ps(some, scales);
}

// Returns the larger magnitudes. NaN is the largest.
EQQUANT_INLINE __m512 larger(__m512 most, __m512 x) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(most), magnitude));
}

// Rows of the activation for x @ w. If each row of the weight has one scale, the activation is multiplied by it.
class ScaledActivation {
  Activation activation;
  const bool one_scale;
  const int64_t rows;
  std::vector<float> buffer, scaled;
  const float* const scales;

 public:
  explicit ScaledActivation(const Product& p)
      : activation(p),
        one_scale(p.blocks == 1),
        rows(p.rows),
        buffer(one_scale ? p.scale_buffer(rows) : 0),
        scaled(one_scale ? rows : 0),
        scales(one_scale ? scales_of(p, 0, rows, buffer.data()) : nullptr) {}

  const float* row(int64_t i) {
    const float* const x = activation.row(i);
    if (!one_scale) return x;
    for (int64_t r = 0; r < rows; r++) scaled[r] = x[r] * scales[r];
    return scaled.data();
  }
};

EQQUANT_END
