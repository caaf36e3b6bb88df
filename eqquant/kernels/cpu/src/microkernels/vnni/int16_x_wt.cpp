// int16 x @ w.T, for weights with a scale for each block, in AVX-512 VNNI.
//
// A row of the activation is rounded to int16 with one unit. 64 bytes of codes are 32 lanes of 16 bits. `steps`
// shifts move one code after the other to the lowest bits of each lane.
//
// For few rows of the activation, a lookup in registers decodes codes to int16 levels, and sums of products are
// multiplied by the scale of their block. For more rows, four rows of the weight are decoded once for all rows of
// the activation, into the first-level cache, a part of the columns at a time. Then the scales are part of the
// int16 values, which share one unit per part. Sums need no multiplication, which would take as long as 32
// products.
//
// Sums of products fit into 32 bits, because the norms of both operands are limited by `norm_of_lanes`.
#define EQQUANT_TARGET_VNNI
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "decode/scales.h"
#include "microkernels/avx512/dense_codes.h"
#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/scales.h"
#include "microkernels/avx512/vector.h"
#include "microkernels/vnni/add_products.h"
#include "microkernels/vnni/blocked_rows.h"
#include "products/by_tiles.h"
#include "products/int16_levels.h"
#include "runtime/absmax.h"
#include "runtime/limits.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

// Three rows of the activation are multiplied by four rows of the weight: registers hold no more sums.
constexpr int64_t most_at_once = 3;

// True if codes are unpacked in registers. For more rows of the activation, that would be repeated.
bool reads_stored(const Product& p) { return p.is_unpacked() && p.m <= most_at_once && are_dense(p); }

// True if the offsets are added while rows are multiplied.
bool adds_offsets(const Product& p) { return p.m <= most_at_once && RowOffsets::serve(p); }

int steps_of(const Product& p) { return 16 / p.bits; }
// A group of rows of the activation is (chunk, step, row, lane).
int64_t row_size(const Product& p) { return chunks_of(p) * steps_of(p) * (chunk / 2); }

int64_t group_of(const Product& p, int64_t row) {
  return std::min(most_at_once, p.m - row / most_at_once * most_at_once);
}

// The number of rows of the activation from which the weight is decoded once for all rows. The more codes a lookup
// decodes at once, the larger is the measured number.
int64_t many(const Product& p) {
  return p.bits == 8 ? limits::int16_panels_8_bits : p.bits == 4 ? limits::int16_panels_4_bits : limits::int16_panels;
}

// The largest number of values of a row that are decoded at once, and the bytes of the activation that stay in the
// second-level cache. A larger activation takes several passes.
constexpr int64_t panel_size = 2048, cached_bytes = 5 << 17;

// The number of steps per sum of decoded rows. A sum is converted to floats, which takes time. Long sums have larger
// norms, so values would be smaller.
constexpr int steps_in_memory = 4;
int steps_of_sum(const Product& p) { return p.m < many(p) ? steps_of(p) : steps_in_memory; }

// Rounds a row of the activation to int16. A lane holds the codes of two bytes, and the codes of the second byte
// come `planes` steps after the codes of the first.
void round_row(const Product& p, const float* x, float per_unit, int16_t* row, int64_t stride) {
  const int planes = p.planes(), steps = steps_of(p);
  if (p.packed % chunk)
    for (int step = 1; step <= steps; step++)
      _mm512_storeu_si512(row + (chunks_of(p) * steps - step) * stride, _mm512_setzero_si512());
  const __m512 factor = _mm512_set1_ps(per_unit);
  const auto load = [&](const float* at, int64_t count) {
    const __mmask16 some = count > 0 ? first(count) : 0;
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(some, at), factor));
  };
  const __m512i of_even =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i of_odd = _mm512_add_epi32(of_even, _mm512_set1_epi32(1));
  for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t planar, int64_t length) {
    const int64_t plane = planar / p.packed, byte = planar % p.packed;
    for (int64_t i = 0, count; i < length; i += count) {
      // Runs begin at an even byte, because they have an even number of bytes, or there is only one run.
      const int64_t j = byte + i;
      count = std::min({int64_t{32}, length - i, chunk - j % chunk});
      const __m512i low = load(x + logical + i, count);
      const __m512i high = load(x + logical + i + 16, count - 16);
      int16_t* to = row + (j / chunk * steps + plane) * stride + j % chunk / 2;
      const __m512i even = _mm512_permutex2var_epi32(low, of_even, high);
      const __m512i odd = _mm512_permutex2var_epi32(low, of_odd, high);
      _mm256_mask_storeu_epi16(to, first((count + 1) / 2), _mm512_cvtepi32_epi16(even));
      to += planes * stride;
      _mm256_mask_storeu_epi16(to, first(count / 2), _mm512_cvtepi32_epi16(odd));
    }
  });
}

// Returns an upper bound for the norms of all lanes. `steps` registers contribute to a lane.
float norm_of_lanes(const int16_t* row, int64_t stride, int64_t registers, int steps) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < registers; i += steps) {
    __m512i sum = _mm512_setzero_si512();
    for (int step = 0; step < steps && i + step < registers; step++, row += stride) {
      // A quarter, rounded up, because the squares would not fit.
      const __m512i magnitudes = _mm512_abs_epi16(_mm512_loadu_si512(row));
      const __m512i quarters =
          _mm512_srli_epi16(_mm512_add_epi16(magnitudes, _mm512_set1_epi16(3)), 2);
      sum = _mm512_dpwssd_epi32(sum, quarters, quarters);
    }
    most = _mm512_max_epu32(most, sum);
  }
  return 4 * std::sqrt(static_cast<float>(_mm512_reduce_max_epu32(most)));
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const int steps = steps_of_sum(p);
  // The norm of a lane of the weight: the limit of `decode_row`, or an upper bound from the levels.
  const float of_weight =
      p.m < many(p) ? levels_of(p).largest * std::sqrt(2.0f * steps) : largest_norm;
  const float most = largest_norm * largest_norm / of_weight;
  Activation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = activation.row(i);
    const int64_t in_group = i % most_at_once, stride = group_of(p, i) * (chunk / 2);
    int16_t* row = int16_in(scratch) + (i - in_group) * row_size(p) + in_group * (chunk / 2);
    const float absmax = check_row(p, x);
    units_in(p, row_size(p), scratch)[i] = round_to_int16(
        absmax, most, [&](float per_unit) { round_row(p, x, per_unit, row, stride); },
        [&] { return norm_of_lanes(row, stride, chunks_of(p) * steps_of(p), steps); });
  }
}

template <int bits, int step>
EQQUANT_INLINE __m512i decode(__m512i table, __m512i codes) {
  if constexpr (bits == 8)
    return _mm512_srai_epi16(step ? codes : _mm512_slli_epi16(codes, 8), 8);
  const __m512i shifted = step ? _mm512_srli_epi16(codes, step * bits) : codes;
  return _mm512_permutexvar_epi16(shifted, table);
}

EQQUANT_INLINE __m512i codes_at(const Product& p, int64_t row, int64_t j) {
  return _mm512_maskz_loadu_epi8(first_bytes(p.packed - j), p.codes + row * p.packed + j);
}

// Codes of `rows` rows, decoded in registers.
template <int bits, int rows, class Stored>
struct InRegisters : BlockedRows<rows, Stored> {
  __m512i table;
  RowOffsets& offsets;
  int64_t row;

  EQQUANT_INLINE InRegisters(const Product& p, const Int16Levels& levels, const ChunkScales& blocks,
                             const Stored& stored, NumbersInOrder& in_order, RowOffsets& offsets, int64_t row)
      : BlockedRows<rows, Stored>(p, levels.unit, blocks, stored, in_order, row),
        table(_mm512_load_si512(levels.values)), offsets(offsets), row(row) {}
  EQQUANT_INLINE void read() {
    if (!this->chunks) this->next_span();
    BlockedRows<rows, Stored>::read();
  }
  EQQUANT_INLINE void next() { this->next_chunk(), this->next_group(); }
  template <int step>
  EQQUANT_INLINE __m512i weight(int r) const {
    return decode<bits, step>(table, this->of[r]);
  }
  template <int count>
  EQQUANT_INLINE void add(int r, const __m512i (&products)[count], __m512 (&sums)[count]) const {
    const __m512 scale = this->scale(r);
    for (int i = 0; i < count; i++)
      sums[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[i]), scale, sums[i]);
  }
  template <int count>
  EQQUANT_INLINE void add_offsets(int64_t first_of_x, __m512 (&sums)[rows][count]) const {
    offsets.add(row, this->scales, first_of_x, sums);
  }
};

// Decoded rows: (step, row, lane).
template <int steps, int rows>
struct InMemory {
  const int16_t* values;
  const float* units;

  EQQUANT_INLINE void read() const {}
  template <int step>
  EQQUANT_INLINE __m512i weight(int r) const {
    __m512i out = _mm512_load_si512(values + (step * rows + r) * (chunk / 2));
    asm("" : "+v"(out));  // Otherwise GCC reads it again for each product.
    return out;
  }
  template <int count>
  EQQUANT_INLINE void add(int, const __m512i (&products)[count], __m512 (&sums)[count]) const {
    for (int i = 0; i < count; i++)
      sums[i] = _mm512_add_ps(_mm512_cvtepi32_ps(products[i]), sums[i]);
  }
  EQQUANT_INLINE void next() { values += steps * rows * (chunk / 2); }
  EQQUANT_INLINE float unit_of(int r) const { return units[r]; }
  template <int count>
  EQQUANT_INLINE void add_offsets(int64_t, __m512 (&)[rows][count]) const {}
};

// Products are summed for `steps` steps. Values in registers are passed as arguments: products/float_x_wt_gemv.h has
// the reason.
template <int steps, int rows, int count>
struct Tile {
  using Products = __m512i[rows][count];
  using Sums = __m512[rows][count];

  template <int step, class Weights>
  static EQQUANT_INLINE void multiply(const Weights& weights, const int16_t* x, Products& products,
                                      Sums& sums) {
    __m512i weight[rows];
    for (int r = 0; r < rows; r++) weight[r] = weights.template weight<step>(r);
    for (int i = 0; i < count; i++) {
      const __m512i some = _mm512_loadu_si512(x + (step * count + i) * (chunk / 2));
      for (int r = 0; r < rows; r++)
        products[r][i] = step ? add_products(products[r][i], weight[r], some)
                              : _mm512_madd_epi16(weight[r], some);
    }
    if constexpr (step + 1 < steps)
      multiply<step + 1>(weights, x, products, sums);
    else
      for (int r = 0; r < rows; r++) weights.add(r, products[r], sums[r]);
  }

  // Multiplies the rows that `make` returns by `count` rows of the activation `x`, which begin with row `first_of_x`
  // and have `units`. Writes the results to `y`, or adds them.
  template <class Make>
  static void run(const Make& make, int64_t first_of_x, const int16_t* x, const float* units, int64_t times,
                  bool adds, float* y, int64_t y_stride) {
    auto weights = make();  // A local variable, because compilers leave members of arguments in memory.
    Sums sums;
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < count; i++) sums[r][i] = _mm512_setzero_ps();
    do {  // At least one iteration: a loop that may be empty compiles to slower code.
      weights.read();
      Products products;
      multiply<0>(weights, x, products, sums);
      weights.next();
      x += steps * count * (chunk / 2);
    } while (--times);
    // Do not multiply the units first, because their product may underflow.
    Sums all;  // Not `sums`, which would not stay in registers.
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < count; i++)
        all[r][i] = _mm512_mul_ps(_mm512_mul_ps(sums[r][i], _mm512_set1_ps(weights.unit_of(r))),
                                  _mm512_set1_ps(units[i]));
    weights.add_offsets(first_of_x, all);
    for (int i = 0; i < count; i++, y += y_stride) {
      alignas(16) float of[4];
      if constexpr (rows == 4)
        _mm_store_ps(of, Vector::sum_four(all[0][i], all[1][i], all[2][i], all[3][i]));
      else
        for (int r = 0; r < rows; r++) of[r] = Vector::sum(all[r][i]);
      if (adds)
        for (int r = 0; r < rows; r++) of[r] += y[r];
      std::memcpy(y, of, rows * sizeof(float));
    }
  }
};

struct alignas(64) Register {
  int16_t values[chunk / 2];
};

// Returns the levels of the codes that begin at bit `shift` of each lane.
EQQUANT_INLINE __m512 level(__m512 table, __m512i codes, int shift) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, shift), table);
}

// Decodes chunks `begin` to `end` of a row of the weight to int16, times the scales. Returns the unit.
template <int bits>
float decode_row(const Product& p, const ChunkScales& blocks, float largest, int64_t row,
                 const float* scales, int64_t begin, int64_t end, int16_t* to,
                 int64_t stride) {
  const __m512 levels = _mm512_loadu_ps(p.levels);
  const Place start(blocks, begin), last(blocks, end - 1);
  const auto for_each_chunk = [&](float per_unit, auto use) {
    Place place = start;
    for (int64_t c = begin; c < end; c++, place.next(blocks))
      use(codes_at(p, row, c * chunk),
          _mm512_mul_ps(blocks.read(scales, place.block), _mm512_set1_ps(per_unit)));
  };
  const int64_t some = std::min(p.blocks, last.block + blocks.of_chunk) - start.block;
  // Scales of integers are fractions of 15 bits, and codes are shifted into the high bits of int16.
  const int spare = spare_bits(largest);
  const float most = absmax_of(scales + start.block, some) * (bits == 8 ? static_cast<float>(128 >> spare) : largest);
  if (!std::isfinite(most)) return NAN;
  float per_unit = largest_int16 / most;
  if (!std::isfinite(per_unit)) per_unit = 0;
  // The square of the largest norm of a lane. See `norm_of_lanes`.
  __m512 square = _mm512_setzero_ps(), before = _mm512_setzero_ps();
  for_each_chunk(per_unit, [&](__m512i codes, __m512 scale) {
    if constexpr (bits == 8) {
      // Integers need no table. Two chunks have the steps of a sum: overlapping pairs are an upper bound.
      const __m512i low = decode<8, 0>(codes, codes), high = decode<8, 1>(codes, codes);
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_dpwssd_epi32(_mm512_madd_epi16(low, low), high, high));
      const __m512 of_chunk = _mm512_mul_ps(sum, _mm512_mul_ps(scale, scale));
      square = _mm512_max_ps(square, _mm512_add_ps(before, of_chunk));
      before = of_chunk;
      return;
    }
    __m512 sum = _mm512_setzero_ps();
    for (int shift = 0, step = 1; shift < 16; shift += bits, step++) {
      const __m512 low = level(levels, codes, shift);
      const __m512 high = level(levels, codes, shift + 16);
      sum = _mm512_fmadd_ps(low, low, _mm512_fmadd_ps(high, high, sum));
      if (step % steps_in_memory) continue;
      square = _mm512_max_ps(square, _mm512_mul_ps(sum, _mm512_mul_ps(scale, scale)));
      sum = _mm512_setzero_ps();
    }
  });
  per_unit *= shrunk(std::sqrt(_mm512_reduce_max_ps(square)), largest_norm);
  const __m512 to_fraction = _mm512_set1_ps(static_cast<float>(128 >> spare));
  const __m128i up = _mm_cvtsi32_si128(spare), to_high = _mm_cvtsi32_si128(8 + spare);
  for_each_chunk(per_unit, [&](__m512i codes, __m512 scale) {
    if constexpr (bits == 8) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(scale, to_fraction));
      const __m512i fraction = _mm512_mask_mov_epi16(whole, 0xAAAAAAAA, _mm512_slli_epi32(whole, 16));
      const __m512i high = _mm512_sll_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(-256)), up);
      _mm512_store_si512(to, _mm512_mulhrs_epi16(_mm512_sll_epi16(codes, to_high), fraction));
      _mm512_store_si512(to + stride, _mm512_mulhrs_epi16(high, fraction));
      to += 2 * stride;
      return;
    }
    const auto value = [&](int shift) {
      return _mm512_cvtps_epi32(_mm512_mul_ps(level(levels, codes, shift), scale));
    };
    for (int shift = 0; shift < 16; shift += bits, to += stride)
      _mm512_store_si512(to, _mm512_mask_mov_epi16(value(shift), 0xAAAAAAAA,
                                                   _mm512_slli_epi32(value(shift + 16), 16)));
  });
  return per_unit > 0 ? 1 / per_unit : 0;
}

// The activation: groups of rows that are multiplied at once.
struct Groups {
  const Product& p;
  const int16_t* x;
  const float* units;

  Groups(const Product& p, char* scratch) : p(p), x(int16_in(scratch)), units(units_in(p, row_size(p), scratch)) {}

  // Multiplies rows `begin` to `end` by the `rows` rows of the weight that `make` returns, `times` times `steps` steps
  // from step `first` on. Writes the results, or adds them.
  template <int steps, int rows, class Make>
  void multiply(const Make& make, int64_t row, int64_t begin, int64_t end, int64_t first, int64_t times,
                bool adds) const {
    for (int64_t i = begin; i < end; i += most_at_once)
      with_constant<most_at_once>(static_cast<int>(group_of(p, i)), [&](auto count) {
        Tile<steps, rows, count>::run(make, i, x + i * row_size(p) + first * count * (chunk / 2), units + i, times,
                                      adds, p.y + i * p.rows + row, p.rows);
      });
  }

  // The same for decoded rows.
  template <int rows>
  __attribute__((noinline)) void multiply_decoded(const int16_t* values, const float* of_weight, int64_t row,
                                                  int64_t begin, int64_t end, int64_t first, int64_t steps) const {
    const auto some = [&](auto at_once, int64_t from, int64_t times) {
      const auto make = [&] { return InMemory<at_once, rows>{values + from * rows * (chunk / 2), of_weight}; };
      multiply<at_once, rows>(make, row, begin, end, first + from, times, first + from > 0);
    };
    const int64_t rest = steps % steps_in_memory;
    if (steps > rest) some(std::integral_constant<int, steps_in_memory>(), 0, steps / steps_in_memory);
    if (rest) some(std::integral_constant<int, steps_in_memory / 2>(), steps - rest, 1);
  }
};

template <int bits>
struct Rows {
  static constexpr int steps = 16 / bits;
  static constexpr int64_t of_panel = panel_size / (steps * (chunk / 2));
  const Product& p;
  const Groups groups;
  const Int16Levels levels;
  const ChunkScales blocks;
  std::vector<float> buffer;
  std::vector<Register> decoded;

  Rows(const Product& p, char* scratch)
      : p(p),
        groups(p, scratch),
        levels(levels_of(p)),
        blocks(p),
        buffer(p.scale_buffer(4)),
        decoded(p.m >= many(p) ? 4 * panel_size / (chunk / 2) : 0) {}

  template <class Stored>
  void few(const Stored& stored, NumbersInOrder& scales, RowOffsets& offsets, int64_t row) {
    // Inlined: for rows of 256 weights, a call takes 12 to 15% of the time (Zen 4).
    const auto make = [&]() __attribute__((always_inline)) {
      return InRegisters<bits, 4, Stored>(p, levels, blocks, stored, scales, offsets, row);
    };
    groups.multiply<steps, 4>(make, row, 0, p.m, 0, chunks_of(p), false);
  }

  // Chunks `c` to `c + chunks`.
  template <int rows>
  void panel(int64_t row, int64_t begin, int64_t end, int64_t c, int64_t chunks) {
    const float* scales = scales_of(p, row, rows, buffer.data());
    const float largest = largest_level(p);
    float of_weight[rows];
    for (int r = 0; r < rows; r++)
      of_weight[r] = decode_row<bits>(p, blocks, largest, row + r, scales + r * p.blocks, c,
                                      c + chunks, decoded[r].values, rows * (chunk / 2));
    // Prefetch the next rows, because these parts of rows are too short for the hardware prefetcher.
    for (int r = 0; r < rows; r++)
      for (int64_t j = c; j < c + chunks; j++)
        __builtin_prefetch(p.codes + (row + rows + r) * p.packed + j * chunk, 0, 2);
    groups.multiply_decoded<rows>(decoded[0].values, of_weight, row, begin, end, c * steps, chunks * steps);
  }
};

// Returns the size of equal pieces of at most `most`. The last piece may be smaller.
int64_t evenly(int64_t count, int64_t most) {
  const int64_t pieces = (count + most - 1) / most;
  return (count + pieces - 1) / pieces;
}

template <int bits>
void all_rows(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  Rows<bits> of(p, const_cast<char*>(scratch));  // Only read.
  const auto few = [&](const auto& stored) {
    NumbersInOrder scales(p.scales, p.blocks, end, false);  // Decoded once for all groups of rows of the activation.
    RowOffsets offsets(p, end);
    by_tiles<4>(begin, end, [&](int64_t row) { of.few(stored, scales, offsets, row); });
  };
  if constexpr (bits >= 4)  // Others are stored as they are read.
    if (reads_stored(p)) return few(DenseCodes<bits == 8>(p));
  if (p.m < many(p)) return few(WholeBytes(p));
  // An even number, so that sums of decoded rows have the same steps in all panels.
  const int64_t chunks = (evenly(chunks_of(p), of.of_panel) + 1) / 2 * 2, bytes = chunks * steps_of(p) * chunk;
  const int64_t groups = (p.m + most_at_once - 1) / most_at_once;
  const int64_t in_turn = most_at_once * evenly(groups, cached_bytes / bytes / most_at_once);
  for (int64_t i = 0; i < p.m; i += in_turn)
    for (int64_t c = 0; c < chunks_of(p); c += chunks) {
      // Panels do not overlap, because all but the first add to the results.
      const int64_t last = std::min(p.m, i + in_turn), some = std::min(chunks, chunks_of(p) - c);
      int64_t row = begin;
      for (; row + 4 <= end; row += 4) of.template panel<4>(row, i, last, c, some);
      for (; row < end; row++) of.template panel<1>(row, i, last, c, some);
    }
}

int64_t scratch_size(const Product& p) { return scratch_of(p, row_size(p)); }

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_bits(p, [&](auto bits) { all_rows<bits>(p, scratch, begin, end); });
}

const char* why_not(const Product& p) {
  if (p.exponent) return "floats of 8 bits need a float kernel";
  if (p.rows < rows_of_tile) return "there must be at least 8 rows";
  if (!p.fits_in_lanes(chunk) || (p.bits < 8 && p.run % 2))
    return "blocks must divide 64 bytes, or be a multiple of them";
  return nullptr;
}

}  // namespace

EQQUANT_END

namespace eqquant {
extern const Routine int16_x_wt_vnni = {vnni::prepare, vnni::run, vnni::scratch_size, always<8>,
                                        vnni::why_not, vnni::reads_stored, vnni::adds_offsets};
}  // namespace eqquant
