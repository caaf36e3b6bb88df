// Products in int16, for weights with a scale for each block: AVX-512 VNNI.
//
// Levels become integers of one unit, at most 15 bits and a sign, and so does a row of the
// activation. 64 bytes of codes are 32 words; a lookup of words reads the lowest bits of
// each, so shifts bring one code after the other there: `steps` of them. The products of
// these fit 32 bits, as the unit of the activation is chosen so. They become floats and are
// multiplied with the scale of their block; nothing is decoded but in registers.
#include <immintrin.h>

#include <cmath>
#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
namespace eqquant {
namespace {

#include "absmax.h"

constexpr int64_t chunk = 64;  // Bytes of codes.
constexpr int largest_word = 32767, largest_level = 16383;
// The activation that a second-level cache holds, beside the rest: more is taken in turns.
constexpr int64_t cached_bytes = 1 << 19;

int steps_of(const Product& p) { return 16 / p.bits; }
int64_t chunks_of(const Product& p) { return (p.packed + chunk - 1) / chunk; }
// Words of a row of the activation.
int64_t row_words(const Product& p) { return chunks_of(p) * steps_of(p) * (chunk / 2); }

// Rows of the activation are multiplied by threes, with four rows of the weight: as many
// sums as registers hold.
constexpr int64_t most_at_once = 3;
int64_t group_of(const Product& p, int64_t row) {
  return std::min(most_at_once, p.m - row / most_at_once * most_at_once);
}

// Scratch is the words, each group of rows as (chunk, step, row, word), and then the unit of
// each row.
int16_t* words_in(char* scratch) { return reinterpret_cast<int16_t*>(scratch); }
float* units_in(const Product& p, char* scratch) {
  return reinterpret_cast<float*>(words_in(scratch) + p.m * row_words(p));
}
int64_t scratch_size(const Product& p) {
  return p.m * (row_words(p) * static_cast<int64_t>(sizeof(int16_t)) + sizeof(float));
}

// Levels as integers, twice, as a lookup reads five bits; what one of them is; and the
// largest of them.
struct Levels {
  alignas(64) int16_t words[32];
  float unit;
  int largest;
};

Levels levels_of(const Product& p) {
  if (p.bits == 8) return {{}, 1, 128};
  float most = 0;
  for (int i = 0; i < 16; i++) most = std::max(most, std::fabs(p.levels[i]));
  Levels out{{}, p.level_unit > 0 ? p.level_unit : most / largest_level, 1};
  if (!(out.unit > 0) || !std::isfinite(1 / out.unit)) return out;  // They are all zero.
  for (int i = 0; i < 32; i++) {
    out.words[i] = static_cast<int16_t>(std::lrint(p.levels[i % 16] / out.unit));
    out.largest = std::max(out.largest, std::abs(out.words[i]));
  }
  return out;
}

// A row of the activation as words. The codes of a byte are in one word with those of the
// next byte, and come `planes` steps before these.
void round_row(const Product& p, const float* x, float per_unit, int16_t* words,
               int64_t stride) {
  const int planes = p.planes(), steps = steps_of(p);
  if (p.packed % chunk)
    for (int step = 1; step <= steps; step++)
      _mm512_storeu_si512(words + (chunks_of(p) * steps - step) * stride, _mm512_setzero_si512());
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
      // Runs begin at an even byte, as they have a multiple of two bytes, or there is one.
      const int64_t j = byte + i;
      count = std::min({int64_t{32}, length - i, chunk - j % chunk});
      const __m512i low = load(x + logical + i, count);
      const __m512i high = load(x + logical + i + 16, count - 16);
      int16_t* to = words + (j / chunk * steps + plane) * stride + j % chunk / 2;
      _mm512_mask_cvtepi32_storeu_epi16(to, first((count + 1) / 2),
                                        _mm512_permutex2var_epi32(low, of_even, high));
      _mm512_mask_cvtepi32_storeu_epi16(to + planes * stride, first(count / 2),
                                        _mm512_permutex2var_epi32(low, of_odd, high));
    }
  });
}

// The largest sum of magnitudes that are multiplied into one lane.
int32_t largest_sum(const Product& p, const int16_t* words, int64_t stride) {
  const int steps = steps_of(p);
  __m512i most = _mm512_setzero_si512();
  for (int64_t c = 0; c < chunks_of(p); c++) {
    __m512i sum = _mm512_setzero_si512();
    for (int step = 0; step < steps; step++, words += stride) {
      const __m512i magnitudes = _mm512_abs_epi16(_mm512_loadu_si512(words));
      sum = _mm512_dpwssd_epi32(sum, magnitudes, _mm512_set1_epi16(1));
    }
    most = _mm512_max_epi32(most, sum);
  }
  return _mm512_reduce_max_epi32(most);
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const int largest = levels_of(p).largest;
  for (int64_t i = begin; i < end; i++) {
    const float* x = p.x + i * p.columns();
    const int64_t in_group = i % most_at_once, stride = group_of(p, i) * (chunk / 2);
    int16_t* words =
        words_in(scratch) + (i - in_group) * row_words(p) + in_group * (chunk / 2);
    const float absmax = absmax_of(x, p.columns());
    float per_unit = largest_word / absmax;
    if (!std::isfinite(per_unit)) per_unit = 0;
    round_row(p, x, per_unit, words, stride);
    // Smaller, where sums would not fit otherwise. Each of 2 * steps words may have been
    // rounded by a half, and will be.
    const double rounding = steps_of(p);
    const double sum = largest_sum(p, words, stride) + rounding, most = 2147483647.0 / largest - rounding;
    if (sum > most) {
      per_unit = static_cast<float>(per_unit * (most / sum) * (1 - 1e-6));
      round_row(p, x, per_unit, words, stride);
    }
    units_in(p, scratch)[i] = !std::isfinite(absmax) ? NAN : per_unit > 0 ? 1 / per_unit : 0;
  }
}

// `_mm512_dpwssd_epi32`, of which GCC 12 keeps the sums in memory.
EQQUANT_INLINE __m512i add_products(__m512i sum, __m512i weight, __m512i x) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x));
  return sum;
}

template <int bits, int step>
EQQUANT_INLINE __m512i decode(__m512i table, __m512i codes) {
  if constexpr (bits == 8)
    return _mm512_srai_epi16(step ? codes : _mm512_slli_epi16(codes, 8), 8);
  const __m512i shifted = step ? _mm512_srli_epi16(codes, step * bits) : codes;
  return _mm512_permutexvar_epi16(shifted, table);
}

// The scales of a row, chunk by chunk: some blocks of each, or some chunks of a block.
struct Scales {
  int64_t blocks, of_chunk, chunks_of_block;
  __m512i lanes;  // Which of a chunk each lane has.

  explicit Scales(const Product& p)
      : blocks(p.blocks),
        of_chunk(blocks > 1 ? std::max<int64_t>(1, chunk / p.block_bytes()) : 1),
        chunks_of_block(std::max<int64_t>(1, (p.block_bytes() + chunk - 1) / chunk)) {
    alignas(64) int32_t of[16];
    for (int i = 0; i < 16; i++) of[i] = static_cast<int32_t>(i * of_chunk / 16);
    lanes = _mm512_load_si512(of);
  }
};
struct Place {
  int64_t block = 0, chunks = 0;
  EQQUANT_INLINE __mmask16 mask(const Scales& of) const {
    return first(std::min(of.of_chunk, of.blocks - block));
  }
  EQQUANT_INLINE void next(const Scales& of) {
    if (++chunks == of.chunks_of_block) block += of.of_chunk, chunks = 0;
  }
};

// The codes of a chunk of some rows, decoded in registers.
template <int bits, int rows>
struct InRegisters {
  const Product& p;
  __m512i table;
  const uint8_t* codes;
  __m512i of[rows];

  InRegisters(const Product& p, const Levels& levels, int64_t row)
      : p(p), table(_mm512_load_si512(levels.words)), codes(p.codes + row * p.packed) {}
  EQQUANT_INLINE void read(int64_t j) {
    const __mmask64 some = p.packed - j >= chunk ? ~0ull : (1ull << (p.packed - j)) - 1;
    for (int r = 0; r < rows; r++) {
      of[r] = _mm512_maskz_loadu_epi8(some, codes + r * p.packed + j);
      prefetch(codes + r * p.packed + j);
    }
  }
  template <int step>
  EQQUANT_INLINE __m512i weight(int r) const {
    return decode<bits, step>(table, of[r]);
  }
};

// Or decoded before, for more rows of the activation: (chunk, step, row, word).
template <int bits, int rows>
struct InMemory {
  const int16_t* words;

  EQQUANT_INLINE void read(int64_t j) {
    if (j) words += 16 / bits * rows * (chunk / 2);
  }
  template <int step>
  EQQUANT_INLINE __m512i weight(int r) const {
    return _mm512_load_si512(words + (step * rows + r) * (chunk / 2));
  }
  template <int step = 0>
  static EQQUANT_INLINE void write(const InRegisters<bits, rows>& from, int16_t* to) {
    for (int r = 0; r < rows; r++, to += chunk / 2)
      _mm512_store_si512(to, from.template weight<step>(r));
    if constexpr ((step + 1) * bits < 16) write<step + 1>(from, to);
  }
};

template <int bits, int rows, int count>
struct Tile {
  using Words = __m512i[rows][count];
  using Sums = __m512[rows][count];

  template <int step, class Weights>
  static EQQUANT_INLINE void multiply(const Weights& weights, const int16_t* x, Words& words) {
    __m512i weight[rows];
    for (int r = 0; r < rows; r++) weight[r] = weights.template weight<step>(r);
    for (int i = 0; i < count; i++) {
      const __m512i some = _mm512_loadu_si512(x + (step * count + i) * (chunk / 2));
      for (int r = 0; r < rows; r++)
        words[r][i] = step ? add_products(words[r][i], weight[r], some)
                           : _mm512_madd_epi16(weight[r], some);
    }
    if constexpr ((step + 1) * bits < 16) multiply<step + 1>(weights, x, words);
  }

  // `x` and `units` are those of `count` rows of the activation, `y` their results.
  template <class Weights>
  static void run(const Product& p, Weights weights, float unit, const Scales& blocks,
                  const int16_t* x, const float* units, const float* scales, float* y) {
    Sums sums;
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < count; i++) sums[r][i] = _mm512_setzero_ps();
    int64_t j = 0;
    Place place;
    do {  // As in tiles.h.
      weights.read(j);
      Words words;
      multiply<0>(weights, x, words);
      const __mmask16 of_chunk = place.mask(blocks);
      for (int r = 0; r < rows; r++) {
        const float* at = scales + r * p.blocks + place.block;
        const __m512 scale = _mm512_permutexvar_ps(blocks.lanes, _mm512_maskz_loadu_ps(of_chunk, at));
        for (int i = 0; i < count; i++)
          sums[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(words[r][i]), scale, sums[r][i]);
      }
      // Those of all the rows, step by step: they are a stream of their own.
      __builtin_prefetch(scales + rows * place.block + 2048, 0, 2);
      place.next(blocks);
      j += chunk, x += 16 / bits * count * (chunk / 2);
    } while (j < p.packed);
    for (int i = 0; i < count; i++)
      for (int r = 0; r < rows; r++)
        y[i * p.rows + r] = _mm512_reduce_add_ps(sums[r][i]) * (units[i] * unit);
  }
};

// From how many rows of the activation on the weight is decoded once for all of them.
constexpr int64_t many = 4 * most_at_once;

struct alignas(64) Register {
  int16_t words[chunk / 2];
};

template <int bits>
struct Rows {
  const Product& p;
  const int16_t* x;
  const float* units;
  const Levels levels;
  const Scales blocks;
  std::vector<float> buffer;
  std::vector<Register> decoded;

  Rows(const Product& p, char* scratch)
      : p(p),
        x(words_in(scratch)),
        units(units_in(p, scratch)),
        levels(levels_of(p)),
        blocks(p),
        buffer(p.bfloat16_scales ? 4 * p.blocks : 0),
        decoded(p.m >= many ? 4 * chunks_of(p) * steps_of(p) : 0) {}

  // Some rows of the weight with rows `begin` to `end` of the activation.
  template <int rows, class Weights>
  void multiply(const Weights& weights, int64_t row, int64_t begin, int64_t end) {
    const float* scales = scales_of(p, row, rows, buffer.data());
    for (int64_t i = begin; i < end; i += most_at_once) {
      const auto run = [&](auto count) {
        Tile<bits, rows, count>::run(p, weights, levels.unit, blocks, x + i * row_words(p),
                                     units + i, scales, p.y + i * p.rows + row);
      };
      switch (group_of(p, i)) {
        case 1: run(std::integral_constant<int, 1>()); break;
        case 2: run(std::integral_constant<int, 2>()); break;
        default: run(std::integral_constant<int, 3>());
      }
    }
  }

  template <int rows>
  void run(int64_t row, int64_t begin, int64_t end) {
    InRegisters<bits, rows> weights(p, levels, row);
    if (p.m < many) return multiply<rows>(weights, row, begin, end);
    int16_t* to = decoded[0].words;
    for (int64_t j = 0; j < p.packed; j += chunk, to += 16 / bits * rows * (chunk / 2)) {
      weights.read(j);
      InMemory<bits, rows>::write(weights, to);
    }
    multiply<rows>(InMemory<bits, rows>{decoded[0].words}, row, begin, end);
  }
};

template <int bits>
void all_rows(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  Rows<bits> rows(p, const_cast<char*>(scratch));  // It is only read.
  const int64_t bytes = row_words(p) * static_cast<int64_t>(sizeof(int16_t));
  const int64_t in_turn = std::max<int64_t>(1, cached_bytes / bytes / most_at_once) * most_at_once;
  for (int64_t i = 0; i < p.m; i += in_turn) {
    const int64_t stop = std::min(p.m, i + in_turn);
    int64_t row = begin;
    for (; row + 4 <= end; row += 4) rows.template run<4>(row, i, stop);
    for (; row < end; row++) rows.template run<1>(row, i, stop);
  }
}

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_bits(p, [&](auto bits) { all_rows<bits>(p, scratch, begin, end); });
}

}  // namespace

const Routine words_vnni = {prepare, run, scratch_size, 8};

}  // namespace eqquant
EQQUANT_TARGET_END
