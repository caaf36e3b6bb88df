// The kernels of a machine, and the instructions that they need. `runtime/x86/` and `runtime/arm/` define them.
#pragma once

#include <cstdint>

#include "encode/encoding.h"
#include "encode/rounding.h"
#include "encode/searching.h"
#include "runtime/product.h"

namespace eqquant {

// The best instruction set of this machine as a number; 0 if none suffices. Each kernel states its
// requirement. `_library.py` has the names.
int instructions();
// True if bfloat16 products are faster than float32. XLA uses this; native kernels do not.
bool has_bfloat16();

// True if an x86 machine has byte lookups (VBMI) and matrices of bits (GFNI) for AVX-512.
bool has_bit_matrices();

struct Kernel {
  const char* name;
  const Routine* x_wt;
  const Routine* x_w;  // Or null.
  int parts;  // See product.h.
  int needs;
};

// The last entry has no name.
extern const Kernel kernels[];

// The routine that adds offsets to the result of a kernel that needs an instruction set.
const Routine& offsets_routine(int instructions);

// Indexed by the instruction set, at least 1. Null without an encoder.
using Rounder = void(const Rounding&, int64_t begin, int64_t end);
using Int8Rounder = void(const Int8Rounding&, int64_t begin, int64_t end);
using Encoder = void(const Encoding&, int64_t begin, int64_t end);
Rounder* rounder(int instructions);
Int8Rounder* int8_rounder(int instructions);
Encoder* encoder(int instructions);
// Null without a search.
using Searcher = void(const Searching&, int64_t begin, int64_t end);
Searcher* searcher(int instructions);

// A pause while another thread is awaited.
void pause();

}  // namespace eqquant
