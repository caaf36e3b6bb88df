#define EQQUANT_TARGET_AVX512
#include "products/offsets.h"

namespace eqquant {
extern const Routine offsets_avx512 = avx512::offsets_routine;
}  // namespace eqquant
