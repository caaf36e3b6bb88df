// int16 x @ w, in AVX-512 VNNI.
//
// A row of the activation is rounded to int16 with one unit. One instruction multiplies pairs of its values by pairs
// of two rows of the weight. A vector of a panel contains sixteen pairs, one for each column.
//
// If each row of the weight has one scale, the activation is multiplied by the scales before it is rounded, and
// codes are decoded to levels. Otherwise the scales are part of the int16 weights, relative to the largest value of
// a block in the rows of a panel.
//
// Sums of four pairs fit into 32 bits, because the norms of both operands are limited. They are then added as
// floats, which takes no time, because other execution units than for products do it.
#define EQQUANT_TARGET_VNNI
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/scales.h"
#include "microkernels/avx512/vector.h"
#include "microkernels/vnni/add_products.h"
#include "products/int16_levels.h"
#include "products/x_w_panels.h"
#include "runtime/absmax.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

struct OfPairs {
  using Sums = __m512i;
  static constexpr int64_t steps_of_sum = 4;
  // The units of rows of the activation, and of columns.
  const float *x_units, *units;

  static EQQUANT_INLINE Sums zero() { return _mm512_setzero_si512(); }
  static EQQUANT_INLINE Sums multiply_add(__m512 weight, __m512 x, Sums sums) {
    return add_products(sums, _mm512_castps_si512(weight), _mm512_castps_si512(x));
  }
  static EQQUANT_INLINE __m512 add(__m512 result, Sums sums) {
    return _mm512_add_ps(result, _mm512_cvtepi32_ps(sums));
  }
  // Do not multiply the units first, because their product may underflow.
  EQQUANT_INLINE __m512 scaled(__m512 result, int i, int v) const {
    result = _mm512_mul_ps(result, _mm512_loadu_ps(units + v * Vector::size));
    return _mm512_mul_ps(result, _mm512_set1_ps(x_units[i]));
  }
};
constexpr int64_t rows_of_sum = 2 * OfPairs::steps_of_sum;

// The size of an int16 row of the activation, padded with zeros to an odd number of cache lines. Rows that are read
// together must not be a power of two apart, because they would compete for the same cache sets.
int64_t row_size(const Product& p) { return 32 * ((p.rows + 31) / 32 | 1); }

void round_row(const Product& p, const float* x, float per_unit, int16_t* row) {
  const __m512 factor = _mm512_set1_ps(per_unit);
  for (int64_t i = 0; i < row_size(p); i += 16) {
    const __m512 some = _mm512_maskz_loadu_ps(i < p.rows ? first(p.rows - i) : 0, x + i);
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(some, factor));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + i), _mm512_cvtepi32_epi16(whole));
  }
}

// Returns an upper bound for the norms of the values of each sum.
float norm_of_sums(const int16_t* row, int64_t size) {
  static_assert(rows_of_sum == 8);
  __m512 most = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 32) {
    const __m512i some = _mm512_loadu_si512(row + i);
    __m512 squares = _mm512_cvtepi32_ps(_mm512_madd_epi16(some, some));
    squares = _mm512_add_ps(squares, _mm512_permute_ps(squares, 0xB1));
    squares = _mm512_add_ps(squares, _mm512_permute_ps(squares, 0x4E));
    most = _mm512_max_ps(most, squares);
  }
  return std::sqrt(_mm512_reduce_max_ps(most)) * (1 + 1e-6f);
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const bool one_scale = p.blocks == 1;
  const float root = std::sqrt(static_cast<float>(rows_of_sum));
  // The norm of the weight: an upper bound from the levels, or the limit of a panel.
  const float of_weight = one_scale ? levels_of(p).largest * root : largest_norm;
  const float most = largest_norm * largest_norm / of_weight;
  const bool may_be_larger = largest_int16 * root > most;
  ScaledActivation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = activation.row(i);
    int16_t* const row = int16_in(scratch) + i * row_size(p);
    units_in(p, row_size(p), scratch)[i] = round_to_int16(
        activation.check(p, i), most, [&](float per_unit) { round_row(p, x, per_unit, row); },
        [&] { return may_be_larger ? norm_of_sums(row, row_size(p)) : 0; });
  }
}

template <int bits, Scaling scaling>
struct Int16Panel {
  static constexpr int64_t size = Vector::size;
  static constexpr int planes = planes_of(bits);
  // A part of the columns of a panel stays in the first-level cache.
  static constexpr int64_t most_columns = 256, most_rows = 128;
  static constexpr int most_at_once = 3;
  static constexpr bool by_columns = true;
  static constexpr int64_t most_blocks = (most_columns / planes / shortest_block + 16) / 16 * 16;

  const Product& p;
  const float* x;  // Pairs of int16 values.
  const float* x_units;
  const int64_t x_stride;
  const Int16Levels levels;
  const float largest;  // The largest level.
  Space decoded, scales;
  alignas(64) float units[most_columns + side_by_side * size];

  Int16Panel(const Product& p, char* scratch)
      : p(p),
        x(reinterpret_cast<const float*>(scratch)),
        x_units(units_in(p, row_size(p), scratch)),
        x_stride(row_size(p) / 2),
        levels(levels_of(p)),
        largest(largest_level(p)),
        decoded(most_columns * most_rows / 2),
        scales(scaling == Scaling::row ? 1 : most_blocks * most_rows) {
    std::fill(std::begin(units), std::end(units), levels.unit);
  }

  // Writes the scales of sixteen blocks in `rows` rows, divided by the unit of each block. If `rows` is odd, a row
  // of zeros follows. Returns the units.
  __m512 read_scales(int64_t row, int64_t rows, int64_t b, __mmask16 some, float* to) const {
    const __m512 limit = _mm512_set1_ps(std::numeric_limits<float>::max());
    __m512 most = _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; r++) {
      const __m512 of_row = scales_at(p, row + r, b, some);
      _mm512_store_ps(to + r * most_blocks, of_row);
      most = larger(most, of_row);
    }
    most = _mm512_mul_ps(most, _mm512_set1_ps(largest));
    const __mmask16 finite = _mm512_cmp_ps_mask(most, limit, _CMP_LE_OQ);
    __m512 per_unit = _mm512_div_ps(_mm512_set1_ps(largest_int16), most);
    const __mmask16 usable = _mm512_cmp_ps_mask(per_unit, limit, _CMP_LE_OQ) & finite;
    per_unit = _mm512_maskz_mov_ps(usable, per_unit);
    // An upper bound for the square of the norm: all levels are the largest.
    __m512 square = _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; r += rows_of_sum) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t k = r; k < std::min(rows, r + rows_of_sum); k++) {
        const __m512 of_row = _mm512_mul_ps(_mm512_load_ps(to + k * most_blocks), per_unit);
        sum = _mm512_fmadd_ps(of_row, of_row, sum);
      }
      square = _mm512_max_ps(square, sum);
    }
    const __m512 norm = _mm512_mul_ps(_mm512_sqrt_ps(square), _mm512_set1_ps(largest));
    const __m512 smaller =
        _mm512_div_ps(_mm512_set1_ps((largest_norm - 4) * (1 - 1e-6f)), norm);
    per_unit = _mm512_mul_ps(per_unit, _mm512_min_ps(smaller, _mm512_set1_ps(1)));
    for (int64_t r = 0; r < rows; r++) {
      float* const at = to + r * most_blocks;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), per_unit));
    }
    if (rows % 2) _mm512_store_ps(to + rows * most_blocks, _mm512_setzero_ps());
    const __m512 out = _mm512_maskz_div_ps(usable, _mm512_set1_ps(1), per_unit);
    return _mm512_mask_mov_ps(_mm512_set1_ps(NAN), finite, out);
  }

  template <int plane = 0>
  EQQUANT_INLINE void write_units(__m512 of, int64_t v, bool halves) {
    write_vector<planes, plane>(of, units, v, side_by_side * size, halves);
    if constexpr (plane + 1 < planes) write_units<plane + 1>(of, v, halves);
  }

  // Reads the scales of the blocks from byte `begin` on, and writes the units of columns.
  void scale(int64_t row, int64_t rows, int64_t begin, int64_t bytes, bool halves) {
    const int64_t block = p.block_bytes(), first_block = begin / block,
                  blocks = (begin + bytes - 1) / block + 1 - first_block;
    alignas(64) float of_blocks[most_blocks];
    for (int64_t b = 0; b < blocks; b += 16)
      _mm512_store_ps(of_blocks + b, read_scales(row, rows, first_block + b, first(blocks - b),
                                                 scales.data() + b));
    for (int64_t j = 0; j < bytes; j += size) {
      const float* of = of_blocks + (begin + j) / block - first_block;
      write_units(scaling == Scaling::pair ? Vector::halves(of[0], of[1]) : Vector::all(*of),
                  j / size, halves);
    }
  }

  // The levels of two rows times their scales, made at the start of each block. For 8-bit codes: the scales.
  struct Tables {
    __m512i of[scales_at_once(scaling)];
    __m512 scales[2];

    EQQUANT_INLINE void begin(const Product& p, const float* a, const float* b) {
      const auto table = [&](int i) {
        const __m512 levels = _mm512_loadu_ps(p.levels);
        const __m512i of_a = _mm512_cvtps_epi32(_mm512_mul_ps(levels, _mm512_set1_ps(a[i])));
        const __m512i of_b = _mm512_cvtps_epi32(_mm512_mul_ps(levels, _mm512_set1_ps(b[i])));
        alignas(64) static constexpr int16_t low[32] = {
            0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
            32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
        return _mm512_permutex2var_epi16(of_a, _mm512_load_si512(low), of_b);
      };
      if constexpr (bits == 8) {
        scales[0] = scaling == Scaling::pair ? Vector::halves(a[0], a[1]) : Vector::all(*a);
        scales[1] = scaling == Scaling::pair ? Vector::halves(b[0], b[1]) : Vector::all(*b);
      } else {
        for (int i = 0; i < scales_at_once(scaling); i++) of[i] = table(i);
      }
    }
  };

  // Returns the bytes of two rows in 16 bits each: in the low byte, or in the high byte for 8-bit integers.
  static EQQUANT_INLINE __m512i both(const uint8_t* a, const uint8_t* b) {
    const __m512i to_lanes =
        _mm512_setr_epi32(0x00000000, 0x01010101, 0x02020202, 0x03030303, 0x04040404, 0x05050505,
                          0x06060606, 0x07070707, 0x08080808, 0x09090909, 0x0A0A0A0A, 0x0B0B0B0B,
                          0x0C0C0C0C, 0x0D0D0D0D, 0x0E0E0E0E, 0x0F0F0F0F);
    constexpr int at = bits == 8;
    const __m512i of_a = _mm512_broadcast_i32x4(Vector::bytes(a));
    const __m512i of_b = _mm512_broadcast_i32x4(Vector::bytes(b));
    const __m512i out = _mm512_maskz_shuffle_epi8(0x1111111111111111ull << at, of_a, to_lanes);
    return _mm512_mask_shuffle_epi8(out, 0x4444444444444444ull << at, of_b, to_lanes);
  }

  template <int plane>
  static EQQUANT_INLINE __m512i level(__m512i codes, const Tables& tables) {
    const __m512i shifted = plane ? _mm512_srli_epi16(codes, plane * bits) : codes;
    if constexpr (bits == 8) return _mm512_srai_epi16(codes, 8);
    if constexpr (scaling == Scaling::row) return _mm512_permutexvar_epi16(shifted, tables.of[0]);
    // The index is four bits of the code, and a bit for the second row.
    const __m512i index = _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi32(0x000F000F),
                                                    _mm512_set1_epi32(0x00100000), 0xEA);
    const __m512i out = _mm512_permutexvar_epi16(index, tables.of[0]);
    if constexpr (scaling != Scaling::pair) return out;
    return _mm512_mask_permutexvar_epi16(out, 0xFFFF0000, index,
                                         tables.of[scales_at_once(scaling) - 1]);
  }

  template <int plane = 0>
  static EQQUANT_INLINE void write(__m512i codes, const Tables& tables, float* to, int64_t v,
                                   int64_t stride, bool halves) {
    write_vector<planes, plane>(_mm512_castsi512_ps(level<plane>(codes, tables)), to, v, stride,
                                halves);
    if constexpr (plane + 1 < planes) write<plane + 1>(codes, tables, to, v, stride, halves);
  }

  static EQQUANT_INLINE __m512i scaled(const uint8_t* codes, __m512 by) {
    const __m512i values = _mm512_cvtepi8_epi32(Vector::bytes(codes));
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(values), by));
  }

  // (four vectors, pair of rows, vector)
  void decode(Pieces& pieces, int64_t row, int64_t rows, int64_t bytes) {
    const int64_t begin = pieces.begin, stride = (rows + 1) / 2 * side_by_side * size;
    const int64_t block = p.block_bytes() * scales_at_once(scaling), first_block = begin / block;
    const int64_t ahead = p.is_unpacked() ? 0 : rows_at_once * p.packed;
    const bool halves = in_halves(p);
    Tables tables;
    if constexpr (scaling == Scaling::row)
      tables.of[0] = _mm512_load_si512(levels.values);
    else
      scale(row, rows, begin, bytes, halves);
    float* to = decoded.data();
    const float* of_row = scales.data();
    for (int64_t done = 0; done < rows; done += rows_at_once) {
      const int64_t some = std::min<int64_t>(rows_at_once, rows - done);
      const uint8_t* a = pieces.of(row + done, static_cast<int>(some));
      for (int64_t r = 0; r < some; r += 2, a += 2 * pieces.row_bytes) {
        // An odd last row is paired with itself, because the activation has a zero there.
        const uint8_t* b = r + 1 < some ? a + pieces.row_bytes : a;
        int64_t until = 0;
        for (int64_t j = 0; j < bytes; j += size) {
          // Prefetch some rows ahead, because rows are too far apart for the hardware prefetcher.
          if (j % 64 == 0) {
            __builtin_prefetch(a + j + ahead);
            __builtin_prefetch(b + j + ahead);
          }
          if (scaling != Scaling::row && begin + j >= until) {
            const int64_t i = (begin + j) / block;
            const float* of = of_row + (i - first_block) * scales_at_once(scaling);
            tables.begin(p, of, of + most_blocks);
            until = (i + 1) * block;
          }
          if constexpr (bits == 8 && scaling != Scaling::row) {
            const __m512i of_b = _mm512_slli_epi32(scaled(b + j, tables.scales[1]), 16);
            const __m512i pairs =
                _mm512_mask_mov_epi16(scaled(a + j, tables.scales[0]), 0xAAAAAAAA, of_b);
            write_vector<1, 0>(_mm512_castsi512_ps(pairs), to, j / size, stride, false);
          } else {
            write(both(a + j, b + j), tables, to, j / size, stride, halves);
          }
        }
        to += side_by_side * size;
        of_row += 2 * most_blocks;
      }
    }
  }

  void multiply(int vectors, int64_t v, int count, int64_t m, int64_t row, int64_t rows,
                float* const* y, int64_t y_stride) const {
    const int64_t pairs = (rows + 1) / 2;
    multiply_panel<most_at_once>(OfPairs{x_units + m, units + v * size}, vectors, count,
                                 decoded.data() + v * pairs * size, x + m * x_stride + row / 2,
                                 x_stride, pairs, y, y_stride, row > 0);
  }
};

int64_t scratch_size(const Product& p) { return scratch_of(p, row_size(p)); }

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_bits(p, [&](auto bits) {
    with_scaling(p, [&](auto scaling) {
      char* from = const_cast<char*>(scratch);  // Only read.
      row_panels(p, Int16Panel<bits, scaling>(p, from), begin, end);
    });
  });
}

const char* why_not(const Product& p) {
  if (p.exponent) return "floats of 8 bits need a float kernel";
  if (!fits_panels(p, 0, p.packed)) return "rows and blocks must be whole vectors of bytes";
  return nullptr;
}

}  // namespace

EQQUANT_END

namespace eqquant {
extern const Routine int16_x_w_vnni = {vnni::prepare, vnni::run, vnni::scratch_size, always<64>,
                                       vnni::why_not};
}  // namespace eqquant
