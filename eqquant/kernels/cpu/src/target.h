// Code for instructions that the compiler may not use elsewhere. Between these two, every
// function is compiled for the features named; the library as a whole for any x86-64.
// Headers are included before: their inline functions must stay plain ones.
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

#define EQQUANT_INLINE inline __attribute__((always_inline))
