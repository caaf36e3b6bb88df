#define EQQUANT_TARGET_NEON
#include "encode/rounding_loops.h"

namespace eqquant {
void round_neon(const Rounding& r, int64_t begin, int64_t end) { neon::round_rows(r, begin, end); }
void round_int8_neon(const Int8Rounding& r, int64_t begin, int64_t end) {
  neon::round_int8_rows(r, begin, end);
}
}  // namespace eqquant
