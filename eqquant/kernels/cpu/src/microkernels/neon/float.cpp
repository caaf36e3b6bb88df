#define EQQUANT_TARGET_NEON
#include "products/float_x_w.h"
#include "products/float_x_wt.h"
#include "products/offsets.h"

namespace eqquant {
extern const Routine float_x_wt_neon = neon::float_x_wt_routine;
extern const Routine float_x_w_neon = neon::float_x_w_routine;
extern const Routine offsets_neon = neon::offsets_routine;
}  // namespace eqquant
