#define EQQUANT_TARGET_AVX512
#include "products/float_x_wt.h"

namespace eqquant {
extern const Routine float_x_wt_avx512 = avx512::float_x_wt_routine;
}  // namespace eqquant
