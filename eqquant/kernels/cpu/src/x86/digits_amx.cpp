// Products in int8 of more rows: AMX.
//
// The digits of sixteen rows of the activation are a tile as they are, and four bytes of each
// of sixteen rows of the weight are another one, as they are arranged for VNNI.
#include <immintrin.h>

#include <cmath>
#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8,avx2,fma")
namespace eqquant {
namespace amx {

#include "arranged_rows.h"

#include "integers_vnni.h"

#include "tiles_amx.h"

struct Panel : Arranged {
  static constexpr int most_digits = 2 * tile_rows;
  static constexpr int64_t few_digits = 0, spare_digits = tile_rows - 1;
  Configured tiles;

  using Arranged::Arranged;
  static bool pays(int64_t, int64_t) { return true; }

  // Tiles 0 to 3 are sums, 4 and 5 the digits, 6 and 7 the weight, with which one tile of
  // digits is multiplied up to four times, and two of them are twice.
  template <bool two, int wide>
  static void multiply(const Vector* w, int64_t w_stride, const int8_t* x, int64_t stride,
                       int64_t length, uint32_t* totals) {
    static_assert(wide <= (two ? 2 : 4));
    _tile_zero(0);
    if constexpr (wide > 1) _tile_zero(1);
    if constexpr (two || wide > 2) _tile_zero(2);
    if constexpr (two || wide > 3) _tile_zero(3);
    const int64_t step = w_stride * sizeof(Vector);
    for (int64_t j = 0; j < length; j += tile_bytes, w += tile_rows * w_stride) {
      _tile_loadd(4, x + j, stride);
      if constexpr (two) _tile_loadd(5, x + tile_rows * stride + j, stride);
      _tile_loadd(6, w, step);
      _tile_dpbsud(0, 4, 6);
      if constexpr (two) _tile_dpbsud(2, 5, 6);
      if constexpr (wide > 1) {
        _tile_loadd(7, w + 1, step);
        _tile_dpbsud(1, 4, 7);
        if constexpr (two) _tile_dpbsud(3, 5, 7);
      }
      if constexpr (wide > 2) {
        _tile_loadd(6, w + 2, step);
        _tile_dpbsud(2, 4, 6);
      }
      if constexpr (wide > 3) {
        _tile_loadd(7, w + 3, step);
        _tile_dpbsud(3, 4, 7);
      }
    }
    uint32_t* const more = totals + (two ? tile_rows * w_stride * lanes : 2 * lanes);
    _tile_stored(0, totals, step);
    if constexpr (wide > 1) _tile_stored(1, totals + lanes, step);
    if constexpr (two || wide > 2) _tile_stored(2, more, step);
    if constexpr ((two && wide > 1) || wide > 3) _tile_stored(3, more + lanes, step);
  }

  // By `count` rows of digits; totals are (digits, row).
  void multiply(int vectors, const int8_t* x, int64_t stride, int64_t length, int count,
                uint32_t* totals) const {
    const auto from = [&](auto two, auto wide, int v) {
      multiply<two, wide>(panel.data() + v, vectors, x, stride, length, totals + v * lanes);
    };
    using std::integral_constant;
    const std::true_type both;
    const std::false_type one;
    if (count > tile_rows) {
      int v = 0;
      for (; v + 2 <= vectors; v += 2) from(both, integral_constant<int, 2>(), v);
      if (v < vectors) from(both, integral_constant<int, 1>(), v);
      return;
    }
    switch (vectors) {
      case 1: return from(one, integral_constant<int, 1>(), 0);
      case 2: return from(one, integral_constant<int, 2>(), 0);
      case 3: return from(one, integral_constant<int, 3>(), 0);
      default: return from(one, integral_constant<int, 4>(), 0);
    }
  }
};
using DecodedRows = Panel;

#include "digits.h"

}  // namespace amx

extern const Routine digits_amx = amx::digits_routine;

}  // namespace eqquant
EQQUANT_TARGET_END
