#include <cfloat>
#include <cstring>
#include <limits>
#include <vector>

#include "round.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx2,fma")
namespace eqquant {
namespace avx2 {

#include "round_kernels.h"

}  // namespace avx2

void round_avx2(const Rounding& r, int64_t begin, int64_t end) { avx2::round_rows(r, begin, end); }

}  // namespace eqquant
EQQUANT_TARGET_END
