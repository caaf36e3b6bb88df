#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "decode/states.h"
#include "runtime/machine.h"

namespace eqquant {
namespace {

enum { none, avx2, avx512, vnni, amx };

// Linux grants the large registers of AMX to a process on request.
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
  const bool bytes = c >> 1 & 1;  // Byte lookups (VBMI). All CPUs with AMX have them.
#if defined(EQQUANT_EMULATE_TILES)
  return bytes && has_bfloat16();
#endif
  // Tiles of bfloat16, tiles, and tiles of int8.
  const bool tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
  return tiles && bytes && has_bfloat16() && may_use_tiles();
}

// float16 conversions. Some compilers have no name for this feature.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

// Products with matrices of bits. Intel's CPUs with AVX2 have them since 2021.
bool has_gfni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 8 & 1);
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

// The first CPUs with VNNI lack them.
bool has_bit_matrices() {
  static const bool found = [] {
    unsigned a, b, c, d;
    return instructions() >= vnni && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 1 & 1) && has_gfni();
  }();
  return found;
}

bool has_bfloat16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

int instructions() {
  static const int found = find_out();
  return found;
}

extern const Routine float_x_wt_avx2, float_x_w_avx2, int16_x_wt_avx2, int8_x_wt_avx2;
extern const Routine float_x_wt_avx512, float_x_w_avx512;
extern const Routine int8_x_wt_vnni, int16_x_wt_vnni, int16_x_w_vnni;
extern const Routine int8_x_wt_amx, int8_x_w_amx, bfloat16_x_wt_amx;

const Kernel kernels[] = {
    {"float, AVX2", &float_x_wt_avx2, &float_x_w_avx2, 0, avx2},
    {"int16, AVX2", &int16_x_wt_avx2, nullptr, 0, avx2},
    {"int8, AVX2", &int8_x_wt_avx2, nullptr, 1, avx2},
    {"float, AVX-512", &float_x_wt_avx512, &float_x_w_avx512, 0, avx512},
    {"int8x2, VNNI", &int8_x_wt_vnni, nullptr, 2, vnni},
    {"int8, VNNI", &int8_x_wt_vnni, nullptr, 1, vnni},
    {"int16, VNNI", &int16_x_wt_vnni, &int16_x_w_vnni, 0, vnni},
    {"int8x2, AMX", &int8_x_wt_amx, &int8_x_w_amx, 2, amx},
    {"int8, AMX", &int8_x_wt_amx, &int8_x_w_amx, 1, amx},
    {"bfloat16, AMX", &bfloat16_x_wt_amx, nullptr, 1, amx},
    {},
};

extern const Routine offsets_avx2, offsets_avx512;
const Routine& offsets_routine(int instructions) { return instructions < avx512 ? offsets_avx2 : offsets_avx512; }

StatesUnpacker unpack_states_avx2, unpack_states_avx2_gfni, unpack_states_gfni;
StatesUnpacker* states_unpacker(int instructions) {
  if (instructions >= avx512 && has_bit_matrices()) return unpack_states_gfni;
  return has_gfni() ? unpack_states_avx2_gfni : unpack_states_avx2;
}

Rounder round_avx2, round_avx512;
Rounder* rounder(int instructions) { return instructions < avx512 ? round_avx2 : round_avx512; }
Int8Rounder round_int8_avx2, round_int8_avx512;
Int8Rounder* int8_rounder(int instructions) {
  return instructions < avx512 ? round_int8_avx2 : round_int8_avx512;
}

Encoder encode_avx512;
Encoder* encoder(int instructions) { return instructions < avx512 ? nullptr : encode_avx512; }

Searcher search_avx512;
Searcher* searcher(int instructions) { return instructions < avx512 ? nullptr : search_avx512; }

void pause() { __builtin_ia32_pause(); }

}  // namespace eqquant
