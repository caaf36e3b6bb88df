// The description of a product, and its routines, independent of XLA.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime/limits.h"

namespace eqquant {

// Kernels are accurate if the largest values of both rows are between 2^-50 and 2^50. One row may also be between
// 2^-64 and 2^64 if the other is near 1.
constexpr int largest_exponent = 64, usual_exponent = 50;
// True if these bits of a largest magnitude are outside of 2^-50 to 2^50. Zero, infinity and NaN are not.
inline bool is_out_of_range(uint32_t magnitude) {
  constexpr uint32_t least = uint32_t{127 - usual_exponent} << 23, most = uint32_t{128 + usual_exponent} << 23;
  return magnitude - least >= most - least && magnitude - 1 < (uint32_t{255} << 23) - 1;
}

// The type of stored scales. `low_nibble` and `high_nibble` are half a byte, as GGUF's Q2_K stores scales and
// minima; `exponent` is a biased power of two (E8M0), and `float8` is E4M3.
enum class ScaleType : int {
  float32, bfloat16, float16, uint8, int8, low_nibble, high_nibble, exponent, float8
};
inline int64_t size_of(ScaleType type) {
  return type == ScaleType::float32 ? 4 : type <= ScaleType::float16 ? 2 : 1;
}

// How far ahead to prefetch codes that are read sequentially.
constexpr int64_t far_ahead = 1 << 15, near_ahead = 1 << 12;

// Numbers of blocks as they are stored, one for each block of each row. If `outer_blocks` is not 0, a number is the
// product of one of `inner` and, for each `outer_blocks` blocks of a row, one of `outer`. decode/scales.h decodes
// them.
struct Scales {
  const void* inner;  // (rows, blocks)
  const void* outer;  // (rows, outer_count), or null
  ScaleType type, outer_type;
  int64_t outer_blocks;

  int64_t outer_count(int64_t blocks) const {
    return outer_blocks ? (blocks + outer_blocks - 1) / outer_blocks : 0;
  }
  bool are_floats() const { return type == ScaleType::float32 && !outer_blocks; }
  // The numbers from a row on.
  Scales from(int64_t row, int64_t blocks) const {
    Scales some = *this;
    some.inner = static_cast<const char*>(inner) + row * blocks * size_of(type);
    if (outer_blocks)
      some.outer = static_cast<const char*>(outer) + row * outer_count(blocks) * size_of(outer_type);
    return some;
  }
};

struct LinearTable;  // See decode/states.h.
using StatesUnpacker = void(const struct Product& p, const uint8_t* from, int64_t groups, uint8_t* to);

// `y = x @ w.T` for a quantized `w` of `rows` x `columns`, or `y = x @ w`.
//
// A row of `codes` has `packed` bytes. Byte j holds one code of each of `planes` planes, lowest bits first.
// Shifts leave the codes of a row in *plane order* (plane, byte), so rows are used in that order. The
// activation is permuted to it, or the result is permuted from it. In logical order, a run of `run` bytes
// of one plane is followed by the same run of the next plane.
struct Product {
  const void* x;          // (m, columns), or (m, rows) where rows are contracted
  const uint8_t* codes;   // (rows, stored_bytes)
  Scales scales;
  // Numbers that are added to the values of a block, and a multiple of its scale that is added as well. Most routines
  // ignore them: products/offsets.h adds their part of the product. `offsets.inner` is null if there are none.
  Scales offsets;
  float shift;
  // If the routine adds the part of the offsets itself: the sums of the activation over each block, (m, blocks). Rows
  // are padded with zeros to whole registers. Otherwise null.
  const float* block_sums;
  // The end of the codes that the current thread reads, or null; and the distance from there to what it reads next.
  const uint8_t* own_end;
  int64_t to_next;
  bool rounds_x;  // Each row of the activation is rounded to int8.
  float* y;               // (m, rows), or (m, columns)
  int64_t m, rows, packed, blocks;
  int bits;               // of a code: 1, 2, 4 or 8
  int64_t run;
  // The bits of a stored code. Codes of 3 bits are unpacked to 4 bits, and codes of 5 and 6 bits to int8
  // (decode/unpack.h). So are codes of 2 bits in blocks of 16, which would be shorter than a register. All
  // other fields describe the unpacked codes.
  int stored_bits;
  // True if a level depends on the codes before (decode/states.h). These codes are unpacked to int8 levels:
  // `linear_table` has the levels.
  bool has_history;
  const LinearTable* linear_table;
  StatesUnpacker* unpack_states;
  bool bfloat16_x;
  bool contract_rows;
  // The levels of all 16 four-bit codes; narrower codes repeat. 8-bit codes are signed integers, or floats
  // with this number of exponent bits.
  const float* levels;
  int exponent;
  int parts;              // 1 or 2: the number of int8 parts of a value of the activation
  // The approximate common divisor of levels; 0 for a fraction of the largest level.
  float level_unit;
  // Set if results may be inaccurate because of very large or very small numbers (range.h).
  std::atomic<bool>* unusual;

  int planes() const { return 8 / bits; }
  // Routines decode floats with four exponent bits too small by two to this power (decode/float_decoder.h). So are
  // their results, which the handler multiplies by it.
  int result_exponent() const { return exponent == 4 ? 8 : 0; }
  int64_t columns() const { return packed * planes(); }
  int64_t block_bytes() const { return packed / blocks; }
  // True if few results are checked for numbers out of range, because that takes less time than operands.
  bool checks_results() const { return m <= blocks; }
  // Values per row of the activation.
  int64_t contracted() const { return contract_rows ? rows : columns(); }
  int64_t x_size() const { return bfloat16_x ? 2 : 4; }
  // True if the activation is rounded to int8 when it is read. The int8 kernels round it themselves.
  bool rounds_before() const { return rounds_x && parts != 1; }
  // The number of floats that decoded scales of `count` rows take; 0 if scales are floats already.
  int64_t scale_buffer(int64_t count) const {
    return scales.are_floats() ? 0 : count * blocks;
  }
  bool is_unpacked() const { return stored_bits != bits; }
  // The largest magnitude of integer levels.
  int largest_integer() const { return has_history ? 127 : 1 << (stored_bits - 1); }
  int64_t stored_bytes() const { return packed * stored_bits / bits; }
  // The distance of codes to prefetch. At the end of its codes, a thread prefetches what it reads next.
  int64_t far_from(const uint8_t* of) const { return far_ahead + (of + far_ahead < own_end ? 0 : to_next); }
  // The stored codes of a row.
  const uint8_t* stored(int64_t row) const { return codes + row * stored_bytes(); }
  // True if the codes may be in a cache. From memory, sequential reads of one row at a time are fastest; from
  // a cache, several rows at once.
  bool is_small() const { return rows * packed <= limits::bytes_in_cache; }
  // True if this number of bytes, loaded at once, holds whole blocks (of whole 32-bit lanes) or a part of one.
  bool fits_in_lanes(int64_t bytes) const {
    const int64_t block = block_bytes();
    return blocks == 1 || block % bytes == 0 || (bytes % block == 0 && block % 4 == 0);
  }
};

// Prefetches codes long before their use into the second-level cache, which allows more outstanding requests than the
// first. `far` is `Product::far_from` of the codes, or of codes shortly before. Always inlined: GCC treats a call to a
// function that only prefetches as free of side effects, and removes it.
inline __attribute__((always_inline)) void prefetch(const uint8_t* codes, int64_t far) {
  __builtin_prefetch(codes + far, 0, 2);
}

// Prefetches into the first-level cache.
inline __attribute__((always_inline)) void prefetch_near(const uint8_t* codes) {
  __builtin_prefetch(codes + near_ahead, 0, 3);
}

// One way to compute products: `prepare` for each row of the activation, which calls `check_row`, then `run` for each
// unit of the result (rows of the weight, or bytes of all rows in x @ w). Several threads may call both on disjoint
// ranges.
struct Routine {
  void (*prepare)(const Product&, char* scratch, int64_t begin, int64_t end);
  void (*run)(const Product&, const char* scratch, int64_t begin, int64_t end);
  // Bytes of scratch that `prepare` writes and `run` reads.
  int64_t (*scratch)(const Product&);
  // The smallest number of units per thread; pieces are multiples of it.
  int64_t (*grain)(const Product&);
  // The reason against a product, or null.
  const char* (*why_not)(const Product&) = nullptr;
  // True if `run` reads codes as they are stored. Otherwise they are unpacked before (decode/unpack.h).
  bool (*reads_stored)(const Product&) = nullptr;
  // True if `run` adds the part of the offsets of `x @ w.T`, if there are some.
  bool (*adds_offsets)(const Product&) = nullptr;
};

template <int64_t grain>
inline int64_t always(const Product&) {
  return grain;
}

inline float from_bfloat16(uint16_t bits) {
  uint32_t wide = uint32_t{bits} << 16;
  float out;
  std::memcpy(&out, &wide, sizeof out);
  return out;
}

// Calls `use` with the number of bits as a compile-time constant.
template <class Use>
inline void with_bits(const Product& p, const Use& use) {
  switch (p.bits) {
    case 1: return use(std::integral_constant<int, 1>());
    case 2: return use(std::integral_constant<int, 2>());
    case 4: return use(std::integral_constant<int, 4>());
    case 8: return use(std::integral_constant<int, 8>());
  }
}

// Calls `use` with the compile-time constant `n`, from 1 to `most`.
template <int most, class Use>
inline void with_constant(int n, const Use& use) {
  if (n == most)
    use(std::integral_constant<int, most>());
  else if constexpr (most > 1)
    with_constant<most - 1>(n, use);
}

inline void from_bfloat16(const void* from, int64_t begin, int64_t size, float* to) {
  const uint16_t* bits = static_cast<const uint16_t*>(from) + begin;
  for (int64_t i = 0; i < size; i++) to[i] = from_bfloat16(bits[i]);
}

// Calls `use(logical, planar, length)` with the position of each run of a row in both orders.
template <class Use>
inline void for_each_run(const Product& p, int64_t begin, int64_t end, Use use) {
  for (int64_t j = begin; j < end;) {
    const int64_t offset = j % p.run, length = std::min(p.run - offset, end - j);
    for (int plane = 0; plane < p.planes(); plane++) {
      const int64_t logical = (j / p.run * p.planes() + plane) * p.run + offset;
      use(logical, plane * p.packed + j, length);
    }
    j += length;
  }
}

}  // namespace eqquant
