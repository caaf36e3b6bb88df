#define EQQUANT_TARGET_AVX2
#include "products/float_x_w.h"
#include "products/float_x_wt.h"
#include "products/offsets.h"

namespace eqquant {
extern const Routine float_x_wt_avx2 = avx2::float_x_wt_routine;
extern const Routine float_x_w_avx2 = avx2::float_x_w_routine;
extern const Routine offsets_avx2 = avx2::offsets_routine;
}  // namespace eqquant
