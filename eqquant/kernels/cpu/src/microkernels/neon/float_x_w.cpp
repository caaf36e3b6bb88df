#define EQQUANT_TARGET_NEON
#include "products/float_x_w.h"

namespace eqquant {
extern const Routine float_x_w_neon = neon::float_x_w_routine;
}  // namespace eqquant
