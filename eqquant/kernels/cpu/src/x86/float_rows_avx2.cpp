#include <immintrin.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "product.h"
#include "target.h"
#include "unpack.h"

EQQUANT_TARGET_BEGIN("avx2,fma,f16c")
namespace eqquant {
namespace avx2 {

#include "vector_avx2.h"

#include "rows.h"

}  // namespace avx2

extern const Routine float_rows_avx2 = avx2::rows_routine;

}  // namespace eqquant
EQQUANT_TARGET_END
