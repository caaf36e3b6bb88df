// The Walsh-Hadamard transform of rows, independent of XLA.
#pragma once

#include <cstdint>

namespace eqquant {

// Multiplies each `block` values of `size` by Sylvester's orthogonal Hadamard matrix. `block` is a power of two that
// divides `size`.
void hadamard(const float* x, float* y, int64_t size, int64_t block);

}  // namespace eqquant
