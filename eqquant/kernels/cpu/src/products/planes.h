// A row of the activation, whose values are read in the order of the planes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

class Planes {
  const int64_t packed, step;
  int64_t run;
  const float* x;
  std::vector<float> in_order;

 public:
  const int planes;

  // Up to `step` values of a plane are read at once.
  Planes(const Product& p, const float* row, int64_t step)
      : packed(p.packed), step(step), run(p.run), x(row), planes(p.planes()) {
    if (run % step == 0) return;
    in_order.resize(p.columns());
    for_each_run(p, 0, packed, [&](int64_t logical, int64_t position, int64_t length) {
      std::memcpy(&in_order[position], row + logical, length * sizeof(float));
    });
    x = in_order.data(), run = packed;
  }
  // The number of values of each plane that are read from a byte on.
  EQQUANT_INLINE int64_t count(int64_t byte) const { return std::clamp<int64_t>(packed - byte, 0, step); }
  EQQUANT_INLINE const float* at(int64_t byte, int plane) const {
    return x + byte / run * run * planes + plane * run + byte % run;
  }
};

EQQUANT_END
