// What a product is, and the routines that compute it. Nothing here knows of XLA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace eqquant {

// `y = x @ w.T` for a quantized `w` of `rows` x `columns`, or `y = x @ w`.
//
// A row of `codes` is `packed` bytes. Byte j holds one code of each of `planes` planes,
// lowest bits first. In *plane order* (plane, byte) the codes of a row are where a shift
// leaves them, so that is the order in which a row is used; the activation is brought
// into it, or the result out of it. In logical order a run of `run` bytes of one plane is
// followed by the same run of the next.
struct Product {
  const void* x;          // (m, columns), or (m, rows) where rows are contracted
  const uint8_t* codes;   // (rows, packed), or of `three_bits`
  const void* scales;     // (rows, blocks)
  float* y;               // (m, rows), or (m, columns)
  int64_t m, rows, packed, blocks;
  int bits;               // of a code: 1, 2, 4 or 8
  int64_t run;
  // Whether `codes` are of three bits, and everything else is for the four that they are
  // unpacked to. See unpack.h.
  bool three_bits;
  bool bfloat16_x, bfloat16_scales;
  bool contract_rows;
  // What codes stand for, for each of the 16 values of four bits; narrower codes repeat.
  // Codes of 8 bits stand for themselves: they are signed integers, or floats with so many
  // bits of exponent.
  const float* levels;
  int exponent;
  int digits;             // or parts, in which an activation is split: 1 or 2
  // What levels are multiples of, about; 0 for a part of the largest.
  float level_unit;

  int planes() const { return 8 / bits; }
  int64_t columns() const { return packed * planes(); }
  int64_t block_bytes() const { return packed / blocks; }
  // Of a row of the activation.
  int64_t contracted() const { return contract_rows ? rows : columns(); }
  int64_t x_size() const { return bfloat16_x ? 2 : 4; }
  int64_t scale_size() const { return bfloat16_scales ? 2 : 4; }
  // The codes of a row as they are stored, and how many bytes these are.
  int64_t stored_bytes() const { return three_bits ? packed / 4 * 3 : packed; }
  const uint8_t* stored(int64_t row) const { return codes + row * stored_bytes(); }
  // Whether a cache may hold the codes. What is read from memory is read fastest from one end to
  // the other, row by row; from a cache some rows at once.
  bool is_small() const { return rows * packed <= 1 << 24; }
  // Whether so many bytes, read at once, hold whole blocks (of whole lanes of 32 bits), or
  // are part of one.
  bool fits_in_lanes(int64_t bytes) const {
    const int64_t block = block_bytes();
    return blocks == 1 || block % bytes == 0 || (bytes % block == 0 && block % 4 == 0);
  }
};

// Asks for codes long before they are used, where they are read one after the other. Into
// the second level of cache: more requests wait there at a time than in the first.
// Inlined whatever happens: GCC takes a call of what only prefetches for one without effect,
// and drops it.
inline __attribute__((always_inline)) void prefetch(const uint8_t* codes) {
  __builtin_prefetch(codes + (1 << 15), 0, 2);
}

// Where codes are one stream: into the first level, which has room for as little.
inline __attribute__((always_inline)) void prefetch_near(const uint8_t* codes) {
  __builtin_prefetch(codes + (1 << 12), 0, 3);
}

// A way to compute products: `prepare` for each row of the activation, then `run` for
// each unit of the result (rows of the weight, or bytes of all rows where those are
// contracted). Both may be called for disjoint ranges by several threads.
struct Routine {
  void (*prepare)(const Product&, char* scratch, int64_t begin, int64_t end);
  void (*run)(const Product&, const char* scratch, int64_t begin, int64_t end);
  // Bytes of scratch that `prepare` fills and `run` reads.
  int64_t (*scratch)(const Product&);
  // Units that a thread takes at least, and of which it takes a multiple.
  int64_t (*grain)(const Product&);
  // What keeps it from a product, if something may.
  const char* (*why_not)(const Product&) = nullptr;
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

// Calls `use` with the bits of a code as a constant.
template <class Use>
inline void with_bits(const Product& p, const Use& use) {
  switch (p.bits) {
    case 1: return use(std::integral_constant<int, 1>());
    case 2: return use(std::integral_constant<int, 2>());
    case 4: return use(std::integral_constant<int, 4>());
    case 8: return use(std::integral_constant<int, 8>());
  }
}

inline void from_bfloat16(const void* from, int64_t begin, int64_t size, float* to) {
  const uint16_t* bits = static_cast<const uint16_t*>(from) + begin;
  for (int64_t i = 0; i < size; i++) to[i] = from_bfloat16(bits[i]);
}

// The scales of some rows as floats: where they are, or else converted into `buffer`.
inline const float* scales_of(const Product& p, int64_t row, int64_t rows, float* buffer) {
  if (!p.bfloat16_scales) return static_cast<const float*>(p.scales) + row * p.blocks;
  from_bfloat16(p.scales, row * p.blocks, rows * p.blocks, buffer);
  return buffer;
}

// Rows of the activation as floats, likewise.
class Activation {
  const Product& p;
  std::vector<float> buffer;

 public:
  explicit Activation(const Product& p) : p(p), buffer(p.bfloat16_x ? p.contracted() : 0) {}
  const float* row(int64_t i) {
    const int64_t size = p.contracted();
    if (!p.bfloat16_x) return static_cast<const float*>(p.x) + i * size;
    from_bfloat16(p.x, i * size, size, buffer.data());
    return buffer.data();
  }
};

// Calls `use(logical, planar, length)` for each run of a row in both orders.
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
