// The routine of x @ w.T in float32, for any `Vector`.

#include "decoder.h"

#include "activation.h"

#include "tiles.h"

#include "columns.h"

template <int bits>
void columns_of(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const float* x = reinterpret_cast<const float*>(scratch);
  are_few(p) ? columns_of_few<bits>(p, x, begin, end) : columns_of_many<bits>(p, x, begin, end);
}

inline void run_columns(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_codes(p, [&](auto bits) { columns_of<bits>(p, scratch, begin, end); });
}

constexpr Routine columns_routine = {prepare_activation, run_columns, activation_scratch, 8};
