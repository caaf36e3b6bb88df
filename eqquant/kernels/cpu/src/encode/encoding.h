// Encoding of floats to 4-bit codes and scales, independent of XLA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace eqquant {

// Divides each block of a row by its scale. The code of a value is the number of boundaries below it.
// Byte j of a block holds code j and, in its high bits, code j + block / 2.
//
// The scale is given, or the absmax of the block, or the multiple of absmax in `shares` with the least
// squared error. The results equal `formats/`, bit for bit.
struct Encoding {
  const float* x;           // (rows, size)
  const float* boundaries;  // 15 of them, ascending; the 16th is infinite
  const float* levels;      // the 16 levels between them
  const float* shares;      // ascending, in steps smaller than any from boundary to boundary
  int64_t num_shares;       // 0: the scale is the largest magnitude
  const float* given;       // (rows, size / block), or null
  uint8_t* codes;           // (rows, size / 2)
  float* scales;            // (rows, size / block)
  bool* problems;           // (rows): whether something is not finite
  int64_t rows, size;
  int64_t block;            // a multiple of 32
};

}  // namespace eqquant
