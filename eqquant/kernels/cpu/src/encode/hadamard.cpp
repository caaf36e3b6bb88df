// Each step adds and subtracts values that are 1, 2, 4 ... apart. The first three steps are within a register.
#define EQQUANT_TARGET_ANY

#include "encode/hadamard.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/target.h"

EQQUANT_TARGET_BEGIN(EQQUANT_FEATURES)
namespace eqquant {
namespace {

constexpr int64_t lanes = 8;
using Values = float __attribute__((vector_size(32)));

EQQUANT_INLINE Values load(const float* from) {
  Values values;
  std::memcpy(&values, from, sizeof values);
  return values;
}
EQQUANT_INLINE void store(float* to, Values values) { std::memcpy(to, &values, sizeof values); }

// Replaces values that are `step` apart by their sum and their difference.
template <int step>
EQQUANT_INLINE Values within(Values x) {
#if defined(__clang__)
  const Values other =
      __builtin_shufflevector(x, x, 0 ^ step, 1 ^ step, 2 ^ step, 3 ^ step, 4 ^ step, 5 ^ step, 6 ^ step, 7 ^ step);
#else
  using Index = int __attribute__((vector_size(32)));
  const Values other = __builtin_shuffle(
      x, Index{0 ^ step, 1 ^ step, 2 ^ step, 3 ^ step, 4 ^ step, 5 ^ step, 6 ^ step, 7 ^ step});
#endif
  constexpr auto sign = [](int lane) { return lane & step ? -1.0f : 1.0f; };
  const Values signs = {sign(0), sign(1), sign(2), sign(3), sign(4), sign(5), sign(6), sign(7)};
  return other + x * signs;
}

EQQUANT_INLINE Values first_steps(Values x, int64_t block) {
  if (block > 1) x = within<1>(x);
  if (block > 2) x = within<2>(x);
  return block > 4 ? within<4>(x) : x;
}

}  // namespace

void hadamard(const float* x, float* y, int64_t size, int64_t block) {
  // First, so that sums of large values do not overflow.
  const float factor = 1 / std::sqrt(static_cast<float>(block));
  const int64_t whole = size / lanes * lanes;
  for (int64_t i = 0; i < whole; i += lanes) store(y + i, first_steps(load(x + i) * factor, block));
  if (whole < size) {  // Blocks are shorter than a register.
    float rest[lanes] = {};
    std::copy(x + whole, x + size, rest);
    store(rest, first_steps(load(rest) * factor, block));
    std::copy(rest, rest + (size - whole), y + whole);
  }
  for (int64_t begin = 0; begin < size; begin += block)
    for (int64_t step = lanes; step < block; step *= 2)
      for (int64_t i = begin; i < begin + block; i += 2 * step)
        for (int64_t j = i; j < i + step; j += lanes) {
          const Values a = load(y + j), b = load(y + j + step);
          store(y + j, a + b), store(y + j + step, a - b);
        }
}

}  // namespace eqquant
EQQUANT_TARGET_END
