// Functions for instructions that the compiler must not use elsewhere. Functions between the two macros are
// compiled for the named features, and the rest of the library for any machine of the architecture. Include
// headers before them, because inline functions of headers must stay portable.
#pragma once

#define EQQUANT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define EQQUANT_TARGET_BEGIN(features) \
  EQQUANT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define EQQUANT_TARGET_END EQQUANT_PRAGMA(clang attribute pop)
#else
#define EQQUANT_TARGET_BEGIN(features) \
  EQQUANT_PRAGMA(GCC push_options)     \
  EQQUANT_PRAGMA(GCC target(features))
#define EQQUANT_TARGET_END EQQUANT_PRAGMA(GCC pop_options)
#endif

// ARM targets, which compilers name differently. The intrinsics need Clang of 2023 or later.
#if defined(__clang__)
#define EQQUANT_DOTPROD "dotprod"
#define EQQUANT_I8MM "dotprod,i8mm"
#else
#define EQQUANT_DOTPROD "arch=armv8.2-a+dotprod"
#define EQQUANT_I8MM "arch=armv8.2-a+dotprod+i8mm"
#endif

#define EQQUANT_INLINE inline __attribute__((always_inline))
