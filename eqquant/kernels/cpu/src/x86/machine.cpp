#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "machine.h"

namespace eqquant {
namespace {

enum { none, avx2, avx512, vnni, amx };

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
  const bool bytes = c >> 1 & 1;  // Lookups of bytes (VBMI), which all of these have.
#if defined(EQQUANT_EMULATE_TILES)
  return bytes && has_bfloat16();
#endif
  // Of bfloat16, any, and of bytes.
  const bool tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
  return tiles && bytes && has_bfloat16() && may_use_tiles();
}

// Floats of 16 bits, which compilers do not all ask for by name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

int find_out() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
    return none;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
    return avx2;
  if (!__builtin_cpu_supports("avx512vnni")) return avx512;
  return has_amx() ? amx : vnni;
}

}  // namespace

bool has_bfloat16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

int instructions() {
  static const int found = find_out();
  return found;
}

extern const Routine float_avx2, float_rows_avx2, float_avx512, float_rows_avx512;
// For activations split in digits of 8 bits.
extern const Routine digits_vnni, digits_amx, row_digits_amx;
// For activations rounded to 16 bits, and levels, too.
extern const Routine words_vnni, row_words_vnni;
// For more rows, rounded to bfloat16.
extern const Routine bfloat16_amx;

const Kernel kernels[] = {
    {"float, AVX2", &float_avx2, &float_rows_avx2, 0, avx2},
    {"float, AVX-512", &float_avx512, &float_rows_avx512, 0, avx512},
    {"two digits, VNNI", &digits_vnni, nullptr, 2, vnni},
    {"one digit, VNNI", &digits_vnni, nullptr, 1, vnni},
    {"words, VNNI", &words_vnni, &row_words_vnni, 0, vnni},
    {"two digits, AMX", &digits_amx, &row_digits_amx, 2, amx},
    {"one digit, AMX", &digits_amx, &row_digits_amx, 1, amx},
    {"bfloat16, AMX", &bfloat16_amx, nullptr, 1, amx},
    {},
};

Rounder round_avx2, round_avx512;
Rounder* rounder(int instructions) { return instructions < avx512 ? round_avx2 : round_avx512; }

Encoder encode_avx512;
Encoder* encoder(int instructions) { return instructions < avx512 ? nullptr : encode_avx512; }

void pause() { __builtin_ia32_pause(); }

}  // namespace eqquant
