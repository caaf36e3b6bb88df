#define EQQUANT_TARGET_NEON
#include "decode/unpack_states.h"

namespace eqquant {
extern StatesUnpacker unpack_states_neon;
void unpack_states_neon(const Product& p, const uint8_t* from, int64_t groups, uint8_t* to) {
  neon::unpack_states(p, from, groups, to);
}
}  // namespace eqquant
