#include "decode/states.h"
#include "runtime/machine.h"

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace eqquant {
namespace {

enum { none, neon, dotprod, i8mm };

#if defined(__APPLE__)
bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value;
}
const bool has_dotprod = has("hw.optional.arm.FEAT_DotProd");
const bool has_i8mm = has("hw.optional.arm.FEAT_I8MM");
#elif defined(__linux__)
// Bits of Linux's HWCAP_ASIMDDP and HWCAP2_I8MM. Older headers lack the second name.
const bool has_dotprod = getauxval(AT_HWCAP) >> 20 & 1;
const bool has_i8mm = getauxval(AT_HWCAP2) >> 13 & 1;
#else
constexpr bool has_dotprod = false, has_i8mm = false;
#endif

}  // namespace

bool has_bfloat16() { return false; }  // XLA's speed with bfloat16 on ARM is not measured.

int instructions() { return !has_dotprod ? neon : has_i8mm ? i8mm : dotprod; }

extern const Routine float_x_wt_neon, float_x_w_neon, int8_x_wt_dotprod, int8_x_wt_i8mm;

const Kernel kernels[] = {
    {"float, NEON", &float_x_wt_neon, &float_x_w_neon, 0, neon},
    {"int8x2, dotprod", &int8_x_wt_dotprod, nullptr, 2, dotprod},
    {"int8, dotprod", &int8_x_wt_dotprod, nullptr, 1, dotprod},
    {"int8x2, i8mm", &int8_x_wt_i8mm, nullptr, 2, i8mm},
    {"int8, i8mm", &int8_x_wt_i8mm, nullptr, 1, i8mm},
    {},
};

extern const Routine offsets_neon;
const Routine& offsets_routine(int) { return offsets_neon; }

StatesUnpacker unpack_states_neon;
StatesUnpacker* states_unpacker(int) { return unpack_states_neon; }

Rounder round_neon;
Rounder* rounder(int) { return round_neon; }
Int8Rounder round_int8_neon;
Int8Rounder* int8_rounder(int) { return round_int8_neon; }

Encoder* encoder(int) { return nullptr; }

Searcher* searcher(int) { return nullptr; }

void pause() { asm volatile("yield"); }

}  // namespace eqquant
