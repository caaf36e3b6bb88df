// Masks of lanes and bytes, in AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "runtime/target.h"

EQQUANT_BEGIN

// Returns a mask of the first `count` of 16 lanes.
inline __mmask16 first(int64_t count) { return count >= 16 ? 0xFFFF : (1u << count) - 1; }
// The same for 64 bytes.
inline __mmask64 first_bytes(int64_t count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

EQQUANT_END
