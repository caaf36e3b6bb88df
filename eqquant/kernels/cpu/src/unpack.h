// Codes of three bits. Every routine takes them in four: they are unpacked, some rows at a
// time, into a cache, right before they are used.
#pragma once

#include "product.h"

namespace eqquant {

// `groups` of codes, of `run` bytes each in four bits, where codes of one plane follow each
// other. In three bits a group is `run / 2` bytes of the low two bits of each code, in four
// planes, and then `run / 4` bytes of the high one, in eight.
void unpack(const uint8_t* from, int64_t groups, int64_t run, uint8_t* to);

// `routine.run`, for codes of any number of bits.
void run_units(const Routine& routine, const Product& p, const char* scratch, int64_t begin,
               int64_t end);

}  // namespace eqquant
