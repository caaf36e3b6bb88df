#include <arm_neon.h>

#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#include "product.h"
#include "target.h"

namespace eqquant {
namespace neon {

#include "vector_neon.h"

#include "float_kernels.h"

}  // namespace neon

extern const Routine float_neon = neon::columns_routine;

}  // namespace eqquant
