// Floats to codes of 4 bits and scales. Nothing here knows of XLA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace eqquant {

// Each block of a row is divided by its scale; the code of a value is the number of
// boundaries below it. Byte j of a block holds code j and, above it, code j + block / 2.
//
// The scale is one of those given; or the largest magnitude of the block; or, out of some
// shares of that, the one with the least squared error. The numbers are those of
// `formats/`, bit for bit.
struct Encoding {
  const float* x;           // (rows, size)
  const float* boundaries;  // 15 of them, ascending; the 16th is infinite
  const float* levels;      // the 16 between them
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
