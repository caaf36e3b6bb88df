// Eight float32 numbers in two registers of NEON, which every 64-bit ARM CPU has.
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "runtime/limits.h"
#include "runtime/target.h"

EQQUANT_BEGIN

struct Vector {
  static constexpr int size = 8;
  // The number of registers for sums beside decoding; the rows of the activation that are multiplied at once with
  // four decoded rows; and the largest number of rows for the GEMV.
  static constexpr int sums = 8, most_at_once = 3, few = limits::float_in_registers_neon;
  // The rows of the activation that x @ w multiplies at once.
  static constexpr int most_of_rows = 4;
  // x @ w decodes the weight once for all rows from this number of rows on.
  static constexpr int rows_for_panels = limits::x_w_panels_neon;
  // The same for x @ w.T. It is smaller for short rows, because their horizontal sums take more of the time.
  static int64_t rows_for_transposed_panels(int64_t columns) {
    return std::clamp(columns / limits::x_wt_columns_neon, limits::x_wt_least_neon, limits::x_wt_most_neon);
  }
  using Four = float32x4_t;
  struct Floats {
    Four low, high;
  };
  using Bytes = uint8x8_t;
  using Codes = uint8x8_t;
  using Halves = int16x8_t;
  using Shift = int16x8_t;
  // Lookups return bytes, so a table has the first byte of each of 16 floats, then the second, and so on.
  struct Levels {
    uint8x16_t bytes[4];
  };

  static EQQUANT_INLINE Floats zero() { return all(0); }
  static EQQUANT_INLINE Floats all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static EQQUANT_INLINE Floats halves(float x, float y) {
    return {vdupq_n_f32(x), vdupq_n_f32(y)};
  }
  static EQQUANT_INLINE Floats load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static EQQUANT_INLINE Floats load(const float* p, int count) {
    float some[size] = {};
    std::memcpy(some, p, count * sizeof(float));
    return load(some);
  }
  static EQQUANT_INLINE void store(float* p, Floats x) {
    vst1q_f32(p, x.low), vst1q_f32(p + 4, x.high);
  }
  static EQQUANT_INLINE void store(float* p, Floats x, int count) {
    float some[size];
    store(some, x);
    std::memcpy(p, some, count * sizeof(float));
  }
  static EQQUANT_INLINE Floats multiply(Floats a, Floats b) {
    return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
  }
  static EQQUANT_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }
  static EQQUANT_INLINE float sum(Floats x) { return vaddvq_f32(vaddq_f32(x.low, x.high)); }
  static EQQUANT_INLINE Four load_four(const float* p) { return vld1q_f32(p); }
  static EQQUANT_INLINE void store(float* p, Four x) { vst1q_f32(p, x); }
  static EQQUANT_INLINE Four multiply(Four a, Four b) { return vmulq_f32(a, b); }
  // Returns the sum of each of four vectors.
  static EQQUANT_INLINE Four sum_four(Floats a, Floats b, Floats c, Floats d) {
    const auto half = [](Floats x) { return vaddq_f32(x.low, x.high); };
    return vpaddq_f32(vpaddq_f32(half(a), half(b)), vpaddq_f32(half(c), half(d)));
  }

  // Transposes eight vectors: first blocks of four by four, then the blocks.
  static EQQUANT_INLINE void turn(Four& a, Four& b, Four& c, Four& d) {
    const Four ab = vzip1q_f32(a, c), cd = vzip1q_f32(b, d);
    const Four ef = vzip2q_f32(a, c), gh = vzip2q_f32(b, d);
    a = vzip1q_f32(ab, cd), b = vzip2q_f32(ab, cd), c = vzip1q_f32(ef, gh), d = vzip2q_f32(ef, gh);
  }
  static EQQUANT_INLINE void transpose(Floats (&x)[size]) {
    for (int i = 0; i < 8; i += 4) {
      turn(x[i].low, x[i + 1].low, x[i + 2].low, x[i + 3].low);
      turn(x[i].high, x[i + 1].high, x[i + 2].high, x[i + 3].high);
    }
    for (int i = 0; i < 4; i++) std::swap(x[i].high, x[i + 4].low);
  }

  static EQQUANT_INLINE Bytes bytes(const uint8_t* p) { return vld1_u8(p); }
  static EQQUANT_INLINE Bytes bytes(const uint8_t* p, int count) {
    uint64_t some = 0;
    std::memcpy(&some, p, count);
    return vcreate_u8(some);
  }
  static EQQUANT_INLINE Codes codes(Bytes bytes) { return bytes; }
  static EQQUANT_INLINE Floats integers(Bytes bytes) {
    const int16x8_t wide = signed_halves(bytes);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
  }
  // float16 numbers, made from bytes by a shift.
  static EQQUANT_INLINE Shift shift(int bits) { return halves(bits); }
  static EQQUANT_INLINE Halves halves(int bits) { return vdupq_n_s16(static_cast<short>(bits)); }
  static EQQUANT_INLINE Halves signed_halves(Bytes bytes) {
    return vmovl_s8(vreinterpret_s8_u8(bytes));
  }
  static EQQUANT_INLINE Floats from_halves(Halves x, Shift shift, Halves used) {
    const float16x8_t floats = vreinterpretq_f16_s16(vandq_s16(vshlq_s16(x, shift), used));
    return {vcvt_f32_f16(vget_low_f16(floats)), vcvt_high_f32_f16(floats)};
  }
  static EQQUANT_INLINE Levels levels(const float* table) {
    const uint8x16x4_t bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(table));
    return {{bytes.val[0], bytes.val[1], bytes.val[2], bytes.val[3]}};
  }
  static EQQUANT_INLINE Levels scaled(Levels levels, Floats by) {
    float table[16];
    vst4q_u8(reinterpret_cast<uint8_t*>(table),
             {levels.bytes[0], levels.bytes[1], levels.bytes[2], levels.bytes[3]});
    store(table, multiply(load(table), by)), store(table + size, multiply(load(table + size), by));
    return Vector::levels(table);
  }
  template <int bits, int plane>
  static EQQUANT_INLINE Floats decode(Levels levels, Codes codes) {
    if constexpr (plane > 0) codes = vshr_n_u8(codes, plane * bits);
    if constexpr ((plane + 1) * bits < 8) codes = vand_u8(codes, vdup_n_u8(15));
    const auto byte = [&](int i) {
      const uint8x8_t found = vqtbl1_u8(levels.bytes[i], codes);
      return vcombine_u8(found, found);
    };
    const uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(byte(0), byte(1)));
    const uint16x8_t high = vreinterpretq_u16_u8(vzip1q_u8(byte(2), byte(3)));
    return {vreinterpretq_f32_u16(vzip1q_u16(low, high)),
            vreinterpretq_f32_u16(vzip2q_u16(low, high))};
  }
};

EQQUANT_END
