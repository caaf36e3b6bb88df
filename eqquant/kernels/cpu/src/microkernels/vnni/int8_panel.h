// Decoded int8 rows of the weight by int8 rows of the activation, in AVX-512 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "microkernels/avx512/transpose.h"
#include "microkernels/vnni/int8_vector.h"
#include "runtime/limits.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

// The layout of a panel is (four bytes of a row, vector, row of the vector). Each lane of a register then holds
// the sum of one result, so no horizontal sums are needed.
struct Panel {
  static constexpr int lanes = 16, most_vectors = 4, most_at_once = 6;
  static constexpr int64_t short_row = limits::int8_short_row;
  // Bytes of the activation per pass. They are read rarely, so they may stay in a cache that cores share.
  static constexpr int64_t cached_bytes = 1 << 22;
  struct alignas(64) Vector {
    int32_t fours[lanes];
  };
  std::vector<Vector> panel;

  explicit Panel(int64_t bytes) : panel(bytes / 64) {}

  // True if the panel pays for its transpose, which replaces horizontal sums.
  static bool pays(int64_t count, int64_t length) {
    return limits::int8_transposed * count >= length;
  }

  // The number of vectors, so that the second-level cache holds them and the activation.
  static int vectors_for(int64_t length) {
    constexpr int64_t most = 3 << 17;
    return length * 64 <= most ? 4 : length * 32 <= most ? 2 : 1;
  }

  // Copies sixteen consecutive rows of `length` bytes.
  void take(const uint8_t* rows, int64_t length, int vector, int vectors) {
    Vector* to = panel.data() + vector;
    for (int64_t j = 0; j < length; j += 64, to += 16 * vectors) {
      __m512i x[16];
      for (int i = 0; i < 16; i++) x[i] = _mm512_load_si512(rows + i * length + j);
      transpose(x);
      for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * vectors, x[i]);
    }
  }

  template <int vectors, int count>
  void multiply(const int8_t* x, int64_t stride, int64_t length, uint32_t* totals, int64_t begin) const {
    __m512i sums[count][vectors];
    for (int i = 0; i < count; i++)
      for (int v = 0; v < vectors; v++) sums[i][v] = _mm512_setzero_si512();
    const Vector* w = panel.data() + begin / 4 * vectors;
    int64_t j = 0;
    do {  // At least one iteration: a loop that may be empty compiles to slower code.
      __m512i weight[vectors];
      for (int v = 0; v < vectors; v++) weight[v] = _mm512_load_si512(w + v);
      for (int i = 0; i < count; i++) {
        int32_t four;
        std::memcpy(&four, x + i * stride + j, sizeof four);
        const __m512i bytes = _mm512_set1_epi32(four);
        for (int v = 0; v < vectors; v++)
          sums[i][v] = Int8Vector::add_in_tile(sums[i][v], weight[v], bytes);
      }
      w += vectors, j += 4;
    } while (j < length);
    for (int i = 0; i < count; i++)
      for (int v = 0; v < vectors; v++)
        _mm512_store_si512(totals + (i * vectors + v) * 16, sums[i][v]);
  }

  // Multiplies bytes of the rows, from `begin` on, by `count` rows of the activation. Totals are (row of the
  // activation, vector, lane).
  void multiply(int vectors, const int8_t* x, int64_t stride, int64_t length, int count, uint32_t* totals,
                int64_t begin = 0) const {
    with_constant<most_vectors>(vectors, [&](auto vectors) {
      with_constant<most_at_once>(count, [&](auto count) {
        multiply<vectors, count>(x, stride, length, totals, begin);
      });
    });
  }
};

EQQUANT_END
