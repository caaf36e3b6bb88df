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

EQQUANT_END
