// Decoded rows of the weight as registers: four bytes of each of sixteen rows. So a sum is
// where its result goes, and nothing is added up across a register.

#include "transpose.h"

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
      __m512i x[16];
      for (int i = 0; i < 16; i++) x[i] = _mm512_load_si512(rows + i * length + j);
      transpose(x);
      for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * vectors, x[i]);
    }
  }
};
