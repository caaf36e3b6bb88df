// The M-algorithm, in AVX-512.
#define EQQUANT_TARGET_AVX512
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "encode/searching.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

// Memory at multiples of cache lines.
class Floats {
 public:
  explicit Floats(int64_t count) : memory_(count + 32, 0.f) {
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    data = memory_.data() + (64 - at % 64) % 64 / sizeof(float);
  }
  Floats(const Floats&) = delete;
  float* data;

 private:
  std::vector<float> memory_;
};

// The kept choices of levels: `sums` is the feedback on each value, and `costs` the sum of squares.
struct Paths {
  Floats sums, costs;
  std::vector<uint32_t> bases;  // the first state that can follow
  Paths(int64_t count, int64_t width) : sums(count * width), costs(count + 16), bases(count + 16) {}
};

// A step of a path: its predecessor, its state and its error.
struct Step {
  uint16_t from;
  uint16_t state;
  float error;
};

template <int bits>
class Search {
  static constexpr int branches = 1 << bits, together = 16 / branches;
  const Searching& s_;
  const int64_t width_;
  const uint32_t mask_;
  Floats levels_, factor_, costs_;
  std::vector<int32_t> chosen_;
  std::vector<Step> steps_;
  Paths now_, next_;

 public:
  // Here the newest code is in the lowest bits of a state. So levels that follow a state are contiguous.
  explicit Search(const Searching& s)
      : s_(s),
        width_((s.size + 15) / 16 * 16),
        mask_(static_cast<uint32_t>(s.states - 1)),
        levels_(s.states + 16),
        factor_(s.size * width_),
        costs_(s.count * branches + 16),
        chosen_(s.count * branches + 32),
        steps_(s.size * s.count),
        now_(s.count, width_),
        next_(s.count, width_) {
    for (int64_t i = 0; i < s.states; i++) {
      int64_t reversed = 0;
      for (int64_t left = s.states / branches, rest = i; left; left /= branches, rest /= branches)
        reversed = reversed * branches + rest % branches;
      levels_.data[reversed] = s.levels[i];
    }
    for (int64_t i = 0; i < s.size; i++)
      std::memcpy(factor_.data + i * width_, s.factor + i * s.size, s.size * sizeof(float));
  }

  void row(int64_t row) {
    const float scale = s_.scales[row], unit = scale == 0 ? 1 : scale, level_unit = scale == 0 ? 0 : 1;
    const float* x = s_.x + row * s_.size;
    std::memset(now_.sums.data, 0, width_ * sizeof(float));
    now_.costs.data[0] = 0, now_.bases[0] = 0;
    int64_t count = 1;
    float spread = 0;  // of the costs that were kept last
    for (int64_t j = 0; j < s_.size; j++) {
      const float inverse = 1 / factor_.data[j * width_ + j], value = x[j] / unit;
      const float best = candidates(j, count, value, inverse, level_unit);
      const int64_t kept = choose(count * branches, best, spread);
      advance(j, kept, value, inverse, level_unit, best);
      std::swap(now_.sums.data, next_.sums.data), std::swap(now_.costs.data, next_.costs.data);
      std::swap(now_.bases, next_.bases);
      count = kept;
    }
    int64_t path = std::min_element(now_.costs.data, now_.costs.data + count) - now_.costs.data;
    for (int64_t j = s_.size - 1; j >= 0; j--) {
      const Step step = steps_[j * s_.count + path];
      s_.values[row * s_.size + j] = levels_.data[step.state] * scale;
      s_.errors[row * s_.size + j] = step.error * unit;
      s_.codes[row * s_.size + j] = static_cast<uint8_t>(step.state % branches);
      path = step.from;
    }
  }

 private:
  // Computes the costs of all continuations, and returns the smallest.
  float candidates(int64_t j, int64_t count, float value, float inverse, float level_unit) {
    const __m512 per_level = _mm512_set1_ps(level_unit * inverse);
    __m512 smallest = _mm512_set1_ps(INFINITY);
    for (int64_t path = 0; path < count; path += together) {
      __m512 x, cost, level;
      if constexpr (branches == 16) {
        x = _mm512_set1_ps((value - now_.sums.data[path * width_ + j]) * inverse);
        cost = _mm512_set1_ps(now_.costs.data[path]);
        level = _mm512_loadu_ps(levels_.data + now_.bases[path]);
      } else {
        alignas(64) float xs[16], costs[16], levels[16];
        for (int i = 0; i < together; i++) {
          const int64_t at = std::min(path + i, count - 1);
          const float own = (value - now_.sums.data[at * width_ + j]) * inverse;
          const float before = path + i < count ? now_.costs.data[at] : INFINITY;
          for (int branch = 0; branch < branches; branch++) {
            xs[i * branches + branch] = own, costs[i * branches + branch] = before;
            levels[i * branches + branch] = levels_.data[now_.bases[at] + branch];
          }
        }
        x = _mm512_load_ps(xs), cost = _mm512_load_ps(costs), level = _mm512_load_ps(levels);
      }
      const __m512 error = _mm512_fnmadd_ps(level, per_level, x);
      cost = _mm512_fmadd_ps(error, error, cost);
      _mm512_storeu_ps(costs_.data + path * branches, cost);
      smallest = _mm512_min_ps(smallest, cost);
    }
    return _mm512_reduce_min_ps(smallest);
  }

  int64_t below(int64_t candidates, float limit) const {
    const __m512 at = _mm512_set1_ps(limit);
    int64_t found = 0;
    for (int64_t i = 0; i < candidates; i += 16)
      found += __builtin_popcount(inside(i, candidates, _mm512_cmp_ps_mask(_mm512_loadu_ps(costs_.data + i), at,
                                                                          _CMP_LE_OQ)));
    return found;
  }

  static EQQUANT_INLINE __mmask16 inside(int64_t i, int64_t candidates, __mmask16 mask) {
    return i + 16 > candidates ? mask & ((1u << (candidates - i)) - 1) : mask;
  }

  // Lists the `count` candidates with the smallest costs; fewer only if the costs of others are equal. The search for
  // the limit starts at the spread of the costs that were kept last.
  int64_t choose(int64_t candidates, float best, float& spread) {
    float limit = INFINITY;
    if (candidates > s_.count) {
      float low = best, high = INFINITY;
      limit = (spread > 0 ? best + spread : costs_.data[candidates / 2]) + 1e-30f;
      for (int i = 0; i < 40; i++) {
        const int64_t found = below(candidates, limit);
        (found <= s_.count ? low : high) = limit;
        if (found == s_.count) break;
        const float wider = best + 2 * (limit - best) + 1e-30f;
        const float middle = low + (high - low) / 2;
        const float new_limit = high == INFINITY ? wider : middle;
        if (new_limit == limit || !(new_limit < INFINITY)) break;
        limit = new_limit;
      }
      limit = low, spread = limit - best;
    }
    const __m512 at = _mm512_set1_ps(limit);
    __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t kept = 0;
    for (int64_t i = 0; i < candidates && kept < s_.count; i += 16) {
      const __m512 cost = _mm512_loadu_ps(costs_.data + i);
      const __mmask16 mask = inside(i, candidates, _mm512_cmp_ps_mask(cost, at, _CMP_LE_OQ));
      _mm512_mask_compressstoreu_epi32(chosen_.data() + kept, mask, index);
      kept += __builtin_popcount(mask);
      index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
    }
    if (!kept) chosen_[0] = 0, kept = 1;  // All costs are NaN.
    return std::min(kept, s_.count);
  }

  // Makes the chosen candidates the paths of the next value.
  void advance(int64_t j, int64_t kept, float value, float inverse, float level_unit, float best) {
    const float* factor = factor_.data + j * width_;
    for (int64_t i = 0; i < kept; i++) {
      const int32_t id = chosen_[i], from = id / branches;
      const uint32_t state = now_.bases[from] + id % branches;
      const float* sums = now_.sums.data + from * width_;
      const float error = (value - sums[j] - levels_.data[state] * level_unit) * inverse;
      next_.bases[i] = (state << bits) & mask_;
      next_.costs.data[i] = costs_.data[id] - best;
      steps_[j * s_.count + i] = {static_cast<uint16_t>(from), static_cast<uint16_t>(state), error};
      float* out = next_.sums.data + i * width_;
      const __m512 by = _mm512_set1_ps(error);
      for (int64_t z = (j + 1) / 16 * 16; z < width_; z += 16)
        _mm512_store_ps(out + z, _mm512_fmadd_ps(by, _mm512_load_ps(factor + z), _mm512_load_ps(sums + z)));
    }
  }
};

template <int bits>
void search_rows(const Searching& s, int64_t begin, int64_t end) {
  Search<bits> search(s);
  for (int64_t row = begin; row < end; row++) search.row(row);
}

}  // namespace
EQQUANT_END

namespace eqquant {

void search_avx512(const Searching& s, int64_t begin, int64_t end) {
  switch (s.bits) {
    case 1: return avx512::search_rows<1>(s, begin, end);
    case 2: return avx512::search_rows<2>(s, begin, end);
    case 3: return avx512::search_rows<3>(s, begin, end);
    default: return avx512::search_rows<4>(s, begin, end);
  }
}

}  // namespace eqquant
