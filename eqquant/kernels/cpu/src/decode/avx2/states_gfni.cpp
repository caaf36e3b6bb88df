#define EQQUANT_TARGET_AVX2_GFNI
#include "decode/unpack_states.h"

namespace eqquant {
extern StatesUnpacker unpack_states_avx2_gfni;
void unpack_states_avx2_gfni(const Product& p, const uint8_t* from, int64_t groups, uint8_t* to) {
  avx2_gfni::unpack_states(p, from, groups, to);
}
}  // namespace eqquant
