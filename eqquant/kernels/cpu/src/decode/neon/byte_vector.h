// Vectors of bytes that decode codes with a history, in NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "decode/parities.h"
#include "runtime/target.h"

EQQUANT_BEGIN

struct ByteVector {
  static constexpr int64_t size = 16;
  using Bytes = uint8x16_t;
  // The low and the high four bits of each byte.
  struct Input {
    uint8x16_t low, high;
  };

  static EQQUANT_INLINE Bytes load(const uint8_t* at, int64_t count) {
    if (count == size) return vld1q_u8(at);
    uint8_t some[size] = {};
    std::memcpy(some, at, count);
    return vld1q_u8(some);
  }
  template <int zeros>
  static EQQUANT_INLINE Bytes load_after_zeros(const uint8_t* at, int64_t count) {
    return vextq_u8(vdupq_n_u8(0), load(at, count), 16 - zeros);
  }
  static EQQUANT_INLINE void store(uint8_t* to, Bytes x) { vst1q_u8(to, x); }
  static EQQUANT_INLINE void store(uint8_t* to, Bytes x, int64_t count) {
    uint8_t all[size];
    store(all, x);
    std::memcpy(to, all, count);
  }
  static EQQUANT_INLINE Input input(Bytes x) { return {vandq_u8(x, vdupq_n_u8(15)), vshrq_n_u8(x, 4)}; }
  static EQQUANT_INLINE Bytes add(Bytes a, Bytes b) { return veorq_u8(a, b); }
  // Moves odd bits to the even bits below.
  static EQQUANT_INLINE Bytes halve(Bytes x) { return vshrq_n_u8(x, 1); }
  // Interleaves groups of `bytes` bytes of the low, or high, half of a register.
  template <int bytes, bool high>
  static EQQUANT_INLINE Bytes interleave(Bytes a, Bytes b) {
    if constexpr (bytes == 1) return high ? vzip2q_u8(a, b) : vzip1q_u8(a, b);
    const uint16x8_t x = vreinterpretq_u16_u8(a), y = vreinterpretq_u16_u8(b);
    return vreinterpretq_u8_u16(high ? vzip2q_u16(x, y) : vzip1q_u16(x, y));
  }

  // A register has one lane, so interleaving keeps the order.
  template <int planes>
  struct Order {
    EQQUANT_INLINE Bytes place(Bytes x) const { return x; }
  };
  // Bit i of a result is the parity of the bits of a byte that mask i selects. `used` are the bits that any mask
  // selects.
  struct Map {
    uint8x16_t of_low, of_high;
    Map() = default;
    explicit Map(const uint8_t* masks) {
      uint8_t low[16], high[16];
      for (int value = 0; value < 16; value++)
        low[value] = parities(masks, value), high[value] = parities(masks, value << 4);
      of_low = vld1q_u8(low), of_high = vld1q_u8(high);
    }
    template <int used>
    EQQUANT_INLINE Bytes of(const Input& x) const {
      if constexpr (used < 16) return vqtbl1q_u8(of_low, x.low);
      if constexpr (used % 16 == 0) return vqtbl1q_u8(of_high, x.high);
      return add(vqtbl1q_u8(of_low, x.low), vqtbl1q_u8(of_high, x.high));
    }
  };
  static constexpr bool indices_have_signs = false;
  template <int count>
  struct Table {
    uint8x16x4_t low, high;
    explicit Table(const uint8_t* levels) : low(vld1q_u8_x4(levels)), high(vld1q_u8_x4(levels + 64)) {}
    EQQUANT_INLINE Bytes look_up(Bytes index) const {
      const uint8x16_t of_low = vqtbl4q_u8(low, index);  // Zero for other indices.
      return count > 64 ? vqtbx4q_u8(of_low, high, vsubq_u8(index, vdupq_n_u8(64))) : of_low;
    }
  };
};

EQQUANT_END
