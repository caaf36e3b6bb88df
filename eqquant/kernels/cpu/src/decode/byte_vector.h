// The `ByteVector` of an instruction set.
#pragma once

#include "runtime/target.h"

#if defined(EQQUANT_ARM)
#include "decode/neon/byte_vector.h"
#elif defined(EQQUANT_TARGET_AVX2) || defined(EQQUANT_TARGET_AVX2_GFNI)
#include "decode/avx2/byte_vector.h"
#else
#include "decode/avx512/byte_vector.h"
#endif
