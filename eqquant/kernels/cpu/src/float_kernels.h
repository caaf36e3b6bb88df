// The routines of products in float32, for any `Vector`.

#include "decoder.h"

#include "activation.h"

#include "columns.h"

#include "tiles.h"

#include "rows.h"

template <int bits>
void columns_of(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const float* x = reinterpret_cast<const float*>(scratch);
  are_few(p) ? columns_of_few<bits>(p, x, begin, end) : columns_of_many<bits>(p, x, begin, end);
}

inline void run_columns(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  switch (p.bits) {
    case 1: return columns_of<1>(p, scratch, begin, end);
    case 2: return columns_of<2>(p, scratch, begin, end);
    case 4: return columns_of<4>(p, scratch, begin, end);
    case 8: return columns_of<8>(p, scratch, begin, end);
  }
}

inline void run_rows(const Product& p, const char*, int64_t begin, int64_t end) {
  switch (p.bits) {
    case 1: return rows<1>(p, begin, end);
    case 2: return rows<2>(p, begin, end);
    case 4: return rows<4>(p, begin, end);
    case 8: return rows<8>(p, begin, end);
  }
}

inline int64_t rows_scratch(const Product&) { return 0; }
inline void prepare_rows(const Product&, char*, int64_t, int64_t) {}
