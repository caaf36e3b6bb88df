#define EQQUANT_TARGET_NEON
#include "products/offsets.h"

namespace eqquant {
extern const Routine offsets_neon = neon::offsets_routine;
}  // namespace eqquant
