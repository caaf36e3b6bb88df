// int16 x @ w.T, for weights with a scale for each block, in AVX2.
//
// A row of the activation is rounded to int16 with one unit. Sums of products fit into 32 bits, because the norms of
// both operands are limited (`largest_norm`).
#define EQQUANT_TARGET_AVX2
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "microkernels/avx2/few_rows.h"
#include "microkernels/avx2/int16_codes.h"
#include "microkernels/avx2/vector.h"
#include "products/int16_levels.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

// The registers of a row of the activation. A group of rows is (register, row, lane). Each chunk has the registers of
// its values, and then those of corrections.
struct RowOfX {
  int64_t chunks;
  int values, corrections;

  RowOfX(const Product& p, bool has_corrections)
      : chunks(chunks_of(p)), values(registers_of(p.bits)),
        corrections(!has_corrections ? 0 : blocks_of_chunk(p) == 4 ? 2 : 1) {}
  int64_t registers() const { return values + corrections; }
  int64_t size() const { return chunks * registers() * lanes; }
  // The place of the value of byte `j` of a plane, in registers that are `stride` apart.
  int64_t place_of(int64_t j, int plane, int64_t stride) const {
    const int64_t in_chunk = 2 * plane + j / 8 % 2;
    return (j / chunk * registers() + in_chunk) * stride + j % chunk / half * 8 + j % 8;
  }
};

// Rounds eight floats times a factor to int16.
EQQUANT_INLINE __m128i rounded(__m256 x, __m256 factor) {
  const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(x, factor));
  return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}

// Rounds a row of the activation to int16.
void round_row(const Product& p, const RowOfX& of, const float* x, float per_unit, int16_t* row, int64_t stride) {
  if (p.packed % chunk)
    for (int64_t i = 1; i <= of.registers(); i++)
      store(row + (of.chunks * of.registers() - i) * stride, _mm256_setzero_si256());
  const __m256 factor = _mm256_set1_ps(per_unit);
  for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t planar, int64_t length) {
    const int plane = static_cast<int>(planar / p.packed);
    const int64_t byte = planar % p.packed;
    for (int64_t i = 0, count; i < length; i += count) {
      const int64_t j = byte + i;
      count = std::min(8 - j % 8, length - i);
      int16_t* const to = row + of.place_of(j, plane, stride);
      if (count == 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), rounded(_mm256_loadu_ps(x + logical + i), factor));
        continue;
      }
      alignas(16) int16_t some[8];
      const __m256 values = Vector::load(x + logical + i, static_cast<int>(count));
      _mm_store_si128(reinterpret_cast<__m128i*>(some), rounded(values, factor));
      std::memcpy(to, some, count * sizeof(int16_t));
    }
  });
}

// Returns an upper bound for the norms of all lanes of a row.
float norm_of_lanes(const RowOfX& of, const int16_t* row, int64_t stride) {
  __m256i most = _mm256_setzero_si256();
  for (int64_t c = 0; c < of.chunks; c++, row += of.registers() * stride) {
    __m256i sum = _mm256_setzero_si256();
    for (int k = 0; k < of.values; k++) {
      // A quarter, rounded up, because the squares would not fit.
      const __m256i magnitudes = _mm256_abs_epi16(load(row + k * stride));
      const __m256i quarters = _mm256_srli_epi16(_mm256_add_epi16(magnitudes, _mm256_set1_epi16(3)), 2);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(quarters, quarters));
    }
    most = _mm256_max_epu32(most, sum);
  }
  uint32_t sums[8], largest = 0;
  store(sums, most);
  for (uint32_t sum : sums) largest = std::max(largest, sum);
  return 4 * std::sqrt(static_cast<float>(largest));
}

// Writes the product of the first level, that of code 0, with the values of each lane.
void correct_row(const RowOfX& of, int first_level, int16_t* row, int64_t stride) {
  const __m256i level = _mm256_set1_epi16(static_cast<int16_t>(first_level));
  for (int64_t c = 0; c < of.chunks; c++, row += of.registers() * stride)
    for (int part = 0; part < of.corrections; part++) {
      __m256i sum = _mm256_setzero_si256();
      for (int k = part; k < of.values; k += of.corrections)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(level, load(row + k * stride)));
      store(row + (of.values + part) * stride, sum);
    }
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const Int16Levels levels = levels_of(p);
  const RowOfX of(p, multiplies_codes(p, levels));
  // An upper bound for the norm of a lane of the weight.
  const float of_weight = levels.largest * std::sqrt(2.0f * static_cast<float>(of.values));
  const float most = largest_norm * largest_norm / of_weight;
  Activation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* const x = activation.row(i);
    const int64_t in_group = i % most_at_once, stride = group_of(p, i) * lanes;
    int16_t* const row = int16_in(scratch) + (i - in_group) * of.size() + in_group * lanes;
    const float absmax = check_row(p, x);
    units_in(p, of.size(), scratch)[i] = round_to_int16(
        absmax, most, [&](float per_unit) { round_row(p, of, x, per_unit, row, stride); },
        [&] { return norm_of_lanes(of, row, stride); });
    correct_row(of, first_level(p, levels), row, stride);
  }
}

int64_t scratch_size(const Product& p) { return scratch_of(p, RowOfX(p, true).size()); }

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const Int16Levels levels = levels_of(p);
  const bool looks_up = !multiplies_codes(p, levels);
  const float* const units = units_in(p, RowOfX(p, !looks_up).size(), const_cast<char*>(scratch));  // Only read.
  const auto unpacked = [&](auto stored) {
    run_tiles<Int16Codes<8, chunk / decltype(stored)::group, false, decltype(stored)>>(p, levels, scratch, units, begin,
                                                                                       end);
  };
  if (reads_stored(p)) {
    if (p.stored_bits == 5) return unpacked(DenseCodes<5, chunk>());
    return p.run == half ? unpacked(DenseCodes<6, half>()) : unpacked(DenseCodes<6, chunk>());
  }
  with_layout(p, [&](auto bits, auto shared) {
    if constexpr (bits == 2 || bits == 4)
      if (!looks_up) return run_tiles<Int16Codes<bits, shared, false>>(p, levels, scratch, units, begin, end);
    run_tiles<Int16Codes<bits, shared, true>>(p, levels, scratch, units, begin, end);
  });
}

}  // namespace
EQQUANT_END

namespace eqquant {
extern const Routine int16_x_wt_avx2 = {avx2::prepare, avx2::run,     avx2::scratch_size, always<8>,
                                        avx2::why_not_in_chunks, avx2::reads_stored, avx2::adds_offsets};
}  // namespace eqquant
