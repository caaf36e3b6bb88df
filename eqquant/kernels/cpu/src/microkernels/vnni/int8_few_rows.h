// int8 x @ w.T for one or two rows of the activation and weights with a scale for each block, in AVX-512 VNNI.
//
// A lookup in registers decodes codes to int8 levels. The activation is rounded to int8, or to int16 in two parts, with
// a unit for each block of the weight, at most 64 bytes of its codes. Sums of products are multiplied by both units.
//
// Levels have an offset, because the instruction reads them as unsigned. Sums start with the correction. Integer codes
// are such levels, and need no lookup.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "decode/levels.h"
#include "decode/scales.h"
#include "microkernels/avx512/dense_codes.h"
#include "microkernels/avx512/mask.h"
#include "microkernels/avx512/scales.h"
#include "microkernels/avx512/vector.h"
#include "microkernels/vnni/blocked_rows.h"
#include "microkernels/vnni/int8_vector.h"
#include "products/by_tiles.h"
#include "products/int8_levels.h"
#include "products/planes.h"
#include "products/unrolled.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace few_rows {

// The most rows of the activation: with four rows of the weight, registers hold no more sums.
constexpr int most_rows = 2;
// The most chunks of a block whose products have one sum, which int32 holds. Only int8 levels that were unpacked, which
// have long blocks: with short ones, a loop over one chunk takes 5% of the time.
template <int bits, class Stored>
constexpr int64_t most_chunks = bits == 8 && std::is_same_v<Stored, UnpackedBytes> ? 16 : 1;
// Narrower codes are not multiplied by two parts of the activation: each part adds tiles to the library.
constexpr int least_bits_of_parts = 4;

// True if this is faster than rounding rows of the weight to int8. Two parts of the activation need exact levels.
inline bool serves(const Product& p) {
  if (p.m > most_rows || p.rows < rows_of_tile || !p.fits_in_lanes(chunk)) return false;
  if (p.exponent || is_exact_int8(p)) return false;
  return p.parts == 1 || (p.bits >= least_bits_of_parts && has_int8_levels(p));
}

// True if codes are unpacked in registers.
inline bool reads_stored(const Product& p) { return serves(p) && are_dense(p); }

inline int64_t most_chunks_of(const Product& p) {
  return p.bits == 8 && p.is_unpacked() && !reads_stored(p) ? most_chunks<8, UnpackedBytes> : 1;
}

// The bytes of a chunk whose values share a unit: a block of codes of fewer than 8 bits, or the chunk.
inline int64_t bytes_of_unit(const Product& p) {
  return p.blocks > 1 && p.bits < 8 ? std::min(chunk, p.block_bytes()) : chunk;
}

// The bytes of 8-bit codes are at least `zero`: unpacked codes are read as they are, and others have the middle added.
struct Levels : UnsignedLevels {
  explicit Levels(const Product& p) : UnsignedLevels(p) {
    if (p.bits == 8 && !reads_stored(p)) zero = Int8Vector::middle;
  }
};

// Calls `use(values, plane)` for the values of each plane from a byte on.
template <class Use>
EQQUANT_INLINE void read(const Planes& x, int64_t byte, const Use& use) {
  const __mmask16 some = first(x.count(byte));
  for (int plane = 0; plane < x.planes; plane++) use(_mm512_maskz_loadu_ps(some, x.at(byte, plane)), plane);
}

// The activation is chunk by chunk. A chunk has registers of 64 bytes: int8 values (plane, row, part), and the
// corrections of the sums (row, part), which the first chunk of a group has for the whole group.
struct ChunkOfX {
  int rows, parts, planes;

  constexpr int sums() const { return rows * parts; }
  constexpr int correction(int sum) const { return planes * sums() + sum; }
  constexpr int64_t bytes() const { return correction(sums()) * chunk; }
};
inline ChunkOfX chunk_of_x(const Product& p) { return {static_cast<int>(p.m), p.parts, p.planes()}; }
// Behind the chunks, each row of the activation has the units of its groups (`BlockedRows`), which are read as spans.
inline int64_t units_of_row(const Product& p) { return std::max(p.blocks, chunks_of(p)) + 16; }
inline int64_t scratch_size(const Product& p) {
  if (p.m > most_rows) return 0;
  return chunks_of(p) * chunk_of_x(p).bytes() + p.m * units_of_row(p) * int64_t{sizeof(float)};
}
inline int64_t units_at(const Product& p, int64_t row) {
  return chunks_of(p) * chunk_of_x(p).bytes() + row * units_of_row(p) * int64_t{sizeof(float)};
}

// The largest rounded value. The high part of int16 is the upper byte of the nearest multiple of 256.
constexpr float most_of[] = {0, 127, 127 * 256};
EQQUANT_INLINE __m128i high_part(__m512i whole) {
  return _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8));
}
EQQUANT_INLINE __m512i whole_of(__m512i high, __m512i low) {
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

// Returns the largest magnitude of some bytes of all planes.
EQQUANT_INLINE float largest_of(const Planes& x, int64_t begin, int64_t end, int64_t step) {
  __m512 most = _mm512_setzero_ps();
  for (int64_t i = begin; i < end; i += step)
    read(x, i, [&](__m512 values, int) { most = larger(most, values); });
  const auto bits = _mm512_reduce_max_epi32(_mm512_castps_si512(most));  // NaN is the largest.
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
}

// Rounds the values of a chunk of row `i`, and writes the corrections. `size` bytes have one unit, unless all have the
// unit `common`. `units` has one for each `of_unit` bytes, times the unit of levels.
template <int parts>
void round_chunk(const Planes& x, int64_t byte, int64_t size, int64_t step, const Units* common, const Levels& levels,
                 const ChunkOfX& shape, int i, char* to, int64_t of_unit, float* units) {
  const auto write = [&](int plane, int part, int64_t at, __m128i bytes) {
    char* const place = to + (plane * shape.sums() + i * parts + part) * chunk + at;
    // A masked store takes many times as long.
    step < 16 ? std::memcpy(place, &bytes, step) : std::memcpy(place, &bytes, 16);
  };
  for (int64_t begin = 0; begin < chunk; begin += size) {
    const Units of =
        common ? *common : Units(largest_of(x, byte + begin, byte + begin + size, step), most_of[parts]);
    for (int64_t j = begin; j < begin + size; j += of_unit) *units++ = of.unit * levels.unit;
    const __m512 factor = _mm512_set1_ps(of.per_unit);
    for (int64_t j = begin; j < begin + size; j += step)
      read(x, byte + j, [&](__m512 values, int plane) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(values, factor));
        if (parts == 2) write(plane, 0, j, high_part(whole));
        write(plane, parts - 1, j, _mm512_cvtepi32_epi8(whole));  // The lowest byte.
      });
  }
  for (int sum = i * parts; sum < (i + 1) * parts; sum++) {
    __m512i correction = _mm512_setzero_si512();
    for (int plane = 0; plane < x.planes; plane++)
      correction = _mm512_dpbusd_epi32(correction, _mm512_set1_epi8(static_cast<char>(levels.zero)),
                                       _mm512_loadu_si512(to + (plane * shape.sums() + sum) * chunk));
    _mm512_storeu_si512(to + shape.correction(sum) * chunk, _mm512_sub_epi32(_mm512_setzero_si512(), correction));
  }
}

// Adds the corrections of a chunk of row `i` to those of the first chunk of its group.
inline void add_corrections(const ChunkOfX& shape, int64_t i, const char* from, char* to) {
  for (int64_t sum = i * shape.parts; sum < (i + 1) * shape.parts; sum++) {
    const int64_t at = shape.correction(static_cast<int>(sum)) * chunk;
    _mm512_storeu_si512(to + at, _mm512_add_epi32(_mm512_loadu_si512(to + at), _mm512_loadu_si512(from + at)));
  }
}

// Rounds rows of the activation of `of`, which `arrange` brings into the order of the columns of `p`.
template <class Arrange>
void prepare_rows(const Product& of, const Product& p, char* scratch, int64_t begin, int64_t end,
                  const Arrange& arrange) {
  const int64_t size = bytes_of_unit(p), step = std::min<int64_t>(size, 16);
  const Levels levels(p);
  const ChunkOfX shape = chunk_of_x(p);
  const ChunkScales blocks(p, most_chunks_of(p));
  Activation activation(of);
  for (int64_t i = begin; i < end; i++) {
    const float* const row = activation.row(i);
    const Units of_row(check_row(of, row), most_of[1]);
    const Planes x(p, arrange(row), step);
    const auto round = p.parts == 1 ? round_chunk<1> : round_chunk<2>;
    float* units = reinterpret_cast<float*>(scratch + units_at(p, i));
    for (int64_t c = 0; c < chunks_of(p); c += blocks.chunks_of_group, units += blocks.of_chunk) {
      char* const group = scratch + c * shape.bytes();
      const bool is_long = blocks.chunks_of_group > 1;
      const float largest = is_long ? largest_of(x, c * chunk, (c + blocks.chunks_of_group) * chunk, step) : 0;
      const Units of_group(largest, most_of[p.parts]);
      const Units* const common = p.rounds_x && p.parts == 1 ? &of_row : is_long ? &of_group : nullptr;
      for (int64_t j = 0; j < blocks.chunks_of_group; j++) {
        char* const to = group + j * shape.bytes();
        round(x, (c + j) * chunk, size, step, common, levels, shape, static_cast<int>(i), to, chunk / blocks.of_chunk,
              units);
        if (j) add_corrections(shape, i, to, group);
      }
    }
  }
}

inline void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  prepare_rows(p, p, scratch, begin, end, [](const float* row) { return row; });
}

// The operands of all tiles.
template <class Stored>
struct Operands {
  const Levels levels;
  const ChunkScales blocks;
  const Stored stored;
  NumbersInOrder scales;
  RowOffsets offsets;

  Operands(const Product& p, int64_t end)
      : levels(p), blocks(p, most_chunks_of(p)), stored(p),
        scales(p.scales, p.blocks, end, blocks.chunks_of_block == 1), offsets(p, end, blocks.chunks_of_block == 1) {}
};

// The scales of a span, times the units of the activation.
template <int rows, int count, class Stored>
EQQUANT_INLINE void scale_units(const BlockedRows<rows, Stored>& weights, const float* units, int64_t stride,
                                __m512 (&scales)[rows][count]) {
  unrolled<count>([&](auto i) {
    const __m512 of_span = _mm512_loadu_ps(units + i * stride + weights.group);
    unrolled<rows>([&](auto r) { scales[r][i] = _mm512_mul_ps(weights.of_span[r], of_span); });
  });
}

// Adds the sums of integers of a group to the totals.
template <int parts, int rows, int count>
EQQUANT_INLINE void add_sums(const __m512i (&sums)[rows][count * parts], __m512i lanes,
                             const __m512 (&scales)[rows][count], __m512 (&totals)[rows][count]) {
  unrolled<count>([&](auto i) {
    unrolled<rows>([&](auto r) {
      const __m512i sum = parts == 1 ? sums[r][i] : whole_of(sums[r][i * parts], sums[r][i * parts + parts - 1]);
      const __m512 scale = _mm512_permutexvar_ps(lanes, scales[r][i]);
      totals[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, totals[r][i]);
    });
  });
}

// Writes the results of rows from `row` on, whose totals have a part in each lane.
template <int rows, int count, class Stored>
EQQUANT_INLINE void write(const Product& p, const BlockedRows<rows, Stored>& weights, int64_t row,
                          const __m512 (&totals)[rows][count]) {
  float* y = p.y + row;
  for (int i = 0; i < count; i++, y += p.rows) {
    // Weights with offsets have the unit 1.
    for (int r = 0; r < rows; r += 4) {
      const __m128 of = Vector::sum_four(totals[r][i], totals[r + 1][i], totals[r + 2][i], totals[r + 3][i]);
      _mm_storeu_ps(y + r, _mm_mul_ps(of, _mm_load_ps(weights.units + r)));
    }
  }
}

template <int bits, int rows, int count, int parts, class Stored, bool looks_up>
struct Tile {
  static constexpr int planes = 8 / bits;
  static constexpr ChunkOfX shape = {count, parts, planes};
  using Sums = __m512i[rows][shape.sums()];

  template <int plane>
  static EQQUANT_INLINE void multiply(__m512i table, const __m512i* codes, const char* x, Sums& sums) {
    __m512i weight[rows];
    for (int r = 0; r < rows; r++)
      weight[r] = looks_up ? Int8Vector::template decode<bits, plane>(table, codes[r])
                           : Int8Vector::template code<bits, plane>(codes[r]);
    for (int i = 0; i < shape.sums(); i++) {
      const __m512i some = _mm512_loadu_si512(x + (plane * shape.sums() + i) * chunk);
      for (int r = 0; r < rows; r++) sums[r][i] = Int8Vector::add_in_tile(sums[r][i], weight[r], some);
    }
    if constexpr (plane + 1 < planes) multiply<plane + 1>(table, codes, x, sums);
  }

  // Multiplies rows from `row` on by the activation `x`, whose rows have `units`, `stride` apart.
  static void run(const Product& p, Operands<Stored>& from, int64_t row, const char* x, const float* units,
                  int64_t stride) {
    BlockedRows<rows, Stored> weights(p, 1, from.blocks, from.stored, from.scales, row);
    const __m512i table = Int8Vector::table(from.levels.values);
    __m512 scales[rows][count], totals[rows][count];
    unrolled<rows>([&](auto r) { unrolled<count>([&](auto i) { totals[r][i] = _mm512_setzero_ps(); }); });
    do {
      weights.next_span();
      scale_units(weights, units, stride, scales);
      from.offsets.add_span(weights.group, weights.of_span, totals);
      do {
        Sums sums;
        for (int i = 0; i < shape.sums(); i++) {
          const __m512i correction = _mm512_loadu_si512(x + shape.correction(i) * chunk);
          for (int r = 0; r < rows; r++) sums[r][i] = correction;
        }
        const auto add_chunk = [&] {
          weights.read();
          multiply<0>(table, weights.of, x, sums);
          weights.next_chunk();
          x += shape.bytes();
        };
        add_chunk();
        if constexpr (most_chunks<bits, Stored> > 1)
          for (int64_t i = 1; i < from.blocks.chunks_of_group; i++) add_chunk();
        add_sums<parts>(sums, weights.lanes, scales, totals);
        weights.next_group();
      } while (weights.chunks && weights.left > 0);
    } while (weights.left > 0);
    __m512 all[rows][count];  // Not `totals`, which would not stay in registers.
    unrolled<rows>([&](auto r) { unrolled<count>([&](auto i) { all[r][i] = totals[r][i]; }); });
    from.offsets.add(row, weights.scales, 0, all);
    write(p, weights, row, all);
  }
};

template <int bits, class Stored, bool looks_up>
void run_tiles(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  Operands<Stored> from(p, end);
  const float* const units = reinterpret_cast<const float*>(scratch + units_at(p, 0));
  with_constant<most_rows>(static_cast<int>(p.m), [&](auto count) {
    with_constant<bits < least_bits_of_parts ? 1 : 2>(p.parts, [&](auto parts) {
      constexpr int rows = count == 1 && parts == 1 ? 8 : 4;
      by_tiles<rows>(begin, end, [&](int64_t row) {
        Tile<bits, rows, count, parts, Stored, looks_up>::run(p, from, row, scratch, units, units_of_row(p));
      });
    });
  });
}

template <int bits, bool looks_up>
void run_whole_bytes(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  if constexpr (bits == 4)
    if (reads_stored(p)) return run_tiles<bits, DenseCodes<false>, looks_up>(p, scratch, begin, end);
  if constexpr (bits == 8)
    if (p.is_unpacked()) return run_tiles<bits, UnpackedBytes, looks_up>(p, scratch, begin, end);
  run_tiles<bits, WholeBytes, looks_up>(p, scratch, begin, end);
}

inline void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  if (p.bits == 8 && reads_stored(p)) return run_tiles<8, DenseCodes<false>, false>(p, scratch, begin, end);
  if (p.bits == 8) return run_whole_bytes<8, true>(p, scratch, begin, end);
  const bool are_codes = Levels(p).are_codes;
  with_bits(p, [&](auto bits) {
    if constexpr (bits == 4)
      if (are_codes) return run_whole_bytes<bits, false>(p, scratch, begin, end);
    if constexpr (bits < 8) run_whole_bytes<bits, true>(p, scratch, begin, end);
  });
}

}  // namespace few_rows
EQQUANT_END
