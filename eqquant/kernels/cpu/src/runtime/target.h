// The instruction set of a source file.
//
// A source file that needs instructions defines `EQQUANT_TARGET_...` before its first include. Between
// `EQQUANT_BEGIN` and `EQQUANT_END`, code is compiled for these instructions, in a namespace with their name.
// So the same header has one compilation per instruction set, and the rest of the library runs on every
// machine of the architecture. Include other headers before `EQQUANT_BEGIN`, because the inline functions of
// the C++ library must stay portable. Without a definition, headers are compiled for all instructions.
//
// `EQQUANT_TARGET_ANY` stands for the instructions of all machines with kernels. The code is in `eqquant` then.
#pragma once

#if defined(EQQUANT_TARGET_ANY) && defined(__aarch64__)
#define EQQUANT_TARGET_NEON
#elif defined(EQQUANT_TARGET_ANY)
#define EQQUANT_TARGET_AVX2
#endif

#if defined(__aarch64__)
#define EQQUANT_ARM 1
#if defined(__clang__)  // Its intrinsics need Clang of 2023 or later.
#define EQQUANT_ARM_FEATURES(clang, gcc) clang
#else
#define EQQUANT_ARM_FEATURES(clang, gcc) gcc
#endif
#if defined(EQQUANT_TARGET_NEON)
#define EQQUANT_NAMESPACE neon
#elif defined(EQQUANT_TARGET_DOTPROD)
#define EQQUANT_NAMESPACE dotprod
#define EQQUANT_FEATURES EQQUANT_ARM_FEATURES("dotprod", "arch=armv8.2-a+dotprod")
#else
#define EQQUANT_TARGET_I8MM
#define EQQUANT_NAMESPACE i8mm
#define EQQUANT_FEATURES EQQUANT_ARM_FEATURES("dotprod,i8mm", "arch=armv8.2-a+dotprod+i8mm")
#endif
#else
#define EQQUANT_AVX512_FEATURES "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"
#if defined(EQQUANT_TARGET_AVX2)
#define EQQUANT_NAMESPACE avx2
#define EQQUANT_FEATURES "avx2,fma,f16c"
#elif defined(EQQUANT_TARGET_AVX2_GFNI)
#define EQQUANT_NAMESPACE avx2_gfni
#define EQQUANT_FEATURES "avx2,fma,f16c,gfni"
#elif defined(EQQUANT_TARGET_AVX512)
#define EQQUANT_NAMESPACE avx512
#define EQQUANT_FEATURES EQQUANT_AVX512_FEATURES
#elif defined(EQQUANT_TARGET_GFNI)
#define EQQUANT_NAMESPACE gfni
#define EQQUANT_FEATURES EQQUANT_AVX512_FEATURES ",avx512vnni,avx512vbmi,gfni"
#elif defined(EQQUANT_TARGET_VNNI)
#define EQQUANT_NAMESPACE vnni
#define EQQUANT_FEATURES EQQUANT_AVX512_FEATURES ",avx512vnni"
#else
#define EQQUANT_TARGET_AMX
#define EQQUANT_NAMESPACE amx
#define EQQUANT_FEATURES \
  EQQUANT_AVX512_FEATURES ",avx512vnni,avx512vbmi,gfni,avx512bf16,amx-tile,amx-int8,amx-bf16"
#endif
#endif

#define EQQUANT_PRAGMA(text) _Pragma(#text)
#if !defined(EQQUANT_FEATURES)
#define EQQUANT_TARGET_BEGIN(features)
#define EQQUANT_TARGET_END
#elif defined(__clang__)
#define EQQUANT_TARGET_BEGIN(features) \
  EQQUANT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define EQQUANT_TARGET_END EQQUANT_PRAGMA(clang attribute pop)
#else
#define EQQUANT_TARGET_BEGIN(features) \
  EQQUANT_PRAGMA(GCC push_options)     \
  EQQUANT_PRAGMA(GCC target(features))
#define EQQUANT_TARGET_END EQQUANT_PRAGMA(GCC pop_options)
#endif

#define EQQUANT_BEGIN                    \
  EQQUANT_TARGET_BEGIN(EQQUANT_FEATURES) \
  namespace eqquant {                    \
  namespace EQQUANT_NAMESPACE {
#define EQQUANT_END \
  }                 \
  }                 \
  EQQUANT_TARGET_END

#define EQQUANT_INLINE inline __attribute__((always_inline))
