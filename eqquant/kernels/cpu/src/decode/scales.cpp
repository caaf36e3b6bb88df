#define EQQUANT_TARGET_ANY
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cstring>

#include "decode/offsets.h"
#include "decode/scales.h"
#include "runtime/target.h"

EQQUANT_TARGET_BEGIN(EQQUANT_FEATURES)
namespace eqquant {
namespace {

EQQUANT_INLINE float as_float(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Eight float16 numbers as floats, times a factor.
EQQUANT_INLINE void decode_halves(const uint16_t* from, float factor, float* to) {
#if defined(__x86_64__)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(factor)));
#else
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(from));
  vst1q_f32(to, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(halves)), factor));
  vst1q_f32(to + 4, vmulq_n_f32(vcvt_high_f32_f16(halves), factor));
#endif
}

void decode_halves(const uint16_t* from, int64_t count, float factor, float* to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) decode_halves(from + i, factor, to + i);
  if (i == count) return;
  if (count >= 8) return decode_halves(from + count - 8, factor, to + count - 8);
  uint16_t last[8] = {};
  float floats[8];
  std::memcpy(last, from, count * sizeof *from);
  decode_halves(last, factor, floats);
  std::memcpy(to, floats, count * sizeof *to);
}

// E4M3 numbers become float16 numbers, whose exponent is larger by 8. 127 is NaN.
void decode_float8(const uint8_t* __restrict from, int64_t count, float factor, float* to) {
  constexpr int64_t at_once = 64;
  for (int64_t i = 0; i < count; i += at_once) {
    const int64_t some = std::min(at_once, count - i);
    uint16_t halves[at_once] = {};
    for (int64_t k = 0; k < some; k++) {
      const int code = from[i + k], magnitude = code & 127;
      halves[k] = static_cast<uint16_t>((code & 128) << 8 | (magnitude == 127 ? 0x7E00 : magnitude << 7));
    }
    decode_halves(halves, some, 256, to + i);
    for (int64_t k = i; k < i + some; k++) to[k] *= factor;
  }
}

template <class Number, class Value>
EQQUANT_INLINE void decode_each(const void* from, int64_t count, float factor, float* __restrict to,
                                const Value& value) {
  const Number* __restrict numbers = static_cast<const Number*>(from);
  for (int64_t i = 0; i < count; i++) to[i] = value(numbers[i]) * factor;
}

// Decodes numbers, times a factor.
void decode(ScaleType type, const void* all, int64_t begin, int64_t count, float factor, float* to) {
  const char* const from = static_cast<const char*>(all) + begin * size_of(type);
  // The scales are a stream of their own, which is read in short pieces.
  for (int64_t i = 0; i < count * size_of(type); i += 64) __builtin_prefetch(from + i + 2048);
  switch (type) {
    case ScaleType::float32:
      return decode_each<float>(from, count, factor, to, [](float x) { return x; });
    case ScaleType::bfloat16:
      return decode_each<uint16_t>(from, count, factor, to,
                                   [](uint16_t x) { return as_float(uint32_t{x} << 16); });
    case ScaleType::float16:
      return decode_halves(reinterpret_cast<const uint16_t*>(from), count, factor, to);
    case ScaleType::uint8:
      return decode_each<uint8_t>(from, count, factor, to, [](int x) { return float(x); });
    case ScaleType::int8:
      return decode_each<int8_t>(from, count, factor, to, [](int x) { return float(x); });
    case ScaleType::low_nibble:
      return decode_each<uint8_t>(from, count, factor, to, [](int x) { return float(x & 15); });
    case ScaleType::high_nibble:
      return decode_each<uint8_t>(from, count, factor, to, [](int x) { return float(x >> 4); });
    case ScaleType::exponent:  // 255 is NaN.
      return decode_each<uint8_t>(from, count, factor, to, [](uint32_t x) {
        return as_float(x == 255 ? 0x7FC00000 : x << 23);
      });
    case ScaleType::float8:
      return decode_float8(reinterpret_cast<const uint8_t*>(from), count, factor, to);
  }
}

// Eight integers of 8 bits as floats, times a factor.
template <bool is_signed>
EQQUANT_INLINE void decode_eight(const uint8_t* from, float factor, float* to) {
#if defined(__x86_64__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m256i wide = is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
  _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(factor)));
#else
  const uint8x8_t bytes = vld1_u8(from);
  const int16x8_t wide = is_signed ? vmovl_s8(vreinterpret_s8_u8(bytes)) : vreinterpretq_s16_u16(vmovl_u8(bytes));
  vst1q_f32(to, vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), factor));
  vst1q_f32(to + 4, vmulq_n_f32(vcvtq_f32_s32(vmovl_high_s16(wide)), factor));
#endif
}

// Decodes groups of `size` integers, with a factor for each group. Compilers turn plain loops into slow permutations.
template <int size, bool is_signed>
void decode_groups(const uint8_t* from, int64_t groups, const float* factors, float* to) {
  for (int64_t i = 0; i < groups * size; i += 64) __builtin_prefetch(from + i + 2048);
  for (int64_t g = 0; g < groups; g++, from += size, to += size)
    for (int k = 0; k < size; k += 8) decode_eight<is_signed>(from + k, factors[g], to + k);
}

using GroupDecoder = void(const uint8_t* from, int64_t groups, const float* factors, float* to);
// Returns null for other types and sizes.
GroupDecoder* group_decoder(ScaleType type, int64_t size) {
  if (type == ScaleType::uint8)
    return size == 8 ? decode_groups<8, false> : size == 16 ? decode_groups<16, false> : nullptr;
  if (type == ScaleType::int8)
    return size == 8 ? decode_groups<8, true> : size == 16 ? decode_groups<16, true> : nullptr;
  return nullptr;
}

void decode(const Scales& s, int64_t blocks, int64_t row, int64_t begin, int64_t count, float* to) {
  const int64_t first = row * blocks, size = s.outer_blocks, end = begin + count;
  if (!size) return decode(s.type, s.inner, first + begin, count, 1, to);
  GroupDecoder* const of_groups = group_decoder(s.type, size);
  constexpr int64_t at_once = 32;
  float factors[at_once];
  for (int64_t b = begin; b < end;) {
    const int64_t group = b / size, groups = std::min(at_once, (end - 1) / size + 1 - group);
    decode(s.outer_type, s.outer, row * s.outer_count(blocks) + group, groups, 1, factors);
    const int64_t stop = std::min(end, (group + groups) * size);
    if (of_groups && b % size == 0 && stop % size == 0) {
      of_groups(static_cast<const uint8_t*>(s.inner) + first + b, groups, factors, to + b - begin);
      b = stop;
    }
    for (int64_t until; b < stop; b = until) {
      until = std::min(stop, (b / size + 1) * size);
      decode(s.type, s.inner, first + b, until - b, factors[b / size - group], to + b - begin);
    }
  }
}

// Decodes whole rows.
void decode_rows(const Scales& s, int64_t blocks, int64_t row, int64_t rows, float* to) {
  if (s.outer_blocks && s.outer_blocks < blocks) {
    // Without a partial group at the end, several rows are like one long row.
    if (blocks % s.outer_blocks == 0) return decode(s, blocks, row, 0, rows * blocks, to);
    for (int64_t r = 0; r < rows; r++) decode(s, blocks, row + r, 0, blocks, to + r * blocks);
    return;
  }
  decode(s.type, s.inner, row * blocks, rows * blocks, 1, to);
  for (int64_t r = 0; s.outer_blocks && r < rows; r++) {
    float factor;
    decode(s.outer_type, s.outer, row + r, 1, 1, &factor);
    for (int64_t b = 0; b < blocks; b++) to[r * blocks + b] *= factor;
  }
}

}  // namespace

void decode_scales(const Product& p, int64_t row, int64_t begin, int64_t count, float* to) {
  decode(p.scales, p.blocks, row, begin, count, to);
}

void decode_offsets(const Product& p, int64_t row, int64_t begin, int64_t count, float* __restrict to) {
  decode(p.offsets, p.blocks, row, begin, count, to);
  constexpr int64_t at_once = 256;
  float scales[at_once];
  for (int64_t i = 0; p.shift && i < count; i += at_once) {
    const int64_t some = std::min(at_once, count - i);
    decode_scales(p, row, begin + i, some, scales);
    for (int64_t k = 0; k < some; k++) to[i + k] += p.shift * scales[k];
  }
}

void decode_offsets_of_rows(const Product& p, int64_t row, int64_t rows, float* __restrict to) {
  const int64_t count = rows * p.blocks;
  decode_rows(p.offsets, p.blocks, row, rows, to);
  if (!p.shift) return;
  float* const scales = to + count;
  decode_rows(p.scales, p.blocks, row, rows, scales);
  for (int64_t i = 0; i < count; i++) to[i] += p.shift * scales[i];
}

const float* scales_of(const Scales& scales, int64_t blocks, int64_t row, int64_t rows, float* buffer) {
  if (scales.are_floats()) return static_cast<const float*>(scales.inner) + row * blocks;
  decode_rows(scales, blocks, row, rows, buffer);
  return buffer;
}

}  // namespace eqquant
EQQUANT_TARGET_END
