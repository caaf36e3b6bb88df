#define EQQUANT_TARGET_I8MM
#include "products/int8_x_wt.h"

namespace eqquant {
extern const Routine int8_x_wt_i8mm = i8mm::int8_x_wt_routine;
}  // namespace eqquant
