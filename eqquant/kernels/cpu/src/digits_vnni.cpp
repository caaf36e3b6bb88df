// Products in int8, with activations split in digits: AVX-512 VNNI.
//
// A row of the activation is `unit * (high + low / 254)`, two rows of int8, which is 15
// bits of it. Levels are made unsigned by an offset, as the instruction wants one operand
// to be; what the offset adds to a sum is known from the activation. Sums are of 32 bits
// and wrap around, which is right as long as the true sum fits.
#include <immintrin.h>

#include <cmath>
#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
namespace eqquant {
namespace {

#include "absmax.h"

constexpr float low_per_high = 254;

// What is known of a row of the activation beside its digits.
struct Row {
  float unit;
  uint32_t sums[2];
};

int64_t plane_stride(const Product& p) { return (p.packed + 63) / 64 * 64; }
int64_t digit_stride(const Product& p) { return plane_stride(p) * p.planes(); }

// Scratch is the digits (m, digits, plane, byte), each plane filled up with zeros, and
// then the rows.
int8_t* digits_in(const Product&, char* scratch) { return reinterpret_cast<int8_t*>(scratch); }
Row* rows_in(const Product& p, char* scratch) {
  return reinterpret_cast<Row*>(scratch + p.m * p.digits * digit_stride(p));
}

int64_t scratch_size(const Product& p) {
  return p.m * (p.digits * digit_stride(p) + static_cast<int64_t>(sizeof(Row)));
}

// A run of the activation as digits; returns nothing, but adds to the sums.
void split(const float* x, int64_t size, __m512 per_unit, int digits, int8_t* high,
           int8_t* low, __m512i* sums) {
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 some = first(size - i);
    const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(some, x + i), per_unit);
    const __m512i whole = _mm512_cvtps_epi32(scaled);
    _mm512_mask_cvtepi32_storeu_epi8(high + i, some, whole);
    sums[0] = _mm512_add_epi32(sums[0], whole);
    if (digits == 1) continue;
    const __m512 rest = _mm512_sub_ps(scaled, _mm512_cvtepi32_ps(whole));
    const __m512i part = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(low_per_high)));
    _mm512_mask_cvtepi32_storeu_epi8(low + i, some, part);
    sums[1] = _mm512_add_epi32(sums[1], part);
  }
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const int64_t columns = p.columns(), stride = plane_stride(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = p.x + i * columns;
    int8_t* digits = digits_in(p, scratch) + i * p.digits * digit_stride(p);
    Row& row = rows_in(p, scratch)[i];
    const float absmax = absmax_of(x, columns);
    row.unit = std::isfinite(absmax) ? absmax / 127 : NAN;
    const float per_unit = 127 / absmax;
    if (!std::isfinite(per_unit) && std::isfinite(absmax)) row.unit = 0;
    const __m512 factor = _mm512_set1_ps(std::isfinite(per_unit) ? per_unit : 0);
    for (int64_t at = p.packed; at < stride; at++)
      for (int plane = 0; plane < p.digits * p.planes(); plane++)
        digits[plane * stride + at] = 0;
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t planar, int64_t length) {
      int8_t* high = digits + planar / p.packed * stride + planar % p.packed;
      split(x + logical, length, factor, p.digits, high, high + digit_stride(p), sums);
    });
    for (int digit = 0; digit < 2; digit++)
      row.sums[digit] = static_cast<uint32_t>(_mm512_reduce_add_epi32(sums[digit]));
  }
}

// The levels as unsigned bytes, and by how much they are too large.
struct Unsigned {
  __m512i table;
  uint32_t offset;
};

Unsigned unsigned_levels(const Product& p) {
  if (p.bits == 8) return {_mm512_setzero_si512(), 128};
  float least = 0;
  for (int i = 0; i < 16; i++) least = std::min(least, p.levels[i]);
  alignas(16) uint8_t table[16];
  for (int i = 0; i < 16; i++) table[i] = static_cast<uint8_t>(p.levels[i] - least);
  const __m128i once = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_broadcast_i32x4(once), static_cast<uint32_t>(-least)};
}

template <int bits, int plane>
EQQUANT_INLINE __m512i decode(__m512i table, __m512i codes) {
  if constexpr (bits == 8) return _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
  const __m512i shifted = plane ? _mm512_srli_epi16(codes, plane * bits) : codes;
  const __m512i mask = _mm512_set1_epi8((1 << bits) - 1);
  return _mm512_shuffle_epi8(table, _mm512_and_si512(shifted, mask));
}

// The sum of each of four registers.
EQQUANT_INLINE __m128i sums_of(const __m512i* x) {
  __m256i half[4];
  for (int i = 0; i < 4; i++)
    half[i] = _mm256_add_epi32(_mm512_castsi512_si256(x[i]), _mm512_extracti64x4_epi64(x[i], 1));
  const __m256i quarter = _mm256_hadd_epi32(_mm256_hadd_epi32(half[0], half[1]),
                                            _mm256_hadd_epi32(half[2], half[3]));
  return _mm_add_epi32(_mm256_castsi256_si128(quarter), _mm256_extracti128_si256(quarter, 1));
}

template <int bits, int rows, int count>
struct Tile {
  __m512i sums[count * rows];

  template <int plane>
  EQQUANT_INLINE void multiply(__m512i table, const __m512i* codes, const int8_t* x,
                               int64_t stride) {
    __m512i weight[rows];
    for (int r = 0; r < rows; r++) weight[r] = decode<bits, plane>(table, codes[r]);
    for (int i = 0; i < count; i++) {
      const __m512i digits = _mm512_loadu_si512(x + (i * (8 / bits) + plane) * stride);
      for (int r = 0; r < rows; r++)
        sums[i * rows + r] = _mm512_dpbusd_epi32(sums[i * rows + r], weight[r], digits);
    }
    if constexpr ((plane + 1) * bits < 8) multiply<plane + 1>(table, codes, x, stride);
  }

  // `x` is `count` rows of digits, from row `first` of all on.
  EQQUANT_INLINE void run(const Product& p, const Unsigned& levels, const int8_t* x,
                          const Row* of, const float* scales, int64_t row, int64_t first) {
    const int64_t stride = plane_stride(p);
    const uint8_t* codes = p.codes + row * p.packed;
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    for (int64_t j = 0; j < p.packed; j += 64) {
      const __mmask64 some = p.packed - j >= 64 ? ~0ull : (1ull << (p.packed - j)) - 1;
      __m512i some_codes[rows];
      for (int r = 0; r < rows; r++) {
        some_codes[r] = _mm512_maskz_loadu_epi8(some, codes + r * p.packed + j);
        prefetch(codes + r * p.packed + j);
      }
      multiply<0>(levels.table, some_codes, x + j, stride);
    }
    alignas(16) uint32_t total[(count * rows + 3) / 4 * 4];
    for (int i = 0; i < count * rows; i += 4) {
      __m512i four[4];
      for (int k = 0; k < 4; k++)
        four[k] = i + k < count * rows ? sums[i + k] : _mm512_setzero_si512();
      _mm_store_si128(reinterpret_cast<__m128i*>(total + i), sums_of(four));
    }
    for (int i = 0; i < count; i += p.digits) {
      const int64_t m = (first + i) / p.digits;
      for (int r = 0; r < rows; r++) {
        const auto digit = [&](int d) {
          const uint32_t sum = total[(i + d) * rows + r] - levels.offset * of[m].sums[d];
          return static_cast<float>(static_cast<int32_t>(sum));
        };
        const float sum = p.digits == 1 ? digit(0) : digit(0) + digit(1) / low_per_high;
        p.y[m * p.rows + row + r] = sum * of[m].unit * scales[r];
      }
    }
  }
};

template <int bits, int rows>
void all_digits(const Product& p, const Unsigned& levels, char* scratch, int64_t row) {
  float buffer[rows];
  const float* scales = scales_of(p, row, rows, buffer);
  const int8_t* x = digits_in(p, scratch);
  const Row* of = rows_in(p, scratch);
  const int64_t count = p.m * p.digits, ld = digit_stride(p);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    Tile<bits, rows, 4>().run(p, levels, x + i * ld, of, scales, row, i);
  for (; i + 2 <= count; i += 2)
    Tile<bits, rows, 2>().run(p, levels, x + i * ld, of, scales, row, i);
  for (; i < count; i++) Tile<bits, rows, 1>().run(p, levels, x + i * ld, of, scales, row, i);
}

template <int bits>
void some_rows(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const Unsigned levels = unsigned_levels(p);
  int64_t row = begin;
  for (; row + 4 <= end; row += 4) all_digits<bits, 4>(p, levels, scratch, row);
  for (; row < end; row++) all_digits<bits, 1>(p, levels, scratch, row);
}

//
// For more rows of the activation, and for weights whose levels are not integers of one
// unit: four rows are decoded once, into the innermost cache.
//

constexpr int at_once = 4, most_digits = 6;
constexpr int64_t few_digits = 8;
// The digits that a second-level cache holds, beside the rest: more are taken in turns.
constexpr int64_t cached_bytes = 1 << 19;

// Whether the levels of a row are integers of one unit as they are.
bool is_exact(const Product& p) {
  if (p.blocks > 1) return false;
  for (int i = 0; p.bits < 8 && i < 16; i++)
    if (p.levels[i] != std::nearbyint(p.levels[i])) return false;
  return true;
}

struct alignas(64) Register {
  uint8_t bytes[64];
};

// A row of a weight with a scale for each block, rounded to integers of one unit: 127 of
// them are its largest scale times the largest level. Returns that unit.
template <int bits>
float round_row(const Product& p, const float* scales, float largest, const uint8_t* codes,
                uint8_t* to) {
  const int64_t block = p.block_bytes(), stride = plane_stride(p);
  float most = 0;
  for (int64_t b = 0; b < p.blocks; b++) {
    if (!std::isfinite(scales[b])) return NAN;
    most = std::max(most, std::fabs(scales[b]));
  }
  const float unit = most * largest / 127;
  const float per_unit = unit > 0 && std::isfinite(1 / unit) ? 1 / unit : 0;
  const __m512 levels = _mm512_loadu_ps(p.levels);
  for (int64_t b = 0, j = 0; b < p.blocks; b++) {
    const __m512 factor = _mm512_set1_ps(scales[b] * per_unit);
    const auto rounded = [&](__m512 x) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
      return _mm512_cvtepi32_epi8(_mm512_add_epi32(whole, _mm512_set1_epi32(128)));
    };
    const __m128i table = rounded(levels);
    for (const int64_t end = j + block; j < end; j += 16) {
      const int64_t left = std::min<int64_t>(16, end - j);
      const __mmask16 some = (1u << left) - 1;
      const __m128i of = _mm_maskz_loadu_epi8(some, codes + j);
      if constexpr (bits == 8) {
        const __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(of));
        _mm_mask_storeu_epi8(to + j, some, rounded(values));
      } else {
        for (int plane = 0; plane < 8 / bits; plane++) {
          const __m128i shifted = _mm_srl_epi16(of, _mm_cvtsi32_si128(plane * bits));
          const __m128i code = _mm_and_si128(shifted, _mm_set1_epi8((1 << bits) - 1));
          _mm_mask_storeu_epi8(to + plane * stride + j, some, _mm_shuffle_epi8(table, code));
        }
      }
      j -= 16 - left;
    }
  }
  return unit;
}

// A row as unsigned bytes, in the order of digits.
template <int bits, int plane = 0>
void decode_row(const Product& p, __m512i table, const uint8_t* codes, uint8_t* to) {
  for (int64_t j = 0; j < p.packed; j += 64) {
    const __mmask64 some = p.packed - j >= 64 ? ~0ull : (1ull << (p.packed - j)) - 1;
    const __m512i of = _mm512_maskz_loadu_epi8(some, codes + j);
    _mm512_store_si512(to + plane * plane_stride(p) + j, decode<bits, plane>(table, of));
  }
  if constexpr ((plane + 1) * bits < 8) decode_row<bits, plane + 1>(p, table, codes, to);
}

// `_mm512_dpbusd_epi32`, of which GCC 12 keeps the sums of a large tile in memory.
EQQUANT_INLINE __m512i add_products(__m512i sum, __m512i weight, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(digits));
  return sum;
}

template <int count>
void multiply_decoded(const uint8_t* w, const int8_t* x, int64_t stride, uint32_t* totals) {
  __m512i sums[count][at_once];
  for (int i = 0; i < count; i++)
    for (int r = 0; r < at_once; r++) sums[i][r] = _mm512_setzero_si512();
  int64_t j = 0;
  do {  // As in tiles.h.
    __m512i weight[at_once];
    for (int r = 0; r < at_once; r++) weight[r] = _mm512_load_si512(w + r * stride + j);
    for (int i = 0; i < count; i++) {
      const __m512i digits = _mm512_loadu_si512(x + i * stride + j);
      for (int r = 0; r < at_once; r++) sums[i][r] = add_products(sums[i][r], weight[r], digits);
    }
    j += 64;
  } while (j < stride);
  __m512i stored[count * at_once];
  for (int i = 0; i < count; i++)
    for (int r = 0; r < at_once; r++) _mm512_store_si512(stored + i * at_once + r, sums[i][r]);
  for (int i = 0; i < count; i++)
    _mm_store_si128(reinterpret_cast<__m128i*>(totals) + i, sums_of(stored + i * at_once));
}

template <int bits>
void many_digits(const Product& p, char* scratch, int64_t begin, int64_t end) {
  Unsigned levels{_mm512_setzero_si512(), 128};
  float largest = bits == 8 ? 127 : 0;
  const bool exact = is_exact(p);
  if (exact) levels = unsigned_levels(p);
  for (int i = 0; bits < 8 && i < 16; i++) largest = std::max(largest, std::fabs(p.levels[i]));
  const int8_t* x = digits_in(p, scratch);
  const Row* of = rows_in(p, scratch);
  const int64_t stride = digit_stride(p), count = p.m * p.digits;
  // Whole rows of the activation at a time: one digit or two of each.
  const int64_t in_turn =
      std::max<int64_t>(1, cached_bytes / stride / most_digits) * most_digits;
  std::vector<Register> decoded(at_once * stride / 64);
  uint8_t* w = decoded[0].bytes;
  std::vector<float> buffer(p.bfloat16_scales ? at_once * p.blocks : 0);
  for (int64_t first = 0; first < count; first += in_turn)
    for (int64_t row = begin; row < end; row += at_once) {
      const int rows = static_cast<int>(std::min<int64_t>(at_once, end - row));
      const float* scales = scales_of(p, row, rows, buffer.data());
      alignas(16) float units[at_once] = {};
      for (int r = 0; r < rows; r++) {
        const uint8_t* codes = p.codes + (row + r) * p.packed;
        if (exact) {
          units[r] = scales[r];
          decode_row<bits>(p, levels.table, codes, w + r * stride);
        } else {
          units[r] = round_row<bits>(p, scales + r * p.blocks, largest, codes, w + r * stride);
        }
      }
      const int64_t last = std::min(count, first + in_turn);
      for (int64_t i = first; i < last; i += most_digits) {
        alignas(64) uint32_t totals[most_digits * at_once];
        const int8_t* some = x + i * stride;
        switch (std::min<int64_t>(most_digits, last - i)) {
          case 1: multiply_decoded<1>(w, some, stride, totals); break;
          case 2: multiply_decoded<2>(w, some, stride, totals); break;
          case 3: multiply_decoded<3>(w, some, stride, totals); break;
          case 4: multiply_decoded<4>(w, some, stride, totals); break;
          case 5: multiply_decoded<5>(w, some, stride, totals); break;
          default: multiply_decoded<most_digits>(w, some, stride, totals);
        }
        for (int64_t k = 0; k < std::min<int64_t>(most_digits, last - i); k += p.digits) {
          const int64_t m = (i + k) / p.digits;
          const auto digit = [&](int d) {
            const __m128i sum =
                _mm_load_si128(reinterpret_cast<const __m128i*>(totals + (k + d) * at_once));
            const uint32_t excess = levels.offset * of[m].sums[d];
            return _mm_cvtepi32_ps(_mm_sub_epi32(sum, _mm_set1_epi32(static_cast<int>(excess))));
          };
          __m128 sum = digit(0);
          if (p.digits == 2)
            sum = _mm_add_ps(sum, _mm_div_ps(digit(1), _mm_set1_ps(low_per_high)));
          sum = _mm_mul_ps(_mm_mul_ps(sum, _mm_set1_ps(of[m].unit)), _mm_load_ps(units));
          _mm_mask_storeu_ps(p.y + m * p.rows + row, (1u << rows) - 1, sum);
        }
      }
    }
}

template <int bits>
void digits_of(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const bool few = p.m * p.digits <= few_digits && is_exact(p);
  few ? some_rows<bits>(p, scratch, begin, end) : many_digits<bits>(p, scratch, begin, end);
}

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  char* from = const_cast<char*>(scratch);  // It is only read.
  with_bits(p, [&](auto bits) { digits_of<bits>(p, from, begin, end); });
}

}  // namespace

const Routine digits_vnni = {prepare, run, scratch_size, 8};

}  // namespace eqquant
EQQUANT_TARGET_END
