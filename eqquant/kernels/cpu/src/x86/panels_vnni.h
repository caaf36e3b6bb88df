// Decoded rows of the weight by rows of digits, in registers. Included after decoded_rows.h,
// which is the alternative.

#include "arranged_rows.h"

struct Panel : Arranged {
  static constexpr int most_digits = 6;
  static constexpr int64_t few_digits = 8;
  using Arranged::Arranged;

  // To arrange rows takes as long as to add up as many sums, in vain, as there are bytes.
  static bool pays(int64_t count, int64_t length) { return 40 * count >= length; }

  template <int vectors, int count>
  void multiply(const int8_t* x, int64_t stride, int64_t length, uint32_t* totals) const {
    __m512i sums[count][vectors];
    for (int i = 0; i < count; i++)
      for (int v = 0; v < vectors; v++) sums[i][v] = _mm512_setzero_si512();
    const Vector* w = panel.data();
    int64_t j = 0;
    do {  // As in tiles.h.
      __m512i weight[vectors];
      for (int v = 0; v < vectors; v++) weight[v] = _mm512_load_si512(w + v);
      for (int i = 0; i < count; i++) {
        int32_t four;
        std::memcpy(&four, x + i * stride + j, sizeof four);
        const __m512i digits = _mm512_set1_epi32(four);
        for (int v = 0; v < vectors; v++)
          sums[i][v] = Integers::add_in_tile(sums[i][v], weight[v], digits);
      }
      w += vectors, j += 4;
    } while (j < length);
    for (int i = 0; i < count; i++)
      for (int v = 0; v < vectors; v++)
        _mm512_store_si512(totals + (i * vectors + v) * 16, sums[i][v]);
  }

  template <int vectors>
  void multiply(const int8_t* x, int64_t stride, int64_t length, int count,
                uint32_t* totals) const {
    switch (count) {
      case 1: return multiply<vectors, 1>(x, stride, length, totals);
      case 2: return multiply<vectors, 2>(x, stride, length, totals);
      case 3: return multiply<vectors, 3>(x, stride, length, totals);
      case 4: return multiply<vectors, 4>(x, stride, length, totals);
      case 5: return multiply<vectors, 5>(x, stride, length, totals);
      default: return multiply<vectors, 6>(x, stride, length, totals);
    }
  }

  // By `count` rows of digits; totals are (digits, row).
  void multiply(int vectors, const int8_t* x, int64_t stride, int64_t length, int count,
                uint32_t* totals) const {
    switch (vectors) {
      case 1: return multiply<1>(x, stride, length, count, totals);
      case 2: return multiply<2>(x, stride, length, count, totals);
      case 3: return multiply<3>(x, stride, length, count, totals);
      default: return multiply<4>(x, stride, length, count, totals);
    }
  }
};
