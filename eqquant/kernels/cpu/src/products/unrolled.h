// Loops that are unrolled at compile time.
#pragma once

#include <type_traits>

#include "runtime/target.h"

EQQUANT_BEGIN

// Calls `use` with the compile-time constants from 0 to `n - 1`. Compilers keep arrays with such indices in registers:
// with other indices, they also store each change.
template <int n, class Use>
EQQUANT_INLINE void unrolled(const Use& use) {
  if constexpr (n > 1) unrolled<n - 1>(use);
  use(std::integral_constant<int, n - 1>());
}

// Keeps loads in a loop, which GCC would otherwise move before it: registers do not hold all results, so it would save
// some on the stack.
EQQUANT_INLINE void keep_in_loop() { asm volatile("" ::: "memory"); }

EQQUANT_END
