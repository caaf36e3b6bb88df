// bfloat16 x @ w.T by AMX tiles. Both operands are rounded to bfloat16, and products are summed in float32.
#define EQQUANT_TARGET_AMX
#include <immintrin.h>

#include <algorithm>
#include <vector>

#include "decode/scales.h"
#include "microkernels/amx/x_wt.h"
#include "runtime/absmax.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN
namespace {

EQQUANT_INLINE __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
EQQUANT_INLINE __m512i both(__m256i first, __m256i second) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

class Bfloat16Element {
  const Product& p;
  std::vector<float> scales;

 public:
  using Number = uint16_t;

  static int64_t space(const Product&) { return 0; }
  Bfloat16Element(const Product& p, char*) : p(p) {}
  bool low_parts() const { return false; }

  void round(const Layout<uint16_t>& layout, int64_t, const float* x, uint16_t* row, int64_t) {
    check_row(p, x);
    layout.for_each_run([&](int64_t logical, int64_t place, int64_t length) {
      for (int64_t j = 0; j < length; j += 16) {
        const __mmask16 some = first(length - j);
        _mm256_mask_storeu_epi16(row + place + j, some,
                                 rounded(_mm512_maskz_loadu_ps(some, x + logical + j)));
      }
    });
  }

  Decoded<uint16_t> decode(const Span& span, int64_t row, int rows,
                           const Decoded<uint16_t>& to) {
    scales.resize(p.scale_buffer(rows));
    const float* of = scales_of(p, row, rows, scales.data());
    with_bits(p, [&](auto bits) {
      for (int r = 0; r < rows; r++)
        decode_row<bits>(span, of + r * p.blocks, p.codes + (row + r) * p.packed + span.begin,
                         to.row(r));
    });
    return to;
  }

  EQQUANT_INLINE __m512 result(int64_t, const int32_t* sums, const int32_t*, int) const {
    return _mm512_load_ps(sums);
  }

 private:
  static EQQUANT_INLINE __m256i scaled(__m128i codes, float by) {
    const __m512 integers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    return rounded(_mm512_mul_ps(integers, _mm512_set1_ps(by)));
  }

  // Decodes 32 codes of each plane.
  template <int bits, int plane = 0>
  EQQUANT_INLINE void decode_planes(const Span& span, __m512i table, __m512i codes,
                                    __mmask32 some, uint16_t* to) {
    // The fifth bit of an index selects the half of the bytes, and so of the table.
    const __m512i halves = both(_mm256_setzero_si256(), _mm256_set1_epi16(16));
    const __m512i shifted = _mm512_srli_epi16(codes, plane * bits);
    const __m512i index =
        _mm512_or_si512(_mm512_and_si512(shifted, _mm512_set1_epi16(15)), halves);
    _mm512_mask_storeu_epi16(to, some, _mm512_permutexvar_epi16(index, table));
    if constexpr ((plane + 1) * bits < 8)
      decode_planes<bits, plane + 1>(span, table, codes, some, to + span.plane);
  }

  template <int bits>
  void decode_row(const Span& span, const float* of_row, const uint8_t* codes, uint16_t* to) {
    const __m512 levels = _mm512_loadu_ps(p.levels);
    // Scales change between halves of 32 bytes. The last half may be beyond the end of a row.
    const int64_t of_block = p.blocks > 1 ? p.block_bytes() / 16 : INT64_MAX;
    const int64_t ahead = far_ahead(p, span);
    int64_t block = span.begin / 16 / of_block;
    int64_t left = (block + 1) * of_block - span.begin / 16;
    if (p.blocks == 1) block = 0, left = INT64_MAX;
    __m512i table = _mm512_setzero_si512();
    bool known = false;
    for (int64_t j = 0; j < span.bytes; j += 32, to += 32) {
      const int64_t count = std::min<int64_t>(32, span.bytes - j);
      const __mmask32 some = count == 32 ? ~0u : (1u << count) - 1;
      const float scale = of_row[std::min(block, p.blocks - 1)];
      const float next = left > 1 ? scale : of_row[std::min(block + 1, p.blocks - 1)];
      const __m256i bytes = _mm256_maskz_loadu_epi8(some, codes + j);
      __builtin_prefetch(codes + ahead + j, 0, 2);
      if constexpr (bits == 8) {
        _mm512_mask_storeu_epi16(to, some,
                                 both(scaled(_mm256_castsi256_si128(bytes), scale),
                                      scaled(_mm256_extracti128_si256(bytes, 1), next)));
      } else {
        if (!known) {
          const __m256i of = rounded(_mm512_mul_ps(levels, _mm512_set1_ps(scale)));
          table = both(of, next == scale
                               ? of
                               : rounded(_mm512_mul_ps(levels, _mm512_set1_ps(next))));
        }
        decode_planes<bits>(span, table, _mm512_cvtepu8_epi16(bytes), some, to);
      }
      known = left > 3;  // The next two halves have the same scale.
      for (left -= 2; left <= 0; left += of_block) block++;
    }
  }
};

inline const char* why_not(const Product& p) {
  if (p.exponent) return "float8 codes are multiplied as int8";
  if (p.blocks > 1 && p.block_bytes() % 16) return "blocks must be a multiple of 16 bytes";
  return nullptr;
}

}  // namespace
EQQUANT_END

namespace eqquant {
extern const Routine bfloat16_x_wt_amx = {
    amx::prepare<amx::Bfloat16Element>, amx::run<amx::Bfloat16Element>,
    amx::scratch_size<amx::Bfloat16Element>, always<amx::weight_rows>, amx::why_not};
}  // namespace eqquant
