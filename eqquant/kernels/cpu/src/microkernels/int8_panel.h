// The panel of decoded int8 rows that an instruction set multiplies by many rows of the activation.
#pragma once

#include "microkernels/decoded_rows.h"
#include "runtime/target.h"

#if defined(EQQUANT_ARM)
EQQUANT_BEGIN
using Panel = DecodedRows;
EQQUANT_END
#else
#include "microkernels/vnni/int8_panel.h"
#endif
