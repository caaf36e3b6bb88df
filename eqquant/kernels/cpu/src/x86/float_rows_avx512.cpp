#include <immintrin.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "product.h"
#include "target.h"
#include "unpack.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace eqquant {
namespace avx512 {

#include "vector_avx512.h"

#include "rows.h"

}  // namespace avx512

extern const Routine float_rows_avx512 = avx512::rows_routine;

}  // namespace eqquant
EQQUANT_TARGET_END
