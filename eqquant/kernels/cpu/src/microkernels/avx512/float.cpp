#define EQQUANT_TARGET_AVX512
#include "products/float_x_w.h"
#include "products/float_x_wt.h"
#include "products/offsets.h"

namespace eqquant {
extern const Routine float_x_wt_avx512 = avx512::float_x_wt_routine;
extern const Routine float_x_w_avx512 = avx512::float_x_w_routine;
extern const Routine offsets_avx512 = avx512::offsets_routine;
}  // namespace eqquant
