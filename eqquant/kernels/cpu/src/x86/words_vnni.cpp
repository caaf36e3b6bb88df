// Products in int16, for weights with a scale for each block: AVX-512 VNNI.
//
// A row of the activation becomes integers of one unit, at most 15 bits and a sign. 64 bytes
// of codes are 32 words; shifts bring one code after the other to the lowest bits of each:
// `steps` of them.
//
// For few rows of the activation, levels become such integers, too, by a lookup, and sums of
// products are multiplied with the scale of their block: nothing is decoded but in
// registers. For more rows, four rows of the weight are decoded once for all of them, into
// the innermost cache, a part of the columns at a time: to integers of a unit of that part,
// with the scales in them. So sums need no multiplication, of which each takes the place of
// 32 products.
//
// Sums of products fit 32 bits, as the norms of what is multiplied do: see `norm_of_lanes`.
#include <immintrin.h>

#include <cmath>
#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")
namespace eqquant {
namespace {

#include "absmax.h"
#include "vector_avx512.h"
#include "words.h"

constexpr int64_t chunk = 64;  // Bytes of codes.

int steps_of(const Product& p) { return 16 / p.bits; }
int64_t chunks_of(const Product& p) { return (p.packed + chunk - 1) / chunk; }
// Each group of rows of the activation is (chunk, step, row, word).
int64_t row_words(const Product& p) { return chunks_of(p) * steps_of(p) * (chunk / 2); }

// Rows of the activation are multiplied by threes, with four rows of the weight: as many
// sums as registers hold.
constexpr int64_t most_at_once = 3;
int64_t group_of(const Product& p, int64_t row) {
  return std::min(most_at_once, p.m - row / most_at_once * most_at_once);
}

// From how many rows of the activation on the weight is decoded once for all of them: by
// measuring, later the more codes a lookup decodes at once.
int64_t many(const Product& p) { return most_at_once * (p.bits == 8 ? 7 : p.bits == 4 ? 14 : 32); }

// How many words of a row are decoded at most; and the activation that a second-level cache
// holds, beside the rest: more is taken in turns.
constexpr int64_t panel_words = 2048, cached_bytes = 5 << 17;

// How many steps go into one sum. Of short ones the norm is smaller, so words can be larger.
constexpr int most_of_sum = 4;
int steps_of_sum(const Product& p) {
  return p.m < many(p) ? steps_of(p) : std::min(most_of_sum, steps_of(p));
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
      const __m512i even = _mm512_permutex2var_epi32(low, of_even, high);
      const __m512i odd = _mm512_permutex2var_epi32(low, of_odd, high);
      _mm256_mask_storeu_epi16(to, first((count + 1) / 2), _mm512_cvtepi32_epi16(even));
      to += planes * stride;
      _mm256_mask_storeu_epi16(to, first(count / 2), _mm512_cvtepi32_epi16(odd));
    }
  });
}

// The norm of the largest lane, `steps` registers of words to each, or a little more.
float norm_of_lanes(const int16_t* words, int64_t stride, int64_t registers, int steps) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < registers; i += steps) {
    __m512i sum = _mm512_setzero_si512();
    for (int step = 0; step < steps; step++, words += stride) {
      // A quarter, as squares would not fit: rounded up.
      const __m512i magnitudes = _mm512_abs_epi16(_mm512_loadu_si512(words));
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
  // That of a lane of the weight: as `decode_row` makes it, or as the levels permit.
  const float of_weight =
      p.m < many(p) ? levels_of(p).largest * std::sqrt(2.0f * steps) : largest_norm;
  const float most = largest_norm * largest_norm / of_weight;
  Activation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = activation.row(i);
    const int64_t in_group = i % most_at_once, stride = group_of(p, i) * (chunk / 2);
    int16_t* words =
        words_in(scratch) + (i - in_group) * row_words(p) + in_group * (chunk / 2);
    const float absmax = absmax_of(x, p.columns());
    units_in(p, scratch)[i] = round_to_words(
        absmax, most, [&](float per_unit) { round_row(p, x, per_unit, words, stride); },
        [&] { return norm_of_lanes(words, stride, chunks_of(p) * steps_of(p), steps); });
  }
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
  // Which scale of a chunk each lane has, and how many scales further the next chunk begins.
  __m512i lanes, step;

  explicit Scales(const Product& p)
      : blocks(p.blocks),
        of_chunk(blocks > 1 ? std::max<int64_t>(1, chunk / p.block_bytes()) : 1),
        chunks_of_block(std::max<int64_t>(1, (p.block_bytes() + chunk - 1) / chunk)) {
    alignas(64) int32_t of[16];
    for (int i = 0; i < 16; i++) of[i] = static_cast<int32_t>(i * of_chunk / 16);
    lanes = _mm512_load_si512(of);
    step = _mm512_set1_epi32(static_cast<int>(of_chunk));
  }
  // Those of a chunk, whose first block is `block`.
  EQQUANT_INLINE __m512 read(const float* scales, int64_t block) const {
    const __mmask16 some = first(std::min(of_chunk, blocks - block));
    return _mm512_permutexvar_ps(lanes, _mm512_maskz_loadu_ps(some, scales + block));
  }
};
struct Place {
  int64_t block, chunks;

  Place(const Scales& of, int64_t c)
      : block(c / of.chunks_of_block * of.of_chunk), chunks(c % of.chunks_of_block) {}
  EQQUANT_INLINE void next(const Scales& of) {
    if (++chunks == of.chunks_of_block) block += of.of_chunk, chunks = 0;
  }
};

EQQUANT_INLINE __m512i codes_at(const Product& p, int64_t row, int64_t j) {
  const uint8_t* from = p.codes + row * p.packed + j;
  const int64_t left = p.packed - j;
  if (left >= chunk) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi8((1ull << left) - 1, from);
}

// The codes of a chunk of some rows, decoded in registers.
template <int bits, int rows>
struct InRegisters {
  static constexpr int steps_of_sum = 16 / bits;
  static constexpr int64_t scales_at_once = 16;
  const Scales& blocks;
  const uint8_t* codes;
  int64_t packed, left;  // Bytes of a row, and what is left of it.
  const float* scales;
  Place place;
  __m512i table, lanes, of[rows];
  __m512 some_scales[rows];
  float unit;

  InRegisters(const Product& p, const Levels& levels, const Scales& blocks, const float* scales,
              int64_t row)
      : blocks(blocks), codes(p.codes + row * p.packed), packed(p.packed), left(p.packed),
        scales(scales), place(blocks, 0), table(_mm512_load_si512(levels.words)),
        unit(levels.unit) {
    read_scales();
  }
  // Sixteen scales of each row: those of a chunk are fewer, and are looked up in these.
  EQQUANT_INLINE void read_scales() {
    lanes = blocks.lanes;
    const int64_t from = place.block, some = std::min(scales_at_once, blocks.blocks - from);
    for (int r = 0; r < rows; r++) {
      some_scales[r] = _mm512_maskz_loadu_ps(first(some), scales + r * blocks.blocks + from);
      // Those of all the rows, step by step: they are a stream of their own.
      __builtin_prefetch(scales + rows * from + r * scales_at_once + 2048, 0, 2);
    }
  }
  EQQUANT_INLINE void read() {
    if (left >= chunk) {
      for (int r = 0; r < rows; r++) {
        of[r] = _mm512_loadu_si512(codes + r * packed);
        prefetch(codes + r * packed);
      }
    } else {
      const __mmask64 some = (1ull << left) - 1;
      for (int r = 0; r < rows; r++) of[r] = _mm512_maskz_loadu_epi8(some, codes + r * packed);
    }
  }
  template <int step>
  EQQUANT_INLINE __m512i weight(int r) const {
    return decode<bits, step>(table, of[r]);
  }
  template <int count>
  EQQUANT_INLINE void add(int r, const __m512i (&words)[count], __m512 (&sums)[count]) const {
    const __m512 scale = _mm512_permutexvar_ps(lanes, some_scales[r]);
    for (int i = 0; i < count; i++)
      sums[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(words[i]), scale, sums[i]);
  }
  EQQUANT_INLINE void next() {
    codes += chunk, left -= chunk;
    const int64_t before = place.block;
    place.next(blocks);
    if (place.block == before) return;
    lanes = _mm512_add_epi32(lanes, blocks.step);
    if (place.block % scales_at_once == 0 && place.block < blocks.blocks) read_scales();
  }
  EQQUANT_INLINE float unit_of(int) const { return unit; }
};

// Or decoded before: (chunk, step, row, word).
template <int bits, int rows>
struct InMemory {
  static constexpr int steps_of_sum = std::min(most_of_sum, 16 / bits);
  const int16_t* words;
  const float* units;

  EQQUANT_INLINE void read() const {}
  template <int step>
  EQQUANT_INLINE __m512i weight(int r) const {
    __m512i out = _mm512_load_si512(words + (step * rows + r) * (chunk / 2));
    asm("" : "+v"(out));  // Or GCC reads it again for each product.
    return out;
  }
  template <int count>
  EQQUANT_INLINE void add(int, const __m512i (&words)[count], __m512 (&sums)[count]) const {
    for (int i = 0; i < count; i++)
      sums[i] = _mm512_add_ps(_mm512_cvtepi32_ps(words[i]), sums[i]);
  }
  EQQUANT_INLINE void next() { words += 16 / bits * rows * (chunk / 2); }
  EQQUANT_INLINE float unit_of(int r) const { return units[r]; }
};

// What is kept in registers is passed from function to function: see columns.h.
template <int bits, int rows, int count>
struct Tile {
  using Words = __m512i[rows][count];
  using Sums = __m512[rows][count];

  template <int step, class Weights>
  static EQQUANT_INLINE void multiply(const Weights& weights, const int16_t* x, Words& words,
                                      Sums& sums) {
    constexpr int in_sum = step % Weights::steps_of_sum;
    __m512i weight[rows];
    for (int r = 0; r < rows; r++) weight[r] = weights.template weight<step>(r);
    for (int i = 0; i < count; i++) {
      const __m512i some = _mm512_loadu_si512(x + (step * count + i) * (chunk / 2));
      for (int r = 0; r < rows; r++)
        words[r][i] = in_sum ? add_products(words[r][i], weight[r], some)
                             : _mm512_madd_epi16(weight[r], some);
    }
    if constexpr (in_sum + 1 == Weights::steps_of_sum)
      for (int r = 0; r < rows; r++) weights.add(r, words[r], sums[r]);
    if constexpr ((step + 1) * bits < 16) multiply<step + 1>(weights, x, words, sums);
  }

  // `x` and `units` are those of `count` rows of the activation, `y` their results: to be
  // written, or added to.
  template <class Weights>
  static void run(Weights weights, const int16_t* x, const float* units, int64_t chunks,
                  bool adds, float* y, int64_t y_stride) {
    Sums sums;
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < count; i++) sums[r][i] = _mm512_setzero_ps();
    do {  // As in tiles.h.
      weights.read();
      Words words;
      multiply<0>(weights, x, words, sums);
      weights.next();
      x += 16 / bits * count * (chunk / 2);
    } while (--chunks);
    for (int i = 0; i < count; i++, y += y_stride) {
      alignas(16) float of[4];
      if constexpr (rows == 4)
        _mm_store_ps(of, Vector::sum_four(sums[0][i], sums[1][i], sums[2][i], sums[3][i]));
      else
        for (int r = 0; r < rows; r++) of[r] = Vector::sum(sums[r][i]);
      // Not by the product of the units, which may be too small for a float.
      for (int r = 0; r < rows; r++) of[r] = of[r] * weights.unit_of(r) * units[i];
      if (adds)
        for (int r = 0; r < rows; r++) of[r] += y[r];
      std::memcpy(y, of, rows * sizeof(float));
    }
  }
};

struct alignas(64) Register {
  int16_t words[chunk / 2];
};

// What codes stand for that begin at some bit of each lane.
template <int bits>
EQQUANT_INLINE __m512 level(__m512 table, __m512i codes, int shift) {
  const __m512i code = _mm512_srli_epi32(codes, shift);
  if constexpr (bits == 8)
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(code, 24), 24));
  return _mm512_permutexvar_ps(code, table);
}

// Chunks `begin` to `end` of a row of the weight as words, with the scales in them; returns
// their unit.
template <int bits>
float decode_row(const Product& p, const Scales& blocks, float largest, int64_t row,
                 const float* scales, int64_t begin, int64_t end, int16_t* words,
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
  const float most = absmax_of(scales + start.block, some) * largest;
  if (!std::isfinite(most)) return NAN;
  float per_unit = largest_word / most;
  if (!std::isfinite(per_unit)) per_unit = 0;
  // The square of the largest norm of a lane: see `norm_of_lanes`.
  __m512 square = _mm512_setzero_ps();
  for_each_chunk(per_unit, [&](__m512i codes, __m512 scale) {
    __m512 sum = _mm512_setzero_ps();
    for (int shift = 0, step = 1; shift < 16; shift += bits, step++) {
      const __m512 low = level<bits>(levels, codes, shift);
      const __m512 high = level<bits>(levels, codes, shift + 16);
      sum = _mm512_fmadd_ps(low, low, _mm512_fmadd_ps(high, high, sum));
      if (step % InMemory<bits, 1>::steps_of_sum) continue;
      square = _mm512_max_ps(square, _mm512_mul_ps(sum, _mm512_mul_ps(scale, scale)));
      sum = _mm512_setzero_ps();
    }
  });
  per_unit *= shrunk(std::sqrt(_mm512_reduce_max_ps(square)), largest_norm);
  for_each_chunk(per_unit, [&](__m512i codes, __m512 scale) {
    const auto word = [&](int shift) {
      return _mm512_cvtps_epi32(_mm512_mul_ps(level<bits>(levels, codes, shift), scale));
    };
    for (int shift = 0; shift < 16; shift += bits, words += stride)
      _mm512_store_si512(words, _mm512_mask_mov_epi16(word(shift), 0xAAAAAAAA,
                                                      _mm512_slli_epi32(word(shift + 16), 16)));
  });
  return per_unit > 0 ? 1 / per_unit : 0;
}

template <int bits>
struct Rows {
  static constexpr int64_t of_panel = panel_words / (16 / bits * (chunk / 2));
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
        decoded(p.m >= many(p) ? 4 * panel_words / (chunk / 2) : 0) {}

  // Some rows of the weight with rows `begin` to `end` of the activation, in `chunks` from
  // chunk `c` on.
  template <int rows, class Weights>
  void multiply(const Weights& weights, int64_t row, int64_t begin, int64_t end, int64_t c,
                int64_t chunks) {
    for (int64_t i = begin; i < end; i += most_at_once) {
      const auto run = [&](auto count) {
        const int64_t skipped = c * steps_of(p) * count * (chunk / 2);
        Tile<bits, rows, count>::run(weights, x + i * row_words(p) + skipped, units + i, chunks,
                                     c > 0, p.y + i * p.rows + row, p.rows);
      };
      switch (group_of(p, i)) {
        case 1: run(std::integral_constant<int, 1>()); break;
        case 2: run(std::integral_constant<int, 2>()); break;
        default: run(std::integral_constant<int, 3>());
      }
    }
  }

  template <int rows>
  void few(int64_t row) {
    const float* scales = scales_of(p, row, rows, buffer.data());
    const InRegisters<bits, rows> weights(p, levels, blocks, scales, row);
    multiply<rows>(weights, row, 0, p.m, 0, chunks_of(p));
  }

  template <int rows>
  void panel(int64_t row, int64_t begin, int64_t end, int64_t c, int64_t chunks) {
    const float* scales = scales_of(p, row, rows, buffer.data());
    const float largest = largest_of_levels(p);
    float of_weight[rows];
    for (int r = 0; r < rows; r++)
      of_weight[r] = decode_row<bits>(p, blocks, largest, row + r, scales + r * p.blocks, c,
                                      c + chunks, decoded[r].words, rows * (chunk / 2));
    // What is decoded next: parts of rows are too short for the hardware to find out.
    for (int r = 0; r < rows; r++)
      for (int64_t j = c; j < c + chunks; j++)
        __builtin_prefetch(p.codes + (row + rows + r) * p.packed + j * chunk, 0, 2);
    const InMemory<bits, rows> weights{decoded[0].words, of_weight};
    multiply<rows>(weights, row, begin, end, c, chunks);
  }
};

// Calls `use(rows, row)` for rows of the weight, by fours as long as there are as many.
template <class Use>
void by_fours(int64_t begin, int64_t end, const Use& use) {
  for (; begin + 4 <= end; begin += 4) use(std::integral_constant<int, 4>(), begin);
  for (; begin < end; begin++) use(std::integral_constant<int, 1>(), begin);
}

// The size of pieces of at most `most`, all but the last of one size.
int64_t evenly(int64_t count, int64_t most) {
  const int64_t pieces = (count + most - 1) / most;
  return (count + pieces - 1) / pieces;
}

template <int bits>
void all_rows(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  Rows<bits> of(p, const_cast<char*>(scratch));  // It is only read.
  if (p.m < many(p))
    return by_fours(begin, end, [&](auto rows, int64_t row) { of.template few<rows>(row); });
  const int64_t chunks = evenly(chunks_of(p), of.of_panel), bytes = chunks * steps_of(p) * chunk;
  const int64_t groups = (p.m + most_at_once - 1) / most_at_once;
  const int64_t in_turn = most_at_once * evenly(groups, cached_bytes / bytes / most_at_once);
  for (int64_t i = 0; i < p.m; i += in_turn)
    for (int64_t c = 0; c < chunks_of(p); c += chunks)
      by_fours(begin, end, [&](auto rows, int64_t row) {
        of.template panel<rows>(row, i, std::min(p.m, i + in_turn), c,
                                std::min(chunks, chunks_of(p) - c));
      });
}

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_bits(p, [&](auto bits) { all_rows<bits>(p, scratch, begin, end); });
}

const char* why_not(const Product& p) {
  if (p.exponent) return "floats of 8 bits need a float kernel";
  if (!p.fits_in_lanes(chunk) || (p.bits < 8 && p.run % 2))
    return "blocks must divide 64 bytes, or be a multiple of them";
  return nullptr;
}

}  // namespace

extern const Routine words_vnni = {prepare, run, scratch_size, always<8>, why_not};

}  // namespace eqquant
EQQUANT_TARGET_END
