// Floats to codes of 4 bits and scales. Nothing here knows of XLA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace eqquant {

// Each block of a row is divided by its largest magnitude, which is its scale; the code
// of a value is the number of boundaries below it. Byte j of a block holds code j and,
// above it, code j + block / 2.
struct Encoding {
  const float* x;           // (rows, size)
  const float* boundaries;  // 15 of them, ascending; the 16th is not looked at
  uint8_t* codes;           // (rows, size / 2)
  float* scales;            // (rows, size / block)
  bool* problems;           // (rows): whether something is not finite
  int64_t rows, size;
  int64_t block;            // a multiple of 32
};

}  // namespace eqquant
