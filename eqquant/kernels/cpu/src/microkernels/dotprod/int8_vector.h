// 16 bytes in NEON with dotprod.
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "runtime/target.h"

EQQUANT_BEGIN

struct Int8Vector {
  static constexpr int size = 16;
  // The offset that is added to signed bytes: zero, because both operands are signed.
  static constexpr int middle = 0;
  using Bytes = uint8x16_t;
  using Sums = int32x4_t;

  static EQQUANT_INLINE Bytes load(const void* p) {
    return vld1q_u8(static_cast<const uint8_t*>(p));
  }
  static EQQUANT_INLINE Bytes load(const void* p, int64_t count) {
    if (count >= size) return load(p);
    uint8_t some[size] = {};
    std::memcpy(some, p, count);
    return load(some);
  }
  static EQQUANT_INLINE void store(void* p, Bytes x) { vst1q_u8(static_cast<uint8_t*>(p), x); }
  static EQQUANT_INLINE void store(void* p, Bytes x, int64_t count) {
    if (count >= size) return store(p, x);
    uint8_t some[size];
    store(some, x);
    std::memcpy(p, some, count);
  }
  static EQQUANT_INLINE Bytes table(const uint8_t* of_codes) { return vld1q_u8(of_codes); }
  static EQQUANT_INLINE Bytes codes_from(Bytes codes, int bit, int bits) {
    const Bytes shifted = vshlq_u8(codes, vdupq_n_s8(static_cast<int8_t>(-bit)));
    return vandq_u8(shifted, vdupq_n_u8(static_cast<uint8_t>((1 << bits) - 1)));
  }
  template <int bits, int plane>
  static EQQUANT_INLINE Bytes decode(Bytes table, Bytes codes) {
    if constexpr (bits == 8) return codes;
    return vqtbl1q_u8(table, codes_from(codes, plane * bits, bits));
  }

  static EQQUANT_INLINE Sums zero() { return vdupq_n_s32(0); }
  static EQQUANT_INLINE Sums add(Sums sum, Bytes weight, Bytes x) {
    return vdotq_s32(sum, vreinterpretq_s8_u8(weight), vreinterpretq_s8_u8(x));
  }
  static EQQUANT_INLINE Sums add_in_tile(Sums sum, Bytes weight, Bytes x) {
    return add(sum, weight, x);
  }
  static EQQUANT_INLINE uint32_t total(Sums x) { return static_cast<uint32_t>(vaddvq_s32(x)); }
  // Stores the total of each of four registers.
  static EQQUANT_INLINE void store_totals(uint32_t* to, const Sums (&x)[4]) {
    const Sums all = vpaddq_s32(vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3]));
    vst1q_u32(to, vreinterpretq_u32_s32(all));
  }

  // Compares bits: their order equals the order of magnitudes, and NaN is the largest.
  struct Sixteen {
    float32x4_t x[4];
  };
  static EQQUANT_INLINE Sixteen load_sixteen(const float* p) {
    return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
  }
  // Narrows integers that fit into bytes.
  static EQQUANT_INLINE Bytes narrow(const int32x4_t* whole) {
    const int16x8_t low = vcombine_s16(vmovn_s32(whole[0]), vmovn_s32(whole[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(whole[2]), vmovn_s32(whole[3]));
    return vreinterpretq_u8_s8(vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  }
  static EQQUANT_INLINE Bytes rounded(Sixteen of, float by) {
    int32x4_t whole[4];
    for (int i = 0; i < 4; i++) whole[i] = vcvtnq_s32_f32(vmulq_n_f32(of.x[i], by));
    return narrow(whole);
  }

  // Splits a run of the activation into int8 parts. Without an offset, sums are not needed.
  template <int parts>
  static void split(const float* x, int64_t size, float per_unit, int8_t* high, int8_t* low,
                    Sums*) {
    constexpr float low_per_high = 254;
    for (int64_t i = 0; i < size; i += 16) {
      const int64_t some = std::min<int64_t>(16, size - i);
      float last[16] = {};
      if (some < 16) std::memcpy(last, x + i, some * sizeof(float));
      const Sixteen of = load_sixteen(some < 16 ? last : x + i);
      int32x4_t whole[4], part[4];
      for (int k = 0; k < 4; k++) {
        const float32x4_t scaled = vmulq_n_f32(of.x[k], per_unit);
        whole[k] = vcvtnq_s32_f32(scaled);
        const float32x4_t rest = vsubq_f32(scaled, vcvtq_f32_s32(whole[k]));
        part[k] = vcvtnq_s32_f32(vmulq_n_f32(rest, low_per_high));
      }
      store(high + i, narrow(whole), some);
      if constexpr (parts == 2) store(low + i, narrow(part), some);
    }
  }

  // Writes the levels of codes, times a factor, as bytes. Planes are `stride` apart.
  template <int bits>
  static EQQUANT_INLINE void round_block(const float* levels, float factor, int /* power */, int64_t bytes,
                                         const uint8_t* codes, uint8_t* to, int64_t stride) {
    const Bytes table = rounded(load_sixteen(levels), factor);
    for (int64_t j = 0; j < bytes; j += 16) {
      const int64_t some = bytes - j;
      const Bytes of = load(codes + j, some);
      if constexpr (bits == 8) {
        float values[16];
        for (int i = 0; i < 16; i++) values[i] = static_cast<int8_t>(of[i]);
        store(to + j, rounded(load_sixteen(values), factor), some);
      } else {
        for (int plane = 0; plane < 8 / bits; plane++)
          store(to + plane * stride + j, vqtbl1q_u8(table, codes_from(of, plane * bits, bits)),
                some);
      }
    }
  }
};

EQQUANT_END
