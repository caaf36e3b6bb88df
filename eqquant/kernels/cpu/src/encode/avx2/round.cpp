#define EQQUANT_TARGET_AVX2
#include "encode/rounding_loops.h"

namespace eqquant {
void round_avx2(const Rounding& r, int64_t begin, int64_t end) { avx2::round_rows(r, begin, end); }
void round_int8_avx2(const Int8Rounding& r, int64_t begin, int64_t end) {
  avx2::round_int8_rows(r, begin, end);
}
}  // namespace eqquant
