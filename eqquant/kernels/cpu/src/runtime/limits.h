// Measured limits within kernels, as a table that C++ includes and Python reads (`_rules.py`). `eqquant kernels` prints
// it below the rules that choose a kernel.
#pragma once

#include <cstdint>

#define EQQUANT_LIMIT(name, value, meaning) constexpr int64_t name = value;

namespace eqquant {
namespace limits {

EQQUANT_LIMIT(float_in_registers_avx2, 4, "the largest m for which float x@w.T decodes in registers")
EQQUANT_LIMIT(float_in_registers_avx512, 12, "the same with AVX-512")
EQQUANT_LIMIT(float_in_registers_neon, 4, "the same with NEON")
EQQUANT_LIMIT(x_wt_columns_avx2, 8, "float x@w.T decodes panels from m >= columns / limit")
EQQUANT_LIMIT(x_wt_least_avx2, 48, "the least m for such panels")
EQQUANT_LIMIT(x_wt_most_avx2, 96, "the m from which all rows become panels")
EQQUANT_LIMIT(x_wt_columns_avx512, 20, "the same three with AVX-512")
EQQUANT_LIMIT(x_wt_least_avx512, 14, "")
EQQUANT_LIMIT(x_wt_most_avx512, 56, "")
EQQUANT_LIMIT(x_wt_columns_neon, 8, "the same three with NEON")
EQQUANT_LIMIT(x_wt_least_neon, 48, "")
EQQUANT_LIMIT(x_wt_most_neon, 96, "")
EQQUANT_LIMIT(x_wt_short_row, 64, "the columns of rows that are short")
EQQUANT_LIMIT(x_wt_short_avx2, 5, "the least m for panels of short rows")
EQQUANT_LIMIT(x_wt_short_avx512, 6, "the same with AVX-512")
EQQUANT_LIMIT(x_w_panels_avx2, 16, "the least m for which float x@w decodes panels")
EQQUANT_LIMIT(x_w_panels_avx512, 13, "the same with AVX-512")
EQQUANT_LIMIT(x_w_panels_neon, 16, "the same with NEON")
EQQUANT_LIMIT(int16_panels_8_bits, 21, "the least m for which int16 x@w.T decodes panels, for 8 bits")
EQQUANT_LIMIT(int16_panels_4_bits, 42, "the same for 4 bits")
EQQUANT_LIMIT(int16_panels, 96, "the same for 1 and 2 bits")
EQQUANT_LIMIT(int8_in_registers, 8, "the largest m (int8x2: 2 * m) for which exact int8 x@w.T decodes in registers")
EQQUANT_LIMIT(int8_long_block, 128, "the least bytes of the blocks that int8x2 x@w.T with VNNI or AMX multiplies exactly")
EQQUANT_LIMIT(tiles_of_blocks, 2, "int8 x@w.T with AMX does so if m <= limit * bytes of a block")
EQQUANT_LIMIT(int8_short_row, 128, "rows of at most these bytes become panels if these pay, also for few m")
EQQUANT_LIMIT(int8_transposed, 40, "int8 x@w.T with VNNI transposes panels if limit * m >= columns")
EQQUANT_LIMIT(offsets_by_rows, 4, "the largest m for which offsets are multiplied as they are stored")
EQQUANT_LIMIT(bytes_in_cache, 1 << 24, "the bytes of codes that may be in a cache")
EQQUANT_LIMIT(work_of_a_thread, 5 << 20, "products with fewer multiplications run on one thread")
EQQUANT_LIMIT(rows_of_decoding, 16, "decoding counts as the multiplications of this number of rows")
EQQUANT_LIMIT(values_of_a_thread, 1 << 17, "fewer values are encoded, rounded or transposed by one thread")
EQQUANT_LIMIT(rows_of_long_parts, 16, "x@w with fewer rows gives each thread long parts of rows")
EQQUANT_LIMIT(read_ahead, 3 << 18, "the bytes of the next weight that a waiting thread reads ahead")
EQQUANT_LIMIT(long_part, 1 << 10, "the bytes of a long part")

}  // namespace limits
}  // namespace eqquant
