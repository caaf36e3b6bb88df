#define EQQUANT_TARGET_ANY

#include "runtime/range.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "decode/scales.h"
#include "decode/unpack.h"
#include "runtime/absmax.h"
#include "runtime/target.h"

EQQUANT_TARGET_BEGIN(EQQUANT_FEATURES)
namespace eqquant {
namespace {

constexpr uint32_t least_usual = (127 - largest_exponent) << 23, infinity = 255u << 23;

// The bits of a magnitude. Their order equals the order of magnitudes, and NaN is the largest. Loops over bits become
// vector instructions.
uint32_t magnitude(const float* value) {
  uint32_t bits;
  std::memcpy(&bits, value, sizeof bits);
  return bits & 0x7FFFFFFF;
}

bool is_any_unusual(const float* y, int64_t size) {
  uint32_t largest = 0;  // Differences of tiny values wrap around.
  for (int64_t i = 0; i < size; i++) largest = std::max(largest, magnitude(y + i) - least_usual);
  return largest >= infinity - least_usual;
}

uint32_t largest_of(const float* values, int64_t size) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < size; i++) largest = std::max(largest, magnitude(values + i));
  return largest;
}

// Returns the exponent of the largest magnitude; 0 if all values are 0, or one is not finite.
int exponent_of(const float* values, int64_t size) {
  const uint32_t largest = largest_of(values, size);
  return largest && largest < infinity ? static_cast<int>(largest >> 23) - 127 : 0;
}

// True if no value of the type is tiny or large: the products of two such values are in the range of the kernels.
bool is_bounded(ScaleType type) {
  return type != ScaleType::float32 && type != ScaleType::bfloat16 && type != ScaleType::exponent;
}

// True if all scales that are not 0 are in the range of the kernels. Vectorized loops over the scales of several rows
// take less time than a loop for each row.
bool are_usual(const Product& p) {
  if (is_bounded(p.scales.type) && (!p.scales.outer_blocks || is_bounded(p.scales.outer_type))) return true;
  constexpr int64_t at_once = 1024;
  const int64_t step = std::max<int64_t>(1, at_once / p.blocks);
  std::vector<float> buffer(p.scale_buffer(step));
  uint32_t largest = 0, least = infinity;
  for (int64_t row = 0; row < p.rows; row += step) {
    const int64_t rows = std::min(step, p.rows - row);
    const float* const scales = scales_of(p, row, rows, buffer.data());
    for (int64_t i = 0; i < rows * p.blocks; i++) {
      const uint32_t value = magnitude(scales + i);
      largest = std::max(largest, value);
      least = std::min(least, value - 1);  // 0 wraps around.
    }
  }
  return least + 1 >= (127u - usual_exponent) << 23 && largest <= (127u + usual_exponent) << 23;
}

}  // namespace

void finish_results(const Product& p, int64_t begin, int64_t end) {
  if (!p.checks_results() && !p.result_exponent()) return;
  const int64_t row = p.contract_rows ? p.columns() : p.rows;
  const float factor = std::ldexp(1.0f, p.result_exponent());
  bool found = false;
  const auto finish = [&](float* y, int64_t size) {
    if (p.checks_results()) found |= is_any_unusual(y, size);
    if (p.result_exponent())
      for (int64_t i = 0; i < size; i++) y[i] *= factor;
  };
  if (end - begin == (p.contract_rows ? p.packed : p.rows)) {
    finish(p.y, p.m * row);
  } else {
    for (int64_t i = 0; i < p.m; i++) {
      float* y = p.y + i * row;
      if (!p.contract_rows)
        finish(y + begin, end - begin);
      else
        for_each_run(p, begin, end, [&](int64_t logical, int64_t, int64_t length) { finish(y + logical, length); });
    }
  }
  if (found) p.unusual->store(true, std::memory_order_relaxed);
}

bool may_be_out_of_range(const Product& p) {
  const bool found = p.unusual->load(std::memory_order_relaxed);
  return p.checks_results() ? found : found || !are_usual(p);
}

InRange::InRange(const Product& p) : scaled(p) {
  const int64_t size = p.contracted();
  EQQUANT_NAMESPACE::Activation activation(p);
  // Kernels may check products of rows and scales.
  bool all_zero = true, unusual = !p.checks_results() && p.unusual->load(std::memory_order_relaxed);
  for (int64_t i = 0; i < p.m; i++) {
    const uint32_t largest = largest_of(activation.row(i), size);
    all_zero &= largest == 0;
    unusual |= is_out_of_range(largest);
  }
  // The results of zeros are zeros.
  if (all_zero || (!unusual && are_usual(p))) return;
  bool needed = false;
  std::vector<float> buffer(p.scale_buffer(1));
  // The least exponents.
  int of_rows = largest_exponent, of_scales = largest_exponent;
  const auto add = [&](int exponent, int& least) {
    least = std::min(least, exponent);
    needed |= std::abs(exponent) > largest_exponent;
    return exponent;
  };
  of_w.resize(p.rows);
  for (int64_t j = 0; j < p.rows; j++)
    of_w[j] = add(exponent_of(scales_of(p, j, 1, buffer.data()), p.blocks), of_scales);
  of_x.resize(p.m);
  for (int64_t i = 0; i < p.m; i++) of_x[i] = add(exponent_of(activation.row(i), size), of_rows);
  if (!needed && of_rows + of_scales >= -2 * usual_exponent) return;
  x.resize(p.m * size);
  scales.resize(p.rows * p.blocks);
  for (int64_t j = 0; j < p.rows; j++) {
    const float* from = scales_of(p, j, 1, buffer.data());
    for (int64_t b = 0; b < p.blocks; b++)
      scales[j * p.blocks + b] = std::ldexp(from[b], -of_w[j]);
  }
  for (int64_t i = 0; i < p.m; i++) {
    const float* from = activation.row(i);
    // The contracted rows of a weight move their exponents to the activation.
    const auto exponent = [&](int64_t k) { return p.contract_rows ? of_w[k] : 0; };
    if (p.contract_rows) {
      bool is_zero = true;
      for (int64_t k = 0; k < size; k++) {
        if (from[k] == 0 || !std::isfinite(from[k])) continue;
        const int of = std::ilogb(from[k]) + exponent(k);
        of_x[i] = is_zero ? of : std::max(of_x[i], of);
        is_zero = false;
      }
    }
    for (int64_t k = 0; k < size; k++)
      x[i * size + k] = std::ldexp(from[k], exponent(k) - of_x[i]);
  }
  scaled.x = x.data();
  scaled.bfloat16_x = false;
  scaled.rounds_x = false;
  scaled.block_sums = nullptr;
  scaled.scales = {scales.data(), nullptr, ScaleType::float32, ScaleType::float32, 0};
}

void InRange::run(const Routine& routine) const {
  std::vector<char> scratch(routine.scratch(scaled));
  routine.prepare(scaled, scratch.data(), 0, scaled.m);
  run_units(routine, scaled, scratch.data(), 0, scaled.contract_rows ? scaled.packed : scaled.rows);
  const int64_t row = scaled.contract_rows ? scaled.columns() : scaled.rows;
  for (int64_t i = 0; i < scaled.m; i++)
    for (int64_t j = 0; j < row; j++) {
      float& y = scaled.y[i * row + j];
      y = std::ldexp(y, of_x[i] + (scaled.contract_rows ? 0 : of_w[j]) + scaled.result_exponent());
    }
}

}  // namespace eqquant
EQQUANT_TARGET_END
