#define EQQUANT_TARGET_VNNI
#include "products/int8_x_wt.h"

namespace eqquant {
extern const Routine int8_x_wt_vnni = vnni::int8_x_wt_routine;
}  // namespace eqquant
