// Floats to what they are once quantized and dequantized. Nothing here knows of XLA.
#pragma once

#include <cstdint>

namespace eqquant {

// The numbers are those of `formats/`, bit for bit: operation by operation the same.
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
  // Ternary: nonzero is what exceeds half the standard deviation, or half the mean
  // magnitude; the scale is the mean magnitude of that, or of all.
  bool by_deviation, least_squares;
};

}  // namespace eqquant
