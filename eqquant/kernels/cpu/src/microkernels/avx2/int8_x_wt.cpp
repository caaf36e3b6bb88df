// int8 x @ w.T, for weights with a scale for each block, in AVX2.
//
// The activation is rounded to int8 with a unit for each block of the weight, at most 32 bytes of its codes.
#define EQQUANT_TARGET_AVX2
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "microkernels/avx2/few_rows.h"
#include "microkernels/avx2/int8_codes.h"
#include "microkernels/avx2/vector.h"
#include "products/planes.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

constexpr int64_t step = Vector::size;  // Values of the activation that are read at once.

int64_t row_size(const Product& p) { return chunks_of(p) * ChunkOfX{p.planes()}.registers() * of_register; }

// Calls `use(values, plane)` for the values of each plane from a byte on.
template <class Use>
EQQUANT_INLINE void read(const Planes& x, int64_t byte, const Use& use) {
  const auto count = static_cast<int>(x.count(byte));
  for (int plane = 0; plane < x.planes; plane++) {
    const float* const from = x.at(byte, plane);
    use(count == step ? Vector::load(from) : Vector::load(from, count), plane);
  }
}

// Returns the largest magnitude. Compares bits: NaN is the largest.
EQQUANT_INLINE float largest_of(__m256i bits) {
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4E));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xB1));
  return _mm_cvtss_f32(_mm_castsi128_ps(most));
}

// Rounds the values of a chunk of row `i` of `count`. `group` bytes of codes share a unit.
void round_chunk(const Planes& x, int64_t byte, int64_t group, const Units* common, int zero, int64_t count,
                 int64_t i, char* to) {
  const ChunkOfX of = {x.planes};
  const auto place = [&](int k) { return to + (k * count + i) * of_register; };
  alignas(32) float units[8];
  for (int64_t begin = 0; begin < chunk; begin += group) {
    __m256i most = _mm256_setzero_si256();
    for (int64_t j = begin; !common && j < begin + group; j += step)
      read(x, byte + j, [&](__m256 values, int) {
        const __m256i magnitudes = _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7FFFFFFF));
        most = _mm256_max_epi32(most, magnitudes);
      });
    const Units of_group = common ? *common : Units(largest_of(most), largest_int8);
    for (int64_t j = begin; j < begin + group; j += 4) units[j / 4] = of_group.unit;
    const __m256 factor = _mm256_set1_ps(of_group.per_unit);
    for (int64_t j = begin; j < begin + group; j += step)
      read(x, byte + j, [&](__m256 values, int plane) {
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(values, factor));
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(place(plane) + j), _mm_packs_epi16(words, words));
      });
  }
  __m256i correction = _mm256_setzero_si256();
  const __m256i level = _mm256_set1_epi8(static_cast<char>(zero));
  for (int plane = 0; plane < x.planes; plane++)
    correction = _mm256_sub_epi16(correction, _mm256_maddubs_epi16(level, load(place(plane))));
  store(place(of.correction()), _mm256_madd_epi16(correction, _mm256_set1_epi16(1)));
  store(place(of.unit()), _mm256_castps_si256(_mm256_load_ps(units)));
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const int64_t group = p.blocks > 1 ? std::min(chunk, p.block_bytes()) : chunk;
  const int zero = UnsignedLevels(p).zero;
  const int64_t chunks = chunks_of(p), of_chunk = row_size(p) / chunks;
  Activation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* const row = activation.row(i);
    const Units common(check_row(p, row), largest_int8);
    const Planes x(p, row, step);
    const int64_t in_group = i % most_at_once, count = group_of(p, i);
    char* const to = scratch + (i - in_group) * row_size(p);
    for (int64_t c = 0; c < chunks; c++)
      round_chunk(x, c * chunk, group, p.rounds_x ? &common : nullptr, zero, count, in_group,
                  to + c * count * of_chunk);
  }
}

int64_t scratch_size(const Product& p) { return p.m * row_size(p); }

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const UnsignedLevels levels(p);
  with_layout(p, [&](auto bits, auto shared) {
    if constexpr (bits == 4)
      if (levels.are_codes)
        return run_tiles<Int8Codes<bits, shared, false>>(p, levels, scratch, nullptr, begin, end);
    if constexpr (bits < 8) run_tiles<Int8Codes<bits, shared, true>>(p, levels, scratch, nullptr, begin, end);
  });
}

const char* why_not(const Product& p) {
  if (const char* reason = why_not_in_chunks(p)) return reason;
  return has_small_levels(p) ? nullptr : "levels must be small integers times a number";
}

}  // namespace
EQQUANT_END

namespace eqquant {
extern const Routine int8_x_wt_avx2 = {avx2::prepare, avx2::run, avx2::scratch_size,
                                       always<8>,     avx2::why_not,  nullptr, avx2::adds_offsets};
}  // namespace eqquant
