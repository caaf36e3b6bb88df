#include <arm_neon.h>

#include <cmath>
#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN(EQQUANT_I8MM)
namespace eqquant {
namespace i8mm {

#include "integers_neon.h"

#include "paired_digits.h"

using Panel = DecodedRows;

#include "digits.h"

}  // namespace i8mm

extern const Routine digits_i8mm = i8mm::digits_routine;

}  // namespace eqquant
EQQUANT_TARGET_END
