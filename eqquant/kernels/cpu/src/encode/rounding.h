// Rounding of floats to dequantized values, independent of XLA.
#pragma once

#include <cstdint>

namespace eqquant {

// The results equal `formats/`, bit for bit, because the operations are the same.
enum class Levels : int64_t { int8, table, ternary, binary };

struct Rounding {
  const float* x;           // (rows, size)
  const float* boundaries;  // of a table: 15, ascending
  const float* levels;      // and the 16 levels between them
  float* y;                 // (rows, size)
  bool* problems;           // (rows): whether something is not finite
  int64_t size, block;      // each block of a row has a scale
  Levels kind;
  float largest_scale;
  // Ternary: values above half of the standard deviation, or half of the mean magnitude, are nonzero. The
  // scale is the mean magnitude of the nonzero values, or of all values.
  bool by_deviation, least_squares;
};

// Rounds rows to int8, with a scale per row, as products in low precision do (`training/rounded/_int8.py`).
struct Int8Rounding {
  const float* x;  // (rows, size)
  int8_t* codes;   // (rows, size)
  float* scales;   // (rows)
  int64_t size;
};

}  // namespace eqquant
