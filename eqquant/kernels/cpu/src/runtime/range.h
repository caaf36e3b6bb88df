// Products of very large and very small numbers.
//
// Kernels round operands relative to the largest value of a row. The units of this rounding leave the range of
// floats before the product does: near 1e-34, and near 1e30. Then results are zeros, infinities or NaN. Kernels check
// the largest value of each row of the activation, which most of them compute for rounding. Few results are checked
// themselves. If the magnitudes of an operand are out of range, its rows are multiplied by powers of two, and the
// product is computed again.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/product.h"

namespace eqquant {

// Finishes the results of units `begin` to `end`, before offsets are added: multiplies them by a power of two if the
// codes require it, and, if results are checked, sets the flag of the product if one is zero, tiny, infinite or NaN.
void finish_results(const Product& p, int64_t begin, int64_t end);
// True if operands may be out of the range of the kernels, after all rows or all results were checked.
bool may_be_out_of_range(const Product& p);

// A product whose operands are multiplied by powers of two.
class InRange {
  std::vector<int> of_x, of_w;  // The exponents of rows.
  std::vector<float> x, scales;
  Product scaled;

 public:
  explicit InRange(const Product& p);
  // False if all operands are in the range of the kernels.
  bool is_needed() const { return !x.empty(); }
  // Computes the product on this thread, and divides its results by the powers of two.
  void run(const Routine& routine) const;
};

}  // namespace eqquant
