#define EQQUANT_TARGET_AVX2
#include "products/offsets.h"

namespace eqquant {
extern const Routine offsets_avx2 = avx2::offsets_routine;
}  // namespace eqquant
