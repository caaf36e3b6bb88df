#define EQQUANT_TARGET_NEON
#include "products/float_x_wt.h"

namespace eqquant {
extern const Routine float_x_wt_neon = neon::float_x_wt_routine;
}  // namespace eqquant
