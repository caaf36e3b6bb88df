// Three-bit codes. Routines receive them as four-bit codes: rows are unpacked into a cache right before use.
#pragma once

#include <cstdint>

#include "runtime/product.h"

namespace eqquant {

// Unpacks `groups` groups of codes, with runs of `run` bytes in four bits. A three-bit group has `run / 2`
// bytes with the low two bits of each code, in four planes, and then `run / 4` bytes with the high bits, in
// eight planes.
void unpack(const uint8_t* from, int64_t groups, int64_t run, uint8_t* to);

// `routine.run`, for codes of any number of bits.
void run_units(const Routine& routine, const Product& p, const char* scratch, int64_t begin,
               int64_t end);

}  // namespace eqquant
