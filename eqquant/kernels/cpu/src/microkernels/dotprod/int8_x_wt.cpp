#define EQQUANT_TARGET_DOTPROD
#include "products/int8_x_wt.h"

namespace eqquant {
extern const Routine int8_x_wt_dotprod = dotprod::int8_x_wt_routine;
}  // namespace eqquant
