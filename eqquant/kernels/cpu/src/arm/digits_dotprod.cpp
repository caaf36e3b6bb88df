#include <arm_neon.h>

#include <cmath>
#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN(EQQUANT_DOTPROD)
namespace eqquant {
namespace dotprod {

#include "integers_neon.h"

#include "plain_digits.h"

using Panel = DecodedRows;

#include "digits.h"

}  // namespace dotprod

extern const Routine digits_dotprod = dotprod::digits_routine;

}  // namespace eqquant
EQQUANT_TARGET_END
