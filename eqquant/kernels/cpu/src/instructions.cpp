#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "product.h"

namespace eqquant {
namespace {

// Linux gives the large registers of AMX only to processes that ask.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool bfloat16 = d >> 22 & 1, tiles = d >> 24 & 1;
  if (!bfloat16 || !tiles || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return false;
  const bool avx512_bf16 = a >> 5 & 1;
  return avx512_bf16 && may_use_tiles();
}

// Floats of 16 bits, which compilers do not all ask for by name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

int find_out() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return 1;
  if (!__builtin_cpu_supports("avx512vnni")) return 2;
  return has_amx() ? 4 : 3;
}

}  // namespace

int instructions() {
  static const int found = find_out();
  return found;
}

}  // namespace eqquant
