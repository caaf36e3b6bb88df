// Floats to the nearest of 16 levels: AVX-512.
#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <type_traits>
#include <vector>

#include "encode.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace eqquant {
namespace {

#include "absmax.h"

// How many of the 15 boundaries lie below each value: a binary search, by lookups.
EQQUANT_INLINE __m512i search(__m512 x, __m512 boundaries) {
  __m512i code = _mm512_setzero_si512();
  for (int step = 8; step; step /= 2) {
    const __m512i at = _mm512_add_epi32(code, _mm512_set1_epi32(step - 1));
    const __m512 boundary = _mm512_permutexvar_ps(at, boundaries);
    const __mmask16 above = _mm512_cmp_ps_mask(x, boundary, _CMP_GT_OQ);
    code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(step));
  }
  return code;
}

// A true division: a product with the reciprocal would be off in the last place.
EQQUANT_INLINE __m512 divide(const float* x, float by) {
  return _mm512_div_ps(_mm512_loadu_ps(x), _mm512_set1_ps(by > 0 ? by : 1));
}

// The boundaries of a scale, which spare the divisions: `x / scale`, once rounded, is above
// a boundary if the quotient is above the middle between that and the next float, and so if
// `x` is above the largest float that is not above the product. That of 24 bits and 25 is
// exact in a double, and is no float itself.
struct Thresholds {
  __m512d low, high;

  explicit Thresholds(const float* boundaries) {
    double middles[16];
    for (int i = 0; i < 16; i++)
      middles[i] = (static_cast<double>(boundaries[i]) +
                    static_cast<double>(std::nextafter(boundaries[i], INFINITY))) / 2;
    low = _mm512_loadu_pd(middles), high = _mm512_loadu_pd(middles + 8);
  }
  EQQUANT_INLINE __m512 of(float scale) const {
    constexpr int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const __m512d by = _mm512_set1_pd(scale);
    return _mm512_insertf32x8(
        _mm512_castps256_ps512(_mm512_cvt_roundpd_ps(_mm512_mul_pd(low, by), down)),
        _mm512_cvt_roundpd_ps(_mm512_mul_pd(high, by), down), 1);
  }
};

// Sums go by halves, as those of `sum_blocks`: first of `count` vectors, to the power of two
// filled with zeros, and then of the lanes of each of four.
EQQUANT_INLINE __m512 sum(__m512* of, std::integral_constant<int64_t, 4>) {
  return _mm512_add_ps(_mm512_add_ps(of[0], of[2]), _mm512_add_ps(of[1], of[3]));
}
EQQUANT_INLINE __m512 sum(__m512* of, int64_t count) {
  while (count > 1) {
    int64_t half = 1;
    while (2 * half < count) half *= 2;
    for (int64_t i = 0; i < count - half; i++) of[i] = _mm512_add_ps(of[i], of[i + half]);
    count = half;
  }
  return of[0];
}
EQQUANT_INLINE __m512 by_halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}
EQQUANT_INLINE void sum_lanes(const __m512* x, float* sums) {
  const __m512 ab = by_halves(x[0], x[1]), cd = by_halves(x[2], x[3]);
  __m512 all =
      _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4E));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xB1));
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, all);
  for (int i = 0; i < 4; i++) sums[i] = lanes[4 * i];
}

// What a search knows of a block: the values, also relative to the largest magnitude; their
// codes by the last scale; whether they are positive; and space for what is summed up.
struct Values {
  __m512 *x, *unit;
  __m512i *code, *above;
  __m512* squares;
};
struct alignas(64) Register {
  char bytes[64];
};

// From here on thresholds are no subnormal numbers, which some threads take for zero.
constexpr float smallest_scale = 0x1p-90f;

class Search {
  const Encoding& e;
  const __m512 levels, boundaries;
  const Thresholds thresholds;
  // Scales to try, after the one to start from; these relative to the largest magnitude; the
  // squared error of each; and before all of these the square of the block itself.
  const int64_t tried;
  std::vector<float> scales, relative, errors;
  std::vector<Register> partial, space;

  // `code_of(i)` gives codes. What they stand for is compared with the values.
  template <class Count, class CodeOf>
  EQQUANT_INLINE __m512 error(Count count, Values of, float share, const CodeOf& code_of) {
    const __m512 decoded = _mm512_mul_ps(levels, _mm512_set1_ps(share));
    for (int64_t i = 0; i < count; i++) {
      of.code[i] = code_of(i);
      const __m512 off = _mm512_sub_ps(of.unit[i], _mm512_permutexvar_ps(of.code[i], decoded));
      of.squares[i] = _mm512_mul_ps(off, off);
    }
    return sum(of.squares, count);
  }

  template <class Count>
  EQQUANT_INLINE float run(Count count, Values of, const float* x, float absmax, float start) {
    __m512* const sums = reinterpret_cast<__m512*>(partial.data());
    for (int64_t i = 0; i < count; i++) {
      of.x[i] = _mm512_loadu_ps(x + 16 * i), of.unit[i] = divide(x + 16 * i, absmax);
      const __mmask16 above = _mm512_cmp_ps_mask(of.x[i], _mm512_setzero_ps(), _CMP_GT_OQ);
      of.above[i] = _mm512_maskz_set1_epi32(above, 1);
      of.squares[i] = _mm512_mul_ps(of.unit[i], of.unit[i]);
    }
    sums[0] = sum(of.squares, count);
    scales[1] = start;
    for (int64_t k = 2; k < tried; k++)
      scales[k] = std::min(std::max(start * e.shares[k - 2], FLT_MIN), FLT_MAX);
    for (int64_t k = 1; k < tried; k++) relative[k] = scales[k] / absmax;
    const auto by_division = [&](int64_t k) {
      const __m512 by = _mm512_set1_ps(scales[k]);
      sums[k] = error(count, of, relative[k], [&](int64_t i) {
        return search(_mm512_div_ps(of.x[i], by), boundaries);
      });
    };
    by_division(1);
    if (start < smallest_scale) {
      for (int64_t k = 2; k < tried; k++) by_division(k);
    } else {
      const __m512 bounds = thresholds.of(scales[2]);
      sums[2] = error(count, of, relative[2], [&](int64_t i) { return search(of.x[i], bounds); });
      // With a scale that is a little larger a code is the same, or the next one to zero.
      for (int64_t k = 3; k < tried; k++) {
        const __m512 bounds = thresholds.of(scales[k]);
        sums[k] = error(count, of, relative[k], [&](int64_t i) {
          const __m512i least = _mm512_sub_epi32(of.code[i], of.above[i]);
          const __m512 bound = _mm512_permutexvar_ps(least, bounds);
          const __mmask16 beyond = _mm512_cmp_ps_mask(of.x[i], bound, _CMP_GT_OQ);
          return _mm512_mask_add_epi32(least, beyond, least, _mm512_set1_epi32(1));
        });
      }
    }
    for (int64_t k = 0; k < tried; k += 4) sum_lanes(sums + k, &errors[k]);
    // What is less than rounding is no improvement.
    const float enough = errors[0] * 0x1p-20f;
    int64_t best = 1;
    for (int64_t k = 2; k < tried; k++)
      if (errors[k] < errors[best] - enough) best = k;
    return scales[best];
  }

 public:
  explicit Search(const Encoding& e)
      : e(e),
        levels(_mm512_loadu_ps(e.levels)),
        boundaries(_mm512_loadu_ps(e.boundaries)),
        thresholds(e.boundaries),
        tried(2 + e.num_shares),
        scales(tried),
        relative(tried),
        errors(tried + 3),
        partial(tried + 3),
        space(5 * (e.block / 16)) {}

  // The best scale of a block, where `start` is its largest magnitude, or a little more.
  float scale(const float* x, float absmax, float start) {
    // The default, whose values are all in registers.
    if (e.block == 64) {
      __m512 floats[3][4];
      __m512i codes[2][4];
      const Values of{floats[0], floats[1], codes[0], codes[1], floats[2]};
      return run(std::integral_constant<int64_t, 4>(), of, x, absmax, start);
    }
    const int64_t count = e.block / 16;
    const auto part = [&](int i) { return static_cast<void*>(space.data() + i * count); };
    const Values of{static_cast<__m512*>(part(0)), static_cast<__m512*>(part(1)),
                    static_cast<__m512i*>(part(2)), static_cast<__m512i*>(part(3)),
                    static_cast<__m512*>(part(4))};
    return run(count, of, x, absmax, start);
  }
};

}  // namespace

void encode_avx512(const Encoding& e, int64_t begin, int64_t end) {
  const __m512 boundaries = _mm512_loadu_ps(e.boundaries);
  const int64_t half = e.block / 2, blocks = e.size / e.block;
  Search searched(e);
  for (int64_t row = begin; row < end; row++) {
    bool bad = false;
    for (int64_t b = 0; b < blocks; b++) {
      const float* x = e.x + row * e.size + b * e.block;
      uint8_t* codes = e.codes + (row * e.size + b * e.block) / 2;
      const float absmax = absmax_of(x, e.block);
      const bool finite = absmax <= FLT_MAX;
      bad |= !finite;
      float scale = !finite ? FLT_MAX : absmax > 0 ? std::max(absmax, FLT_MIN) : 0;
      if (e.given)
        scale = e.given[row * blocks + b];
      else if (e.num_shares && finite && absmax > 0)
        scale = searched.scale(x, absmax, scale);
      e.scales[row * blocks + b] = scale;
      for (int64_t j = 0; j < half; j += 16) {
        const __m512i low = search(divide(x + j, scale), boundaries);
        const __m512i high = search(divide(x + half + j, scale), boundaries);
        const __m512i both = _mm512_or_si512(low, _mm512_slli_epi32(high, 4));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + j), _mm512_cvtepi32_epi8(both));
      }
    }
    e.problems[row] = bad;
  }
}

}  // namespace eqquant
EQQUANT_TARGET_END
