// int8 x @ w.T by AMX tiles.
//
// A row of the activation is `unit * high` (int8), or `unit * (256 * high + low)` (int8x2), which keeps 16 bits.
// Levels that are bytes stay exact if each row has one scale, and in long blocks (int8_blocks.h). Other weights are
// split in the same way, relative to the largest value of a row in a span. The product of the two low parts is omitted:
// it is 2^-16 of the largest.
#define EQQUANT_TARGET_AMX
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "decode/scales.h"
#include "microkernels/amx/int8_blocks.h"
#include "microkernels/amx/int8_parts.h"
#include "microkernels/amx/x_wt.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

// Looks up the bytes of codes. `tables` has a table of sixteen bytes for each quarter of the register.
template <int bits, int plane>
EQQUANT_INLINE __m512i look_up(__m512i tables, __m512i codes) {
  const __m512i shifted = plane ? _mm512_srli_epi16(codes, plane * bits) : codes;
  return _mm512_shuffle_epi8(
      tables, _mm512_and_si512(shifted, _mm512_set1_epi8((1 << bits) - 1)));
}

class Int8Element {
  const Product& p;
  float* units;  // The unit of each row of the activation, in scratch.
  const float largest;  // The largest level.
  const bool exact;     // Nothing is rounded.
  const LevelTables level_tables;
  const Float8Tables float8_tables;
  float weight_units[weight_rows] = {};
  std::vector<float> scales;
  std::vector<int16_t> int16_scales;
  std::vector<int8_t> tables[2];  // (block of a span, code)

 public:
  using Number = int8_t;

  // The units of whole tiles.
  static int64_t space(const Product& p) {
    return tiles_of(p) * tile_rows * static_cast<int64_t>(sizeof(float));
  }

  Int8Element(const Product& p, char* space)
      : p(p),
        units(reinterpret_cast<float*>(space)),
        largest(largest_level(p)),
        exact(is_exact_int8(p)),
        level_tables(p.levels, p.bits < 8 ? largest : 1),
        float8_tables(p.exponent ? p.exponent : 4, largest) {}

  bool low_parts() const { return !exact && p.parts > 1; }

  void round(const Layout<int8_t>& layout, int64_t i, const float* x, int8_t* row,
             int64_t stride) {
    const Units of(check_row(p, x), largest_of(p.parts));
    units[i] = of.unit;
    const __m512 per_unit = _mm512_set1_ps(of.per_unit);
    layout.for_each_run([&](int64_t logical, int64_t place, int64_t length) {
      for (int64_t j = 0; j < length; j += 16) {
        const __mmask16 some = first(length - j);
        int8_t* const to = row + place + j;
        round_sixteen(_mm512_maskz_loadu_ps(some, x + logical + j), per_unit, some, p.parts, to,
                      to + stride);
      }
    });
  }

  Decoded<int8_t> decode(const Span& span, int64_t row, int rows, const Decoded<int8_t>& to) {
    scales.resize(p.scale_buffer(rows));
    const float* of = scales_of(p, row, rows, scales.data());
    // int8 codes are tiles already.
    if (exact && p.bits == 8 && rows == weight_rows && span.bytes % tile_bytes == 0) {
      std::copy(of, of + rows, weight_units);
      const uint8_t* codes = p.codes + row * p.packed + span.begin;
      return {const_cast<int8_t*>(reinterpret_cast<const int8_t*>(codes)), p.packed};
    }
    with_bits(p, [&](auto bits) {
      for (int r = 0; r < rows; r++) {
        const uint8_t* codes = p.codes + (row + r) * p.packed + span.begin;
        if (exact) {
          weight_units[r] = of[r];
          copy<bits>(span, codes, to.row(r));
        } else if (p.parts == 1) {
          weight_units[r] = round_row<bits, 1>(span, of + r * p.blocks, codes, to.row(r), nullptr);
        } else {
          weight_units[r] =
              round_row<bits, 2>(span, of + r * p.blocks, codes, to.row(r), to.row(r, 1));
        }
      }
    });
    return to;
  }

  EQQUANT_INLINE __m512 result(int64_t i, const int32_t* high, const int32_t* low, int r) const {
    // Do not multiply the units first, because their product may underflow.
    const __m512 sum = _mm512_mul_ps(sum_of(high, low, p.parts), _mm512_loadu_ps(units + i));
    return _mm512_mul_ps(sum, _mm512_set1_ps(weight_units[r]));
  }

 private:
  // Calls `use(j, some, codes)` for each register of codes of a row in a span.
  template <class Use>
  EQQUANT_INLINE void for_each_register(const Span& span, const uint8_t* codes, const Use& use) {
    const int64_t ahead = far_ahead(p, span);
    for (int64_t j = 0; j < span.bytes; j += 64) {
      const __mmask64 some = first_bytes(span.bytes - j);
      __builtin_prefetch(codes + ahead + j, 0, 2);
      use(j, some, _mm512_maskz_loadu_epi8(some, codes + j));
    }
  }

  template <int bits, int plane = 0, class Write>
  EQQUANT_INLINE void look_up_planes(__m512i tables, __m512i codes, const Write& write) {
    write(plane, look_up<bits, plane>(tables, codes));
    if constexpr ((plane + 1) * bits < 8) look_up_planes<bits, plane + 1>(tables, codes, write);
  }

  template <int bits>
  void copy(const Span& span, const uint8_t* codes, int8_t* to) {
    const __m512i table = bits < 8 ? bytes_of_levels(p.levels) : _mm512_setzero_si512();
    for_each_register(span, codes, [&](int64_t j, __mmask64 some, __m512i of) {
      if constexpr (bits == 8)
        _mm512_mask_storeu_epi8(to + j, some, of);
      else
        look_up_planes<bits>(table, of, [&](int plane, __m512i x) {
          _mm512_mask_storeu_epi8(to + plane * span.plane + j, some, x);
        });
    });
  }

  // Rounds a row of a span to int8 parts, relative to the largest scale times the largest level. Returns the unit.
  template <int bits, int parts>
  float round_row(const Span& span, const float* of_row, const uint8_t* codes, int8_t* high,
                  int8_t* low) {
    const int64_t block = p.block_bytes(), begin = span.begin / block;
    const int64_t blocks = (span.begin + span.bytes - 1) / block + 1 - begin;
    of_row += begin;
    const float most = absmax_of(of_row, blocks);
    if (!std::isfinite(most)) return NAN;
    const float share = std::isfinite(1 / most) ? 1 / most : 0;
    int8_t* const to[2] = {high, low};
    if constexpr (bits < 8) {
      make_tables<parts>(of_row, blocks, share * largest_split);
      look_up_row<bits, parts>(span, begin, codes, to);
      return level_tables.unit / largest_split * 256 * most;
    }
    const Units of(largest, largest_split);
    if (p.blocks > 1)
      round_codes<parts>(span, of_row, blocks, share * of.per_unit, codes, to);
    else
      for_each_register(span, codes, [&](int64_t j, __mmask64 some, __m512i x) {
        const auto write = [&](int part, const int8_t* table) {
          _mm512_mask_storeu_epi8(to[part] + j, some, float8_tables.look_up(table, x));
        };
        write(0, float8_tables.high);
        if (parts > 1) write(1, float8_tables.low);
      });
    // The scale of a row may be negative.
    return of.unit * 256 * (p.blocks > 1 ? most : *of_row);
  }

  // Rounds 8-bit codes. Sixteen codes share a scale.
  template <int parts>
  void round_codes(const Span& span, const float* of_blocks, int64_t blocks, float per_unit,
                   const uint8_t* codes, int8_t* const (&to)[2]) {
    int64_t b = 0, left = p.block_bytes() - span.begin % p.block_bytes();
    for_each_register(span, codes, [&](int64_t j, __mmask64 some, __m512i of) {
      __m512i x[4];
      for (int64_t i = 0; i < 4; i++) {
        const __m512 by = _mm512_set1_ps(of_blocks[std::min(b, blocks - 1)] * per_unit);
        if (!(left -= 16)) left = p.block_bytes(), b++;
        x[i] = _mm512_cvtps_epi32(_mm512_mul_ps(values(of, i), by));
      }
      if (parts > 1) _mm512_mask_storeu_epi8(to[1] + j, some, lowest_bytes(x));
      for (__m512i& some_codes : x) some_codes = upper(some_codes);
      _mm512_mask_storeu_epi8(to[0] + j, some, lowest_bytes(x));
    });
  }

  // Decodes sixteen of 64 codes.
  EQQUANT_INLINE __m512 values(__m512i codes, int64_t i) const {
    const __m128i of = i == 0   ? _mm512_castsi512_si128(codes)
                       : i == 1 ? _mm512_extracti32x4_epi32(codes, 1)
                       : i == 2 ? _mm512_extracti32x4_epi32(codes, 2)
                                : _mm512_extracti32x4_epi32(codes, 3);
    return values_of(of, p.exponent);
  }

  // Returns the lowest bytes of 64 integers, in order.
  static EQQUANT_INLINE __m512i lowest_bytes(const __m512i (&x)[4]) {
    const auto lowest = [](__m512i of) { return _mm512_and_si512(of, _mm512_set1_epi32(255)); };
    const __m512i a = _mm512_packus_epi32(lowest(x[0]), lowest(x[1])),
                  b = _mm512_packus_epi32(lowest(x[2]), lowest(x[3]));
    const __m512i places =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(places, _mm512_packus_epi16(a, b));
  }

  // Makes the tables of the levels of each block, four blocks at a time.
  template <int parts>
  void make_tables(const float* of_blocks, int64_t blocks, float per_unit) {
    // Leave space, because four are read at once, and sixteen are converted at once.
    int16_scales.resize((blocks + 15) / 16 * 16);
    for (int part = 0; part < parts; part++) tables[part].resize((blocks + 8) * 16);
    for (int64_t b = 0; b < blocks; b += 16) {
      const __m512 of = _mm512_maskz_loadu_ps(first(blocks - b), of_blocks + b);
      const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(of, _mm512_set1_ps(per_unit)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(&int16_scales[b]), _mm512_cvtepi32_epi16(rounded));
    }
    for (int64_t b = 0; b < blocks; b += 4) {
      __m512i high, low;
      level_tables.of(&int16_scales[b], high, low);
      _mm512_storeu_si512(&tables[0][b * 16], high);
      if (parts > 1) _mm512_storeu_si512(&tables[1][b * 16], low);
    }
  }

  // Looks up codes in blocks of eight bytes: eight tables per register of codes.
  template <int bits, int parts, int plane = 0>
  EQQUANT_INLINE void look_up_pairs(const Span& span, int64_t j, __mmask64 some, __m512i codes,
                                    int8_t* const (&to)[2]) {
    // The index is four bits of the code, and then the number of the table.
    const __m512i places = _mm512_setr_epi64(
        0x0000000000000000, 0x1010101010101010, 0x2020202020202020, 0x3030303030303030,
        0x4040404040404040, 0x5050505050505050, 0x6060606060606060, 0x7070707070707070);
    const __m512i shifted = plane ? _mm512_srli_epi16(codes, plane * bits) : codes;
    const __m512i index =
        _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi8(15), places, 0xEA);
    for (int part = 0; part < parts; part++) {
      const int8_t* const of = tables[part].data() + j * 2;
      const __m512i x = _mm512_permutex2var_epi8(_mm512_loadu_si512(of), index,
                                                 _mm512_loadu_si512(of + 64));
      _mm512_mask_storeu_epi8(to[part] + plane * span.plane + j, some, x);
    }
    if constexpr ((plane + 1) * bits < 8)
      look_up_pairs<bits, parts, plane + 1>(span, j, some, codes, to);
  }

  // Looks up the codes of a row. The first table belongs to block `first`.
  template <int bits, int parts>
  void look_up_row(const Span& span, int64_t first, const uint8_t* codes,
                   int8_t* const (&to)[2]) {
    const int8_t* const made[2] = {tables[0].data(), tables[1].data()};
    const int64_t block = p.block_bytes(), plane_size = span.plane;
    // `lanes` returns the tables of a register of codes, one for each sixteen bytes.
    const auto look_up_by = [&](const auto& lanes) {
      for_each_register(span, codes, [&](int64_t j, __mmask64 some, __m512i of) {
        for (int part = 0; part < parts; part++)
          look_up_planes<bits>(lanes(made[part], j), of, [&](int plane, __m512i x) {
            _mm512_mask_storeu_epi8(to[part] + plane * plane_size + j, some, x);
          });
      });
    };
    const auto load = [](const int8_t* at) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    };
    if (p.blocks == 1)
      return look_up_by(
          [&](const int8_t* of, int64_t) { return _mm512_broadcast_i32x4(load(of)); });
    if (block == 8)
      return for_each_register(span, codes, [&](int64_t j, __mmask64 some, __m512i of) {
        look_up_pairs<bits, parts>(span, j, some, of, to);
      });
    if (block == 16)
      return look_up_by([](const int8_t* of, int64_t j) { return _mm512_loadu_si512(of + j); });
    if (block == 32)
      return look_up_by([](const int8_t* of, int64_t j) {
        const __m512i two = _mm512_castsi256_si512(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(of + j / 2)));
        return _mm512_shuffle_i64x2(two, two, 0x50);
      });
    look_up_by([&](const int8_t* of, int64_t j) {
      const auto at = [&](int64_t byte) { return load(of + (byte / block - first) * 16); };
      const int64_t byte = span.begin + j;
      if (block % 64 == 0) return _mm512_broadcast_i32x4(at(byte));
      __m512i out = _mm512_castsi128_si512(at(byte));
      out = _mm512_inserti32x4(out, at(byte + 16), 1);
      out = _mm512_inserti32x4(out, at(byte + 32), 2);
      return _mm512_inserti32x4(out, at(byte + 48), 3);
    });
  }
};

void run_any(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  if (!in_exact_blocks(p)) return run<Int8Element>(p, scratch, begin, end);
  const Layout<int8_t> layout(p);
  const char* const units = space_in<Int8Element>(p, layout, const_cast<char*>(scratch));  // Only read.
  run_blocks(p, layout, scratch, reinterpret_cast<const float*>(units), begin, end);
}

}  // namespace
EQQUANT_END

namespace eqquant {
extern const Routine int8_x_wt_amx = {amx::prepare<amx::Int8Element>, amx::run_any,
                                      amx::scratch_size<amx::Int8Element>, always<amx::weight_rows>,
                                      amx::why_not_blocks};
}  // namespace eqquant
