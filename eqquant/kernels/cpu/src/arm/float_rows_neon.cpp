#include <arm_neon.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "product.h"
#include "target.h"
#include "unpack.h"

namespace eqquant {
namespace neon {

#include "vector_neon.h"

#include "rows.h"

}  // namespace neon

extern const Routine float_rows_neon = neon::rows_routine;

}  // namespace eqquant
