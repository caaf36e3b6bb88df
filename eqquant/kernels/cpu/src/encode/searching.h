// A search for the codes of rows with error feedback (the M-algorithm), independent of XLA.
#pragma once

#include <cstdint>

namespace eqquant {

// Chooses a level for each value of a row. The error of a value, divided by the diagonal of `factor`, times the row of
// `factor` is subtracted from later values. The sum of the squares of these errors is small, because up to `count`
// choices of the levels before are kept, each with its own feedback.
//
// The highest `bits` bits of a state are a code, and the others are the codes before it. They are zero at first.
struct Searching {
  const float* x;       // (rows, size)
  const float* scales;  // (rows)
  const float* factor;  // (size, size), upper triangular
  const float* levels;  // the level of each state
  int64_t states;       // a power of 2**bits
  int bits;             // 1 to 4
  int64_t count;
  float* values;  // (rows, size)
  float* errors;  // (rows, size)
  uint8_t* codes;  // (rows, size)
  int64_t rows, size;
};

}  // namespace eqquant
