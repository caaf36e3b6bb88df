// Code for instructions that the compiler may not use elsewhere. Between these two, every
// function is compiled for the features named; the library as a whole for any machine of
// the architecture. Headers are included before: their inline functions must stay plain
// ones.
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

// Of ARM, which compilers name each in its way. For its intrinsics Clang must be of 2023.
#if defined(__clang__)
#define EQQUANT_DOTPROD "dotprod"
#define EQQUANT_I8MM "dotprod,i8mm"
#else
#define EQQUANT_DOTPROD "arch=armv8.2-a+dotprod"
#define EQQUANT_I8MM "arch=armv8.2-a+dotprod+i8mm"
#endif

#define EQQUANT_INLINE inline __attribute__((always_inline))
