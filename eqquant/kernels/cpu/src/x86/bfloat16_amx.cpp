// Products of more rows in bfloat16: AMX.
//
// Both operands are rounded, to one part. Or they are split in two, `value = high + low`,
// which keeps 16 bits of them; and three products, high * high + high * low + low * high, are
// summed in float32.
//
// The decoded weight is the left operand, so that its rows stay rows of a tile; the
// activation, on the right, has pairs of columns next to one another.
#include <immintrin.h>

#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN(
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma")
namespace eqquant {
namespace {

#include "tiles_amx.h"

constexpr int tile_columns = 32, tile_size = tile_rows * tile_columns;
// Bytes of a step, of each of which the codes have one column of a plane, and half of these.
constexpr int half_step = tile_columns / 2;
// Rows of the weight at once, and bytes of each: what they decode to fits the L1 cache.
constexpr int rows_at_once = 2 * tile_rows, decoded_at_once = 8 * tile_columns;

using bfloat16 = uint16_t;

int64_t steps_of_plane(const Product& p) { return (p.packed + tile_columns - 1) / tile_columns; }
int64_t steps(const Product& p) { return steps_of_plane(p) * p.planes(); }
int64_t tiles_of_x(const Product& p) { return (p.m + tile_rows - 1) / tile_rows; }

// Scratch is the activation as tiles: (rows of tiles, byte step, plane, part).
int64_t scratch_size(const Product& p) {
  return tiles_of_x(p) * steps(p) * p.digits * tile_size * static_cast<int64_t>(sizeof(bfloat16));
}

struct Halves {
  __m256i high, low;
};

EQQUANT_INLINE __mmask32 first_bytes(int64_t count) {
  return count >= 32 ? ~0u : count > 0 ? (1u << count) - 1 : 0;
}

EQQUANT_INLINE Halves split(__m512 x) {
  const __m256i high = (__m256i)_mm512_cvtneps_pbh(x);
  const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
  return {high, (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x, back))};
}

// Sixteen numbers as parts, each from one tile on to the next.
template <int parts>
EQQUANT_INLINE void write_parts(__m512 x, bfloat16* to) {
  const Halves halves = split(x);
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), halves.high);
  if constexpr (parts > 1)
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + tile_size), halves.low);
}

template <int parts>
void prepare_parts(const Product& p, char* scratch, int64_t begin, int64_t end) {
  std::vector<float> planar(steps(p) * tile_columns);
  const int64_t plane = steps_of_plane(p) * tile_columns;
  Activation activation(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = activation.row(i);
    for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t at, int64_t length) {
      std::memcpy(&planar[at / p.packed * plane + at % p.packed], x + logical,
                  length * sizeof(float));
    });
    uint32_t* tiles = reinterpret_cast<uint32_t*>(scratch) +
                      i / tile_rows * steps(p) * parts * tile_size / 2 + i % tile_rows;
    for (int64_t step = 0; step < steps_of_plane(p); step++)
      for (int of = 0; of < p.planes(); of++)
        for (int half = 0; half < 2; half++) {
          alignas(32) uint32_t pairs[2][8];
          const Halves halves =
              split(_mm512_loadu_ps(&planar[of * plane + step * tile_columns + half * 16]));
          _mm256_store_si256(reinterpret_cast<__m256i*>(pairs[0]), halves.high);
          _mm256_store_si256(reinterpret_cast<__m256i*>(pairs[1]), halves.low);
          for (int part = 0; part < parts; part++)
            for (int k = 0; k < 8; k++)
              tiles[part * tile_size / 2 + (half * 8 + k) * tile_rows] = pairs[part][k];
          if (half) tiles += parts * tile_size / 2;
        }
  }
}

// What codes stand for in one or two blocks of a step, one after the other, in parts: for each
// of the 16 values of four bits, times the scale of the block.
template <int parts>
struct Tables {
  __m512i of[parts];

  static EQQUANT_INLINE __m512i both(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  }
  EQQUANT_INLINE void set(__m512 levels, float first, float second) {
    const Halves a = split(_mm512_mul_ps(levels, _mm512_set1_ps(first)));
    Halves b = a;
    if (second != first) b = split(_mm512_mul_ps(levels, _mm512_set1_ps(second)));
    of[0] = both(a.high, b.high);
    if constexpr (parts > 1) of[1] = both(a.low, b.low);
  }
};

// The 32 codes of a step that are in one plane, to their place in its tiles.
template <int bits, int parts, int plane = 0>
EQQUANT_INLINE void decode_planes(const Tables<parts>& tables, __m512i codes, bfloat16* out) {
  // Of an index the fifth bit is which block.
  const __m512i blocks = Tables<parts>::both(_mm256_setzero_si256(), _mm256_set1_epi16(16));
  const __m512i shifted = _mm512_srli_epi16(codes, plane * bits);
  const __m512i index =
      _mm512_or_si512(_mm512_and_si512(shifted, _mm512_set1_epi16(15)), blocks);
  for (int part = 0; part < parts; part++)
    _mm512_store_si512(out + part * tile_size, _mm512_permutexvar_epi16(index, tables.of[part]));
  if constexpr ((plane + 1) * bits < 8)
    decode_planes<bits, parts, plane + 1>(tables, codes, out + 2 * parts * tile_size);
}

// Some bytes of up to 32 rows as tiles: (byte step, plane, half of the rows, part).
template <int bits, int parts>
void decode_tiles(const Product& p, const float* scales, int64_t row, int rows, int64_t begin,
                  int64_t end, bfloat16* tiles) {
  const __m512 levels = _mm512_loadu_ps(p.levels);
  // In halves of a step, of which the last ones may be beyond the end of a row.
  const int64_t of_block = p.blocks > 1 ? p.block_bytes() / half_step : INT64_MAX;
  for (int r = 0; r < rows; r++, scales += p.blocks) {
    const uint8_t* codes = p.codes + (row + r) * p.packed;
    bfloat16* out = tiles + r / tile_rows * parts * tile_size + r % tile_rows * tile_columns;
    int64_t block = begin / half_step / of_block;
    int64_t left = (block + 1) * of_block - begin / half_step;
    Tables<parts> tables;
    bool known = false;
    for (int64_t j = begin; j < end; j += tile_columns, out += 8 / bits * 2 * parts * tile_size) {
      const float scale = scales[std::min(block, p.blocks - 1)];
      const float next = left > 1 ? scale : scales[std::min(block + 1, p.blocks - 1)];
      const __m256i bytes = _mm256_maskz_loadu_epi8(first_bytes(p.packed - j), codes + j);
      if constexpr (bits == 8) {
        const auto write = [&](__m128i some, float by, int at) {
          const __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(some));
          write_parts<parts>(_mm512_mul_ps(values, _mm512_set1_ps(by)), out + at);
        };
        write(_mm256_castsi256_si128(bytes), scale, 0);
        write(_mm256_extracti128_si256(bytes, 1), next, half_step);
      } else {
        if (!known) tables.set(levels, scale, next);
        decode_planes<bits, parts>(tables, _mm512_cvtepu8_epi16(bytes), out);
      }
      known = left > 3;  // Both halves of the next step, too.
      for (left -= 2; left <= 0; left += of_block) block++;
    }
  }
}

// Tiles 0 to 3 are sums, for two halves of rows by one or two of the activation; 4 and 5
// the weight, 6 and 7 the activation.
template <bool two>
EQQUANT_INLINE void multiply() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(2, 5, 6);
  if constexpr (two) {
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool two>
EQQUANT_INLINE void load_x(const bfloat16* x, int64_t next) {
  _tile_loadd(6, x, tile_bytes);
  if constexpr (two) _tile_loadd(7, x + next, tile_bytes);
}

template <int parts>
EQQUANT_INLINE void load_weight(const bfloat16* tiles) {
  _tile_loadd(4, tiles, tile_bytes);
  _tile_loadd(5, tiles + parts * tile_size, tile_bytes);
}

// `sums` is (32, ld) floats; `next` from one row of tiles of the activation to the next.
template <int parts, bool two>
void multiply_tiles(const bfloat16* weight, const bfloat16* x, int64_t next, int64_t steps,
                    float* sums, int64_t ld) {
  const int64_t stride = ld * sizeof(float);
  _tile_loadd(0, sums, stride);
  _tile_loadd(2, sums + tile_rows * ld, stride);
  if constexpr (two) {
    _tile_loadd(1, sums + tile_rows, stride);
    _tile_loadd(3, sums + tile_rows * ld + tile_rows, stride);
  }
  for (; steps; steps--, weight += 2 * parts * tile_size, x += parts * tile_size) {
    load_weight<parts>(weight);
    if constexpr (parts > 1) {
      load_x<two>(x + tile_size, next);
      multiply<two>();
    }
    load_x<two>(x, next);
    multiply<two>();
    if constexpr (parts > 1) {
      load_weight<parts>(weight + tile_size);
      multiply<two>();
    }
  }
  _tile_stored(0, sums, stride);
  _tile_stored(2, sums + tile_rows * ld, stride);
  if constexpr (two) {
    _tile_stored(1, sums + tile_rows, stride);
    _tile_stored(3, sums + tile_rows * ld + tile_rows, stride);
  }
}

struct alignas(64) Line {
  char bytes[64];
};

template <int bits, int parts>
void some_rows(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  constexpr int planes = 8 / bits, bytes = decoded_at_once / planes;
  const bfloat16* x = reinterpret_cast<const bfloat16*>(scratch);
  const int64_t tiles = tiles_of_x(p), ld = tiles * tile_rows, next = steps(p) * parts * tile_size;
  std::vector<Line> decoded(rows_at_once * decoded_at_once * parts * sizeof(bfloat16) / 64);
  std::vector<float> sums(rows_at_once * ld);
  std::vector<float> buffer(p.bfloat16_scales ? rows_at_once * p.blocks : 0);
  bfloat16* weight = reinterpret_cast<bfloat16*>(decoded.data());
  const Configured configured;
  for (int64_t row = begin; row < end; row += rows_at_once) {
    const int rows = static_cast<int>(std::min<int64_t>(rows_at_once, end - row));
    const float* scales = scales_of(p, row, rows, buffer.data());
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t j = 0; j < p.packed; j += bytes) {
      const int64_t some = std::min<int64_t>(bytes, steps_of_plane(p) * tile_columns - j);
      decode_tiles<bits, parts>(p, scales, row, rows, j, j + some, weight);
      const int64_t count = some / tile_columns * planes;
      const bfloat16* from = x + j / tile_columns * planes * parts * tile_size;
      int64_t m = 0;
      for (; m + 2 <= tiles; m += 2)
        multiply_tiles<parts, true>(weight, from + m * next, next, count, &sums[m * tile_rows], ld);
      if (m < tiles)
        multiply_tiles<parts, false>(weight, from + m * next, next, count, &sums[m * tile_rows], ld);
    }
    for (int64_t i = 0; i < p.m; i++)
      for (int r = 0; r < rows; r++) p.y[i * p.rows + row + r] = sums[r * ld + i];
  }
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  p.digits == 1 ? prepare_parts<1>(p, scratch, begin, end)
                : prepare_parts<2>(p, scratch, begin, end);
}

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_bits(p, [&](auto bits) {
    p.digits == 1 ? some_rows<bits, 1>(p, scratch, begin, end)
                  : some_rows<bits, 2>(p, scratch, begin, end);
  });
}

const char* why_not(const Product& p) {
  if (p.exponent) return "floats of 8 bits need a float kernel";
  if (p.blocks > 1 && p.block_bytes() % 16) return "blocks must be a multiple of 16 bytes";
  return nullptr;
}

}  // namespace

extern const Routine bfloat16_amx = {prepare, run, scratch_size, always<rows_at_once>, why_not};

}  // namespace eqquant
EQQUANT_TARGET_END
