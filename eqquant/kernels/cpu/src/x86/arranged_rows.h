// Decoded rows of the weight as registers: four bytes of each of sixteen rows. So a sum is
// where its result goes, and nothing is added up across a register.

struct Arranged {
  static constexpr int lanes = 16, most_vectors = 4;
  // Of the digits, which are read so seldom that a cache that cores share will do.
  static constexpr int64_t cached_bytes = 1 << 22;
  struct alignas(64) Vector {
    int32_t fours[lanes];
  };
  // (four bytes of a row, vector, row of it)
  std::vector<Vector> panel;

  explicit Arranged(int64_t bytes) : panel(bytes / 64) {}

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
};
