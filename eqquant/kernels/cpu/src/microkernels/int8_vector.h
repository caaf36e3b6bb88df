// The `Int8Vector` of an instruction set.
#pragma once

#include "runtime/target.h"

#if defined(EQQUANT_ARM)
#include "microkernels/dotprod/int8_vector.h"
#else
#include "microkernels/vnni/int8_vector.h"
#endif
