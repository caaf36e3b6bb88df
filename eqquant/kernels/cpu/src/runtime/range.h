// Products of very large and very small numbers.
//
// Kernels round operands relative to the largest value of a row. The units of this rounding leave the range of
// floats before the product does: near 1e-34, and near 1e30. Then results are zeros, infinities or NaN. Threads look
// for rows of the activation that may have such results, while their values are in a cache. If the magnitudes of an
// operand are the reason, its rows are multiplied by powers of two, and the product is computed again.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "runtime/product.h"

namespace eqquant {

// A flag for each row of the activation.
using RowFlags = std::vector<std::atomic<bool>>;

// True if the results of few rows are checked, and false if the operands are: whichever takes less time.
inline bool checks_results(const Product& p) { return p.m <= p.blocks; }
// Sets the flags of rows with a zero, tiny or infinite result, or NaN, in units `begin` to `end`.
void find_unusual_results(const Product& p, int64_t begin, int64_t end, RowFlags& rows);
// Sets the flags of rows `begin` to `end` of the activation that are out of range.
void find_unusual_rows(const Product& p, int64_t begin, int64_t end, RowFlags& rows);

// A product whose operands are multiplied by powers of two.
class InRange {
  std::vector<int> of_x, of_w;  // The exponents of rows.
  std::vector<float> x, scales;
  Product scaled;

 public:
  InRange(const Product& p, const RowFlags& unusual);
  // False if all operands are in the range of the kernels.
  bool is_needed() const { return !x.empty(); }
  // Computes the product on this thread, and divides its results by the powers of two.
  void run(const Routine& routine) const;
};

}  // namespace eqquant
