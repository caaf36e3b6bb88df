#define EQQUANT_TARGET_AVX2
#include "products/float_x_w.h"

namespace eqquant {
extern const Routine float_x_w_avx2 = avx2::float_x_w_routine;
}  // namespace eqquant
