#define EQQUANT_TARGET_AVX512
#include "products/float_x_w.h"

namespace eqquant {
extern const Routine float_x_w_avx512 = avx512::float_x_w_routine;
}  // namespace eqquant
