#include "machine.h"

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
// As the kernel's header files say, of which older ones lack the second.
const bool has_dotprod = getauxval(AT_HWCAP) >> 20 & 1;
const bool has_i8mm = getauxval(AT_HWCAP2) >> 13 & 1;
#else
constexpr bool has_dotprod = false, has_i8mm = false;
#endif

}  // namespace

bool has_bfloat16() { return false; }  // What XLA makes of it there is not measured.

int instructions() { return !has_dotprod ? neon : has_i8mm ? i8mm : dotprod; }

extern const Routine float_neon, float_rows_neon;
// For activations split in digits of 8 bits.
extern const Routine digits_dotprod, digits_i8mm;

const Kernel kernels[] = {
    {"float, NEON", &float_neon, &float_rows_neon, 0, neon},
    {"two digits, dotprod", &digits_dotprod, nullptr, 2, dotprod},
    {"one digit, dotprod", &digits_dotprod, nullptr, 1, dotprod},
    {"two digits, i8mm", &digits_i8mm, nullptr, 2, i8mm},
    {"one digit, i8mm", &digits_i8mm, nullptr, 1, i8mm},
    {},
};

Rounder round_neon;
Rounder* rounder(int) { return round_neon; }

Encoder* encoder(int) { return nullptr; }

void pause() { asm volatile("yield"); }

}  // namespace eqquant
