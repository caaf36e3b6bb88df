#include <cfloat>
#include <cstring>
#include <limits>
#include <vector>

#include "round.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace eqquant {
namespace avx512 {

#include "round_kernels.h"

}  // namespace avx512

void round_avx512(const Rounding& r, int64_t begin, int64_t end) { avx512::round_rows(r, begin, end); }

}  // namespace eqquant
EQQUANT_TARGET_END
