#include <cfloat>
#include <cstring>
#include <limits>
#include <vector>

#include "round.h"
#include "target.h"

namespace eqquant {
namespace neon {

#include "round_kernels.h"

}  // namespace neon

void round_neon(const Rounding& r, int64_t begin, int64_t end) { neon::round_rows(r, begin, end); }

}  // namespace eqquant
