// The `Vector` of float32 numbers of an instruction set.
#pragma once

#include "runtime/target.h"

#if defined(EQQUANT_ARM)
#include "microkernels/neon/vector.h"
#elif defined(EQQUANT_TARGET_AVX2)
#include "microkernels/avx2/vector.h"
#else
#include "microkernels/avx512/vector.h"
#endif
