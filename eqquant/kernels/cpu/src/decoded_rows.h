// A panel of decoded rows of the weight in row-major order. Include it after `multiply_decoded`.

struct DecodedRows {
  static constexpr int lanes = 4, most_vectors = 1, most_digits = 6;
  static constexpr int64_t few_digits = 8;
  // Bytes of the activation that stay in the second-level cache, because every four rows read them again.
  static constexpr int64_t cached_bytes = 1 << 19;
  const uint8_t* rows = nullptr;

  static bool pays(int64_t, int64_t) { return true; }
  static int vectors_for(int64_t) { return 1; }
  explicit DecodedRows(int64_t) {}
  void take(const uint8_t* decoded, int64_t, int, int) { rows = decoded; }
  void multiply(int, const int8_t* x, int64_t stride, int64_t length, int count,
                uint32_t* totals) const {
    switch (count) {
      case 1: return multiply_decoded<lanes, 1>(rows, length, x, stride, totals);
      case 2: return multiply_decoded<lanes, 2>(rows, length, x, stride, totals);
      case 3: return multiply_decoded<lanes, 3>(rows, length, x, stride, totals);
      case 4: return multiply_decoded<lanes, 4>(rows, length, x, stride, totals);
      case 5: return multiply_decoded<lanes, 5>(rows, length, x, stride, totals);
      default: return multiply_decoded<lanes, 6>(rows, length, x, stride, totals);
    }
  }
};
