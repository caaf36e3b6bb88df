// Products of many rows in bfloat16: AMX.
//
// Both operands are split, `value = high + low` with two bfloat16, which keeps 16 bits of
// them; and three products, high * high + high * low + low * high, are summed in float32.
//
// A tile is 16 rows of 64 bytes. The decoded weight is the left operand, so that its rows
// stay rows; the activation, on the right, has pairs of columns next to one another.
#include <immintrin.h>

#include <vector>

#include "product.h"
#include "target.h"

EQQUANT_TARGET_BEGIN(
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,avx2,fma")
namespace eqquant {
namespace {

constexpr int tile_rows = 16, tile_columns = 32, tile_size = tile_rows * tile_columns;
// Rows of the weight at once, and bytes of each: what they decode to fits the L1 cache.
constexpr int rows_at_once = 2 * tile_rows, decoded_at_once = 8 * tile_columns;

using bfloat16 = uint16_t;

int64_t steps_of_plane(const Product& p) { return (p.packed + tile_columns - 1) / tile_columns; }
int64_t steps(const Product& p) { return steps_of_plane(p) * p.planes(); }
int64_t tiles_of_x(const Product& p) { return (p.m + tile_rows - 1) / tile_rows; }

// Scratch is the activation as tiles: (rows of tiles, byte step, plane, high and low).
int64_t scratch_size(const Product& p) {
  return tiles_of_x(p) * steps(p) * 2 * tile_size * static_cast<int64_t>(sizeof(bfloat16));
}

struct Halves {
  __m256i high, low;
};

EQQUANT_INLINE Halves split(__m512 x) {
  const __m256i high = (__m256i)_mm512_cvtneps_pbh(x);
  const __m512 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
  return {high, (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x, back))};
}

void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  std::vector<float> planar(steps(p) * tile_columns);
  const int64_t plane = steps_of_plane(p) * tile_columns;
  for (int64_t i = begin; i < end; i++) {
    const float* x = p.x + i * p.columns();
    for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t at, int64_t length) {
      std::memcpy(&planar[at / p.packed * plane + at % p.packed], x + logical,
                  length * sizeof(float));
    });
    uint32_t* tiles = reinterpret_cast<uint32_t*>(scratch) +
                      i / tile_rows * steps(p) * tile_size + i % tile_rows;
    for (int64_t step = 0; step < steps_of_plane(p); step++)
      for (int of = 0; of < p.planes(); of++, tiles += tile_size)
        for (int half = 0; half < 2; half++) {
          const Halves pairs =
              split(_mm512_loadu_ps(&planar[of * plane + step * tile_columns + half * 16]));
          alignas(32) uint32_t high[8], low[8];
          _mm256_store_si256(reinterpret_cast<__m256i*>(high), pairs.high);
          _mm256_store_si256(reinterpret_cast<__m256i*>(low), pairs.low);
          for (int k = 0; k < 8; k++) {
            tiles[(half * 8 + k) * tile_rows] = high[k];
            tiles[tile_size / 2 + (half * 8 + k) * tile_rows] = low[k];
          }
        }
  }
}

template <int bits, int plane>
EQQUANT_INLINE __m512 decode(__m512 levels, __m128i bytes) {
  if constexpr (bits == 8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(bytes), plane * bits),
                               levels);
}

// Sixteen bytes of a row to their place in the tiles of each plane.
template <int bits, int plane>
EQQUANT_INLINE void decode_planes(__m512 levels, __m128i bytes, __m512 scale, bfloat16* out) {
  const Halves halves = split(_mm512_mul_ps(decode<bits, plane>(levels, bytes), scale));
  bfloat16* high = out + plane * 4 * tile_size;
  _mm256_store_si256(reinterpret_cast<__m256i*>(high), halves.high);
  _mm256_store_si256(reinterpret_cast<__m256i*>(high + tile_size), halves.low);
  if constexpr ((plane + 1) * bits < 8) decode_planes<bits, plane + 1>(levels, bytes, scale, out);
}

// Some bytes of up to 32 rows as tiles: (byte step, plane, high and low, half of the rows).
template <int bits>
void decode_tiles(const Product& p, const float* scales, int64_t row, int rows, int64_t begin,
                  int64_t end, bfloat16* tiles) {
  const __m512 levels = _mm512_loadu_ps(p.levels);
  const int64_t block = p.block_bytes();
  for (int r = 0; r < rows; r++) {
    const uint8_t* codes = p.codes + (row + r) * p.packed;
    // Tiles of the two halves of the rows lie between the high and the low one.
    bfloat16* out = tiles + r / tile_rows * 2 * tile_size + r % tile_rows * tile_columns;
    for (int64_t j = begin; j < end; j += 16) {
      const __mmask16 some = p.packed - j >= 16 ? 0xFFFF
                             : p.packed > j     ? (1u << (p.packed - j)) - 1
                                                : 0;
      const __m128i bytes = _mm_maskz_loadu_epi8(some, codes + j);
      const int64_t b = std::min(j / block, p.blocks - 1);
      const int64_t step = (j - begin) / tile_columns;
      bfloat16* at = out + step * (8 / bits) * 4 * tile_size + (j - begin) % tile_columns;
      decode_planes<bits, 0>(levels, bytes, _mm512_set1_ps(scales[r * p.blocks + b]), at);
    }
  }
}

// All tiles whole, in the one palette that there is.
void configure() {
  alignas(64) struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = tile_rows;
  _tile_loadconfig(&config);
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
  _tile_loadd(6, x, 64);
  if constexpr (two) _tile_loadd(7, x + next, 64);
}

EQQUANT_INLINE void load_weight(const bfloat16* tiles) {
  _tile_loadd(4, tiles, 64);
  _tile_loadd(5, tiles + 2 * tile_size, 64);
}

// `sums` is (32, ld) floats; `next` from one row of tiles of the activation to the next.
template <bool two>
void multiply_tiles(const bfloat16* weight, const bfloat16* x, int64_t next, int64_t steps,
                    float* sums, int64_t ld) {
  const int64_t stride = ld * sizeof(float);
  _tile_loadd(0, sums, stride);
  _tile_loadd(2, sums + tile_rows * ld, stride);
  if constexpr (two) {
    _tile_loadd(1, sums + tile_rows, stride);
    _tile_loadd(3, sums + tile_rows * ld + tile_rows, stride);
  }
  for (int64_t step = 0; step < steps; step++, weight += 4 * tile_size, x += 2 * tile_size) {
    load_weight(weight);
    load_x<two>(x + tile_size, next);
    multiply<two>();
    load_x<two>(x, next);
    multiply<two>();
    load_weight(weight + tile_size);
    multiply<two>();
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

template <int bits>
void some_rows(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  constexpr int planes = 8 / bits, bytes = decoded_at_once / planes;
  const bfloat16* x = reinterpret_cast<const bfloat16*>(scratch);
  const int64_t tiles = tiles_of_x(p), ld = tiles * tile_rows, next = steps(p) * 2 * tile_size;
  std::vector<Line> decoded(rows_at_once * decoded_at_once * 2 * sizeof(bfloat16) / 64);
  std::vector<float> sums(rows_at_once * ld);
  std::vector<float> buffer(p.bfloat16_scales ? rows_at_once * p.blocks : 0);
  bfloat16* weight = reinterpret_cast<bfloat16*>(decoded.data());
  configure();
  for (int64_t row = begin; row < end; row += rows_at_once) {
    const int rows = static_cast<int>(std::min<int64_t>(rows_at_once, end - row));
    const float* scales = scales_of(p, row, rows, buffer.data());
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t j = 0; j < p.packed; j += bytes) {
      const int64_t some = std::min<int64_t>(bytes, steps_of_plane(p) * tile_columns - j);
      decode_tiles<bits>(p, scales, row, rows, j, j + some, weight);
      const int64_t count = some / tile_columns * planes;
      const bfloat16* from = x + j / tile_columns * planes * 2 * tile_size;
      int64_t m = 0;
      for (; m + 2 <= tiles; m += 2)
        multiply_tiles<true>(weight, from + m * next, next, count, &sums[m * tile_rows], ld);
      if (m < tiles)
        multiply_tiles<false>(weight, from + m * next, next, count, &sums[m * tile_rows], ld);
    }
    for (int64_t i = 0; i < p.m; i++)
      for (int r = 0; r < rows; r++) p.y[i * p.rows + row + r] = sums[r * ld + i];
  }
  _tile_release();
}

void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  with_bits(p, [&](auto bits) { some_rows<bits>(p, scratch, begin, end); });
}

const char* why_not(const Product& p) {
  if (p.exponent) return "floats of 8 bits need a float kernel";
  if (p.blocks > 1 && p.block_bytes() % 16) return "blocks must be a multiple of 16 bytes";
  return nullptr;
}

}  // namespace

extern const Routine split_amx = {prepare, run, scratch_size, always<rows_at_once>, why_not};

}  // namespace eqquant
EQQUANT_TARGET_END
