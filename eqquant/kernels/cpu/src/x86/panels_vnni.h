// Decoded rows of the weight by rows of digits: sixteen rows of the weight to a register, four
// bytes of each. So a sum is where its result goes, and nothing is added up across a register.
// Included after decoded_rows.h, which is the alternative.

struct Panel {
  static constexpr int lanes = 16, most_vectors = 4, most_digits = 6;
  // Of the digits, which are read so seldom that a cache that cores share will do.
  static constexpr int64_t cached_bytes = 1 << 22;
  struct alignas(64) Vector {
    int32_t fours[lanes];
  };
  // (four bytes of a row, vector, row of it)
  std::vector<Vector> panel;

  explicit Panel(int64_t bytes) : panel(bytes / 64) {}

  // To arrange rows takes as long as to add up as many sums, in vain, as there are bytes.
  static bool pays(int64_t count, int64_t length) { return 40 * count >= length; }
  // So many that a second-level cache holds them beside the digits.
  static int vectors_for(int64_t length) {
    constexpr int64_t most = 3 << 17;
    return length * 64 <= most ? 4 : length * 32 <= most ? 2 : 1;
  }

  // Sixteen rows of `length` bytes, one after the other.
  void take(const uint8_t* rows, int64_t length, int vector, int vectors) {
    Vector* to = panel.data() + vector;
    for (int64_t j = 0; j < length; j += 64, to += 16 * vectors) {
      __m512i x[16], y[16];
      for (int i = 0; i < 16; i++) x[i] = _mm512_load_si512(rows + i * length + j);
      // By quarters of a register first, then among these.
      for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
      }
      for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
          x[i + 2 * k] = _mm512_unpacklo_epi64(y[i + k], y[i + k + 2]);
          x[i + 2 * k + 1] = _mm512_unpackhi_epi64(y[i + k], y[i + k + 2]);
        }
      for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k += 8) {
          y[k + i] = _mm512_shuffle_i32x4(x[k + i], x[k + i + 4], 0x88);
          y[k + i + 4] = _mm512_shuffle_i32x4(x[k + i], x[k + i + 4], 0xDD);
        }
      for (int i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++) {
          const __m512i a = y[4 * k + i], b = y[4 * k + i + 8];
          _mm512_store_si512(to + (4 * k + i) * vectors, _mm512_shuffle_i32x4(a, b, 0x88));
          _mm512_store_si512(to + (4 * k + i + 8) * vectors, _mm512_shuffle_i32x4(a, b, 0xDD));
        }
    }
  }

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
