// The routine of x @ w.T in float32, for any `Vector`.

#include "decoder.h"

#include "activation.h"

#include "tiles.h"

#include "columns.h"

#include "column_panels.h"

template <int bits>
void columns_of(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  if (fits_column_panels(p))
    return columns_in_panels<bits>(p, plain_x(p, scratch), begin, end);
  const float* x = reinterpret_cast<const float*>(scratch);
  are_few(p) ? columns_of_few<bits>(p, x, begin, end) : columns_of_many<bits>(p, x, begin, end);
}

inline void run_columns(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_codes(p, [&](auto bits) { columns_of<bits>(p, scratch, begin, end); });
}

// Panels need no arrangement of the activation.
inline int64_t columns_scratch(const Product& p) {
  return fits_column_panels(p) ? plain_scratch(p) : activation_scratch(p);
}
inline void prepare_columns(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const auto prepare = fits_column_panels(p) ? prepare_plain : prepare_activation;
  prepare(p, scratch, begin, end);
}
inline int64_t grain_of_columns(const Product& p) { return fits_column_panels(p) ? panel_rows : 8; }

constexpr Routine columns_routine = {prepare_columns, run_columns, columns_scratch,
                                     grain_of_columns};
