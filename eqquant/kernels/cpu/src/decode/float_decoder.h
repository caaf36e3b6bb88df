// Decoding of codes to floats in registers, for any `Vector`.
#pragma once

#include <cstring>
#include <type_traits>

#include "microkernels/vector.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// FP8, in place of a number of bits.
constexpr int float8 = 80;
constexpr int planes_of(int bits) { return bits == float8 ? 1 : 8 / bits; }

// Calls `use` with the number of bits, or `float8`, as a compile-time constant.
template <class Use>
void with_codes(const Product& p, const Use& use) {
  p.exponent ? use(std::integral_constant<int, float8>()) : with_bits(p, use);
}

// The loaded bytes of a row, and their values in one plane.
template <int bits>
struct Decoder {
  using Codes = Vector::Codes;
  using Levels = Vector::Levels;
  static EQQUANT_INLINE Levels levels(const Product& p) { return Vector::levels(p.levels); }
  static EQQUANT_INLINE Levels scaled(Levels levels, Vector::Floats by) {
    return Vector::scaled(levels, by);
  }
  static EQQUANT_INLINE Codes read(Vector::Bytes bytes) { return Vector::codes(bytes); }
  template <int plane>
  static EQQUANT_INLINE Vector::Floats decode(Levels levels, Codes codes) {
    return Vector::template decode<bits, plane>(levels, codes);
  }
};

template <>
struct Decoder<8> {
  using Codes = Vector::Floats;
  struct Levels {};
  static EQQUANT_INLINE Levels levels(const Product&) { return {}; }
  static EQQUANT_INLINE Codes read(Vector::Bytes bytes) { return Vector::integers(bytes); }
  template <int>
  static EQQUANT_INLINE Vector::Floats decode(Levels, Codes codes) {
    return codes;
  }
};

// Decode by float16, which has five exponent bits. With four exponent bits, the exponents are too small
// by eight, and the scales compensate for it.
template <>
struct Decoder<float8> {
  using Codes = Vector::Halves;
  struct Levels {
    Vector::Shift shift;
    Vector::Halves used;
  };
  static EQQUANT_INLINE Levels levels(const Product& p) {
    return {Vector::shift(3 + p.exponent), Vector::halves(p.exponent == 4 ? 0xBFFF : 0xFFFF)};
  }
  static EQQUANT_INLINE Codes read(Vector::Bytes bytes) { return Vector::signed_halves(bytes); }
  template <int>
  static EQQUANT_INLINE Vector::Floats decode(Levels levels, Codes codes) {
    return Vector::from_halves(codes, levels.shift, levels.used);
  }
};

// The application of scales. `row`: one scale per row, at the end. `block`: a scale per block, multiplied into the
// table of levels. `pair`: two blocks share a vector. 8-bit codes have no table, so they and the codes of pairs are
// multiplied by the scale one by one.
enum class Scaling { row, block, pair };
// A table of levels takes the scale of a row for free.
constexpr bool scales_rows(int bits) { return bits >= 8; }
constexpr int scales_at_once(Scaling scaling) { return scaling == Scaling::pair ? 2 : 1; }

template <int bits, Scaling scaling>
struct BlockDecoder {
  using Levels = typename Decoder<bits>::Levels;
  Levels levels;
  Vector::Floats scale;

  EQQUANT_INLINE void begin(Levels plain, const float* of_block) {
    levels = plain;
    if constexpr (scaling == Scaling::pair) scale = Vector::halves(of_block[0], of_block[1]);
    if constexpr (scaling == Scaling::block) {
      scale = Vector::all(*of_block);
      if constexpr (bits < 8) levels = Decoder<bits>::scaled(plain, scale);
    }
  }
  template <int plane>
  EQQUANT_INLINE Vector::Floats decode(typename Decoder<bits>::Codes codes) const {
    const Vector::Floats out = Decoder<bits>::template decode<plane>(levels, codes);
    constexpr bool one_by_one =
        scaling == Scaling::pair || (scaling == Scaling::block && bits >= 8);
    return one_by_one ? Vector::multiply(out, scale) : out;
  }
};

// The size of a whole vector, as a compile-time constant.
struct Whole {
  constexpr operator int() const { return Vector::size; }
};
EQQUANT_INLINE Vector::Bytes bytes_of(const uint8_t* p, Whole) { return Vector::bytes(p); }
EQQUANT_INLINE Vector::Bytes bytes_of(const uint8_t* p, int count) {
  return Vector::bytes(p, count);
}
EQQUANT_INLINE Vector::Floats floats_of(const float* p, Whole) { return Vector::load(p); }
EQQUANT_INLINE Vector::Floats floats_of(const float* p, int count) {
  return Vector::load(p, count);
}
EQQUANT_INLINE void write(float* p, Vector::Floats x, Whole) { Vector::store(p, x); }
EQQUANT_INLINE void write(float* p, Vector::Floats x, int count) {
  Vector::store(p, x, count);
}

EQQUANT_END
