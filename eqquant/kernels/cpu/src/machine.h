// What a machine has: kernels, and the instructions that some of them need. `x86/` and
// `arm/` each define it.
#pragma once

#include "encode.h"
#include "product.h"
#include "round.h"

namespace eqquant {

// The best instructions of this machine, as a number: 0 are none that suffice, and each
// kernel says which it needs. `_library.py` has their names.
int instructions();
// Whether it multiplies bfloat16 faster than float32. No kernel needs that: XLA does it.
bool has_bfloat16();

struct Kernel {
  const char* name;
  const Routine* columns;
  const Routine* rows;  // x @ w, if it has that.
  int digits;
  int needs;
};

// The last one has no name.
extern const Kernel kernels[];

// By instructions of which there are at least 1; no encoder if there is none for them.
using Rounder = void(const Rounding&, int64_t begin, int64_t end);
using Encoder = void(const Encoding&, int64_t begin, int64_t end);
Rounder* rounder(int instructions);
Encoder* encoder(int instructions);

// While another thread is waited for.
void pause();

}  // namespace eqquant
