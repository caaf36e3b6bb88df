// Sums of products of int16, in AVX-512 VNNI.
#pragma once

#include <immintrin.h>

#include "runtime/target.h"

EQQUANT_BEGIN

// `_mm512_dpwssd_epi32` in assembly, because GCC 12 keeps its sums in memory.
EQQUANT_INLINE __m512i add_products(__m512i sum, __m512i weight, __m512i x) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x));
  return sum;
}

EQQUANT_END
