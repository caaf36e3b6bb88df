#include <immintrin.h>

#include <cmath>
#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
namespace eqquant {
namespace vnni {

#include "integers_vnni.h"

#include "plain_digits.h"

#include "panels_vnni.h"

#include "digits.h"

}  // namespace vnni

extern const Routine digits_vnni = vnni::digits_routine;

}  // namespace eqquant
EQQUANT_TARGET_END
