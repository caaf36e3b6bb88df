#define EQQUANT_TARGET_AVX2
#include "decode/unpack_states.h"

namespace eqquant {
extern StatesUnpacker unpack_states_avx2;
void unpack_states_avx2(const Product& p, const uint8_t* from, int64_t groups, uint8_t* to) {
  avx2::unpack_states(p, from, groups, to);
}
}  // namespace eqquant
