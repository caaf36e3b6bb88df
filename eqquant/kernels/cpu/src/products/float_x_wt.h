// The routine of x @ w.T in float32, for any `Vector`.
#pragma once

#include "products/float_x_wt_gemv.h"
#include "products/float_x_wt_panels.h"
#include "products/float_x_wt_tiles.h"
#include "runtime/target.h"

EQQUANT_BEGIN

template <int bits>
void run_bits(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  if (fits_transposed_panels(p))
    return run_panels<bits>(p, plain_x(p, scratch), begin, end);
  const float* x = reinterpret_cast<const float*>(scratch);
  are_few(p) ? run_gemv<bits>(p, x, begin, end) : run_tiles<bits>(p, x, begin, end);
}

inline void run_x_wt(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_codes(p, [&](auto bits) { run_bits<bits>(p, scratch, begin, end); });
}

// Panels need no arrangement of the activation.
inline int64_t x_wt_scratch(const Product& p) {
  return fits_transposed_panels(p) ? plain_scratch(p) : activation_scratch(p);
}
inline void prepare_x_wt(const Product& p, char* scratch, int64_t begin, int64_t end) {
  check_rows(p, begin, end);
  const auto prepare = fits_transposed_panels(p) ? prepare_plain : prepare_activation;
  prepare(p, scratch, begin, end);
}
inline int64_t grain_x_wt(const Product& p) { return fits_transposed_panels(p) ? panel_rows : 8; }

constexpr Routine float_x_wt_routine = {prepare_x_wt, run_x_wt, x_wt_scratch, grain_x_wt};

EQQUANT_END
