#include <immintrin.h>

#include <type_traits>
#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace eqquant {
namespace avx512 {

#include "vector_avx512.h"

#include "float_kernels.h"

}  // namespace avx512

const Routine float_avx512 = {avx512::prepare_activation, avx512::run_columns, avx512::activation_scratch, 8};
const Routine float_rows_avx512 = {avx512::prepare_rows, avx512::run_rows, avx512::rows_scratch, 64};

}  // namespace eqquant
EQQUANT_TARGET_END
