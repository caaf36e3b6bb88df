// The eight tiles of AMX, with 16 rows of 64 bytes each.
//
// With `EQQUANT_EMULATE_TILES`, plain C++ emulates them, to test kernels on CPUs without AMX. An installed library
// never sets it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

constexpr int tile_rows = 16, tile_bytes = 64;

#if defined(EQQUANT_EMULATE_TILES)

namespace emulated {

struct Tile {
  char rows[tile_rows][tile_bytes];
};
inline thread_local Tile tiles[8];

inline void load(int to, const void* from, int64_t stride) {
  for (int i = 0; i < tile_rows; i++)
    std::memcpy(tiles[to].rows[i], static_cast<const char*>(from) + i * stride, tile_bytes);
}
inline void store(int from, void* to, int64_t stride) {
  for (int i = 0; i < tile_rows; i++)
    std::memcpy(static_cast<char*>(to) + i * stride, tiles[from].rows[i], tile_bytes);
}
inline void zero(int tile) { std::memset(&tiles[tile], 0, sizeof(Tile)); }

// Adds products to each lane of a sum. A group of four bytes or two 16-bit numbers of a row of `a` is multiplied by
// a group of the same lane of a row of `b`.
template <class Sum, class A, class B, class Product>
void add_products(int sum, int a, int b, const Product& product) {
  constexpr int lanes = tile_bytes / 4, group = 4 / sizeof(A);
  for (int m = 0; m < tile_rows; m++)
    for (int n = 0; n < lanes; n++) {
      Sum total;
      std::memcpy(&total, tiles[sum].rows[m] + n * 4, 4);
      for (int k = 0; k < lanes; k++)
        for (int i = 0; i < group; i++) {
          A left;
          B right;
          std::memcpy(&left, tiles[a].rows[m] + (k * group + i) * sizeof(A), sizeof(A));
          std::memcpy(&right, tiles[b].rows[k] + (n * group + i) * sizeof(B), sizeof(B));
          total += product(left, right);
        }
      std::memcpy(tiles[sum].rows[m] + n * 4, &total, 4);
    }
}
inline void add_integers(int sum, int a, int b) {
  add_products<uint32_t, int8_t, int8_t>(
      sum, a, b, [](int x, int y) { return static_cast<uint32_t>(x * y); });
}
inline void add_bfloat16(int sum, int a, int b) {
  add_products<float, uint16_t, uint16_t>(sum, a, b, [](uint16_t x, uint16_t y) {
    return from_bfloat16(x) * from_bfloat16(y);
  });
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_dpbssd(sum, a, b) emulated::add_integers(sum, a, b)
#define _tile_dpbf16ps(sum, a, b) emulated::add_bfloat16(sum, a, b)

struct Configured {
  Configured() {}
};

#else

// Configures the tiles of a thread during its lifetime.
struct Configured {
  Configured() {
    // A constant, because some versions of GCC drop writes to a local variable here.
    struct alignas(64) Config {
      uint8_t palette, start, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    };
    static constexpr Config config = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
  }
  ~Configured() { _tile_release(); }
  Configured(const Configured&) = delete;
};

#endif

// Sums of two tiles of the weight by two tiles of the activation, or by the two parts of one tile.
struct alignas(64) Sums {
  int32_t of[2][2][tile_rows][tile_bytes / 4];  // (tile of the weight, tile of the activation, row)
};

// The tiles of an operand: the distances between rows of a tile, from one step to the next, to the second tile, and to
// the low parts.
struct Operand {
  const char* at;
  int64_t stride, step, second, low;
};

// Multiplies tiles 4 and 5 of the weight by tiles 6 and 7 of the activation, and adds the products to tiles 0 to 3.
// `two`: whether the activation has a second tile. `low`: whether the low parts of the weight are multiplied by the
// first tile of the activation, and added to the sums of the second. The weight is the left operand in x @ w.T.
// `ahead` is called for each step.
template <class Number, bool is_left, bool two, bool low, class Ahead>
void multiply(Operand w, Operand x, int64_t steps, Ahead&& ahead, Sums& sums) {
// A macro, because instructions contain the numbers of their tiles.
#define EQQUANT_MULTIPLY(sum, weight, x)                               \
  if constexpr (sizeof(Number) == 2)                                   \
    _tile_dpbf16ps(sum, weight, x); /* Always the left operand. */     \
  else if constexpr (is_left)                                          \
    _tile_dpbssd(sum, weight, x);                                      \
  else                                                                 \
    _tile_dpbssd(sum, x, weight)
  static_assert(is_left || sizeof(Number) == 1);
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (two) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (; steps; steps--, w.at += w.step, x.at += x.step) {
    ahead();
    _tile_loadd(6, x.at, x.stride);
    _tile_loadd(4, w.at, w.stride);
    EQQUANT_MULTIPLY(0, 4, 6);
    _tile_loadd(5, w.at + w.second, w.stride);
    EQQUANT_MULTIPLY(2, 5, 6);
    if constexpr (two) {
      _tile_loadd(7, x.at + x.second, x.stride);
      EQQUANT_MULTIPLY(1, 4, 7);
      EQQUANT_MULTIPLY(3, 5, 7);
    }
    if constexpr (low) {
      _tile_loadd(4, w.at + w.low, w.stride);
      EQQUANT_MULTIPLY(1, 4, 6);
      _tile_loadd(5, w.at + w.low + w.second, w.stride);
      EQQUANT_MULTIPLY(3, 5, 6);
    }
  }
#undef EQQUANT_MULTIPLY
  _tile_stored(0, sums.of[0][0], tile_bytes);
  _tile_stored(2, sums.of[1][0], tile_bytes);
  if constexpr (two) {
    _tile_stored(1, sums.of[0][1], tile_bytes);
    _tile_stored(3, sums.of[1][1], tile_bytes);
  }
}

EQQUANT_END
