// Encoding of floats to the nearest of 16 levels, in AVX-512.
#define EQQUANT_TARGET_AVX512
#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <type_traits>
#include <vector>

#include "encode/encoding.h"
#include "microkernels/avx512/mask.h"
#include "runtime/absmax.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

// Returns the number of boundaries below each value: a binary search by lookups.
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

// A true division, because a product with the reciprocal can be wrong in the last place.
EQQUANT_INLINE __m512 divide(const float* x, float by) {
  return _mm512_div_ps(_mm512_loadu_ps(x), _mm512_set1_ps(by > 0 ? by : 1));
}

// The boundaries times a scale, which save the divisions. The rounded quotient `x / scale` is above a boundary if the
// exact quotient is above the middle between the boundary and the next float. So `x` is above the product of the
// scale and this middle, rounded down. Half of the step to the next float is a power of two, so its product is exact,
// and the sum is rounded once.
struct Thresholds {
  __m512 boundaries, halves;

  explicit Thresholds(const float* of) {
    float half[16];
    for (int i = 0; i < 16; i++)
      half[i] = std::isinf(of[i]) ? 0 : (std::nextafter(of[i], INFINITY) - of[i]) / 2;
    boundaries = _mm512_loadu_ps(of), halves = _mm512_loadu_ps(half);
  }
  EQQUANT_INLINE __m512 of(float scale) const {
    constexpr int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const __m512 by = _mm512_set1_ps(scale);
    return _mm512_fmadd_round_ps(boundaries, by, _mm512_mul_ps(halves, by), down);
  }
};

// Sums are pairwise by halves, like `sum_blocks` in Python: first across `count` vectors, padded with zeros to a power
// of two, and then across the lanes of each of sixteen vectors.
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
// Adds the halves of two vectors, or, `again`, their quarters. `in_quarters` does the same within quarters
// of a vector.
template <bool again>
EQQUANT_INLINE __m512 by_halves(__m512 a, __m512 b) {
  constexpr int low = again ? 0x88 : 0x44, high = again ? 0xDD : 0xEE;
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, low), _mm512_shuffle_f32x4(a, b, high));
}
template <bool again>
EQQUANT_INLINE __m512 in_quarters(__m512 a, __m512 b) {
  constexpr int low = again ? 0x88 : 0x44, high = again ? 0xDD : 0xEE;
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, low), _mm512_shuffle_ps(a, b, high));
}
// Returns the sums of the lanes of sixteen vectors.
EQQUANT_INLINE __m512 sum_lanes(const __m512* x) {
  const auto quarters = [&](int i) {
    return by_halves<true>(by_halves<false>(x[i], x[i + 4]),
                           by_halves<false>(x[i + 8], x[i + 12]));
  };
  return in_quarters<true>(in_quarters<false>(quarters(0), quarters(1)),
                           in_quarters<false>(quarters(2), quarters(3)));
}

// The state of a search in a block: the values, and the values relative to the largest magnitude; 1 for positive
// values; their codes with the last scale; the lower candidate of each code, and the levels of both candidates; and
// scratch for squared errors.
struct Values {
  __m512 *x, *unit;
  __m512i *above, *code, *least;
  __m512 *inner, *outer, *squares;
};
constexpr int parts_of_values = 8;
struct alignas(64) Register {
  char bytes[64];
};

// With smaller scales, thresholds may be subnormal, and some threads flush subnormal numbers to zero.
constexpr float smallest_scale = 0x1p-90f;

class Search {
  const Encoding& e;
  const __m512 levels, boundaries;
  const Thresholds thresholds;
  // The factor by which a scale may grow before a code changes by more than one.
  const float reach;
  // Entry 0 is the block itself, entry 1 the first scale, and then candidates follow: their shares, scales, scales
  // relative to the largest magnitude, and squared errors.
  const int64_t tried;
  std::vector<float> shares, scales, relative, errors;
  std::vector<Register> partial, space;

  static float reach_of(const float* boundaries) {
    float least = INFINITY;
    for (int i = 0; i < 14; i++) {
      const float ratio = boundaries[i + 1] / boundaries[i];
      if (ratio > 0) least = std::min(least, std::max(ratio, 1 / ratio));
    }
    return least / 1.001f;
  }

  // Returns the squared error of the levels `decoded(i)`.
  template <class Count, class Decoded>
  EQQUANT_INLINE __m512 error(Count count, Values of, float share, const Decoded& decoded) {
    const __m512 by = _mm512_set1_ps(share);
    for (int64_t i = 0; i < count; i++) {
      const __m512 off = _mm512_sub_ps(of.unit[i], _mm512_mul_ps(decoded(i), by));
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
    // The first two entries are the block itself, and the first scale.
    for (int64_t k = 0; k < tried; k += 16) {
      __m512 scale = _mm512_mul_ps(_mm512_set1_ps(start), _mm512_loadu_ps(&shares[k]));
      scale = _mm512_max_ps(scale, _mm512_set1_ps(FLT_MIN));
      scale = _mm512_min_ps(scale, _mm512_set1_ps(FLT_MAX));
      _mm512_storeu_ps(&scales[k], scale);
      _mm512_storeu_ps(&relative[k], _mm512_div_ps(scale, _mm512_set1_ps(absmax)));
    }
    const auto by_code = [&](int64_t i) { return _mm512_permutexvar_ps(of.code[i], levels); };
    const auto by_division = [&](int64_t k) {
      const __m512 by = _mm512_set1_ps(scales[k]);
      for (int64_t i = 0; i < count; i++)
        of.code[i] = search(_mm512_div_ps(of.x[i], by), boundaries);
      sums[k] = error(count, of, relative[k], by_code);
    };
    const auto by_thresholds = [&](int64_t k) {
      const __m512 bounds = thresholds.of(scales[k]);
      for (int64_t i = 0; i < count; i++) of.code[i] = search(of.x[i], bounds);
      sums[k] = error(count, of, relative[k], by_code);
    };
    if (start < smallest_scale) {
      for (int64_t k = 1; k < tried; k++) by_division(k);
    } else {
      by_thresholds(1);
      by_thresholds(2);
      for (int64_t k = 3; k < tried;) {
        // With a slightly larger scale, a code stays the same, or moves by one towards zero.
        const float most = scales[k - 1] * reach;
        for (int64_t i = 0; i < count; i++) {
          of.least[i] = _mm512_sub_epi32(of.code[i], of.above[i]);
          const __m512i outer = _mm512_add_epi32(of.least[i], _mm512_set1_epi32(1));
          of.inner[i] = _mm512_permutexvar_ps(of.least[i], levels);
          of.outer[i] = _mm512_permutexvar_ps(outer, levels);
        }
        __m512 bounds;
        const auto beyond = [&](int64_t i) {
          const __m512 bound = _mm512_permutexvar_ps(of.least[i], bounds);
          return _mm512_cmp_ps_mask(of.x[i], bound, _CMP_GT_OQ);
        };
        do {
          bounds = thresholds.of(scales[k]);
          sums[k] = error(count, of, relative[k], [&](int64_t i) {
            return _mm512_mask_blend_ps(beyond(i), of.inner[i], of.outer[i]);
          });
        } while (++k < tried && scales[k] <= most);
        if (k < tried)
          for (int64_t i = 0; i < count; i++)
            of.code[i] = _mm512_mask_add_epi32(of.least[i], beyond(i), of.least[i],
                                               _mm512_set1_epi32(1));
      }
    }
    return scales[best_of(sums)];
  }

  int64_t best_of(const __m512* sums) {
    __m512 least = _mm512_set1_ps(INFINITY);
    for (int64_t k = 0; k < tried; k += 16) {
      const __m512 of = sum_lanes(sums + k);
      _mm512_storeu_ps(&errors[k], of);
      least = _mm512_mask_min_ps(least, candidates(k), least, of);
    }
    // Ignore improvements smaller than the rounding error.
    const float enough = errors[0] * 0x1p-20f;
    // If all other candidates are worse by more, the least error wins.
    least = _mm512_set1_ps(_mm512_reduce_min_ps(least));
    int64_t close = 0, best = 1;
    for (int64_t k = 0; k < tried; k += 16) {
      const __m512 others = _mm512_sub_ps(_mm512_loadu_ps(&errors[k]), _mm512_set1_ps(enough));
      const __mmask16 near =
          _mm512_mask_cmp_ps_mask(candidates(k), others, least, _CMP_NGT_UQ);
      close += __builtin_popcount(near);
      if (near) best = k + __builtin_ctz(near);
    }
    if (close == 1) return best;
    best = 1;
    for (int64_t k = 2; k < tried; k++)
      if (errors[k] < errors[best] - enough) best = k;
    return best;
  }
  __mmask16 candidates(int64_t k) const { return first(tried - k) & (k ? 0xFFFF : 0xFFFE); }

 public:
  explicit Search(const Encoding& e)
      : e(e),
        levels(_mm512_loadu_ps(e.levels)),
        boundaries(_mm512_loadu_ps(e.boundaries)),
        thresholds(e.boundaries),
        reach(reach_of(e.boundaries)),
        tried(2 + e.num_shares),
        shares(tried + 15, 1.0f),
        scales(tried + 15),
        relative(tried + 15),
        errors(tried + 15),
        partial(tried + 15),
        space(parts_of_values * (e.block / 16)) {
    std::copy(e.shares, e.shares + e.num_shares, shares.begin() + 2);
  }

  // Returns the best scale of a block. `start` is its largest magnitude, or slightly more.
  float scale(const float* x, float absmax, float start) {
    // The default block size: all values are in registers.
    if (e.block == 64) {
      __m512 floats[5][4];
      __m512i codes[3][4];
      const Values of{floats[0], floats[1], codes[0],  codes[1],
                      codes[2],  floats[2], floats[3], floats[4]};
      return run(std::integral_constant<int64_t, 4>(), of, x, absmax, start);
    }
    const int64_t count = e.block / 16;
    const auto floats = [&](int i) { return reinterpret_cast<__m512*>(&space[i * count]); };
    const auto codes = [&](int i) { return reinterpret_cast<__m512i*>(&space[i * count]); };
    const Values of{floats(0), floats(1), codes(2),  codes(3),
                    codes(4),  floats(5), floats(6), floats(7)};
    return run(count, of, x, absmax, start);
  }
};

}  // namespace

void encode_rows(const Encoding& e, int64_t begin, int64_t end) {
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

EQQUANT_END

namespace eqquant {
void encode_avx512(const Encoding& e, int64_t begin, int64_t end) { avx512::encode_rows(e, begin, end); }
}  // namespace eqquant
