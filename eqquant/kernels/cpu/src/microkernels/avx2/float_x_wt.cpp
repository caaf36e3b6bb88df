#define EQQUANT_TARGET_AVX2
#include "products/float_x_wt.h"

namespace eqquant {
extern const Routine float_x_wt_avx2 = avx2::float_x_wt_routine;
}  // namespace eqquant
