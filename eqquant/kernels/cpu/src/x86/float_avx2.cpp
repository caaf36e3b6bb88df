#include <immintrin.h>

#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx2,fma,f16c")
namespace eqquant {
namespace avx2 {

#include "vector_avx2.h"

#include "float_kernels.h"

}  // namespace avx2

extern const Routine float_avx2 = avx2::columns_routine;

}  // namespace eqquant
EQQUANT_TARGET_END
