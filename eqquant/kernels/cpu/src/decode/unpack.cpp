// All machines with kernels have these instructions.
#if defined(__x86_64__)
#define EQQUANT_TARGET_AVX2
#include <immintrin.h>
#else
#define EQQUANT_TARGET_NEON
#endif

#include <algorithm>
#include <cstring>
#include <memory>

#include "decode/unpack.h"
#include "runtime/target.h"

EQQUANT_TARGET_BEGIN(EQQUANT_FEATURES)
namespace eqquant {
namespace {

// The number of codes per step, for few and for more rows of the activation: limited by the first-level and
// second-level caches.
constexpr int64_t few_bytes = 1 << 14, many_bytes = 1 << 18, few = 8;

// Two codes per byte: their low two bits, and the high bit.
constexpr uint8_t low = 0x33, high = 0x44;

// One machine word of bytes. Bits that shifts move in from other bytes are masked.
template <class Word>
void unpack_words(const uint8_t* from, int64_t part, uint8_t* to) {
  const Word lows = static_cast<Word>(low * (~0ull / 255));
  const Word highs = static_cast<Word>(high * (~0ull / 255));
  for (int64_t i = 0; i < part; i += sizeof(Word)) {
    Word a, b, c;
    std::memcpy(&a, from + i, sizeof a);
    std::memcpy(&b, from + part + i, sizeof b);
    std::memcpy(&c, from + 2 * part + i, sizeof c);
    const auto write = [&](int which, Word word) {
      std::memcpy(to + which * part + i, &word, sizeof word);
    };
    write(0, static_cast<Word>((a & lows) | (c << 2 & highs)));
    write(1, static_cast<Word>((b & lows) | (c << 1 & highs)));
    write(2, static_cast<Word>((a >> 2 & lows) | (c & highs)));
    write(3, static_cast<Word>((b >> 2 & lows) | (c >> 1 & highs)));
  }
}

// The same for groups of 64 codes, which most formats have.
EQQUANT_INLINE void unpack_64(const uint8_t* from, uint8_t* to) {
#if defined(__x86_64__)
  const __m256i lows = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  int64_t eight;
  std::memcpy(&eight, from + 16, sizeof eight);
  const __m256i highs = _mm256_srli_epi64(
      _mm256_sllv_epi64(_mm256_set1_epi64x(eight), _mm256_setr_epi64x(3, 2, 1, 0)), 1);
  const __m256i shifted = _mm256_srlv_epi64(lows, _mm256_setr_epi64x(0, 0, 2, 2));
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(to),
      _mm256_or_si256(_mm256_and_si256(shifted, _mm256_set1_epi8(low)),
                      _mm256_and_si256(highs, _mm256_set1_epi8(high))));
#else
  unpack_words<uint64_t>(from, 8, to);
#endif
}

}  // namespace

void unpack(const uint8_t* from, int64_t groups, int64_t run, uint8_t* to) {
  const int64_t part = run / 4;
  for (int64_t i = 0; i < groups; i++, from += 3 * part, to += run) {
    prefetch(from);
    if (part == 8)
      unpack_64(from, to);
    else if (part % 8 == 0)
      unpack_words<uint64_t>(from, part, to);
    else if (part % 4 == 0)
      unpack_words<uint32_t>(from, part, to);
    else
      unpack_words<uint8_t>(from, part, to);
  }
}

void run_units(const Routine& routine, const Product& p, const char* scratch, int64_t begin,
               int64_t end) {
  // In x @ w a routine processes parts of all rows: unpack these parts.
  if (!p.three_bits || p.contract_rows) return routine.run(p, scratch, begin, end);
  const int64_t bytes = p.m < few ? few_bytes : many_bytes, grain = routine.grain(p);
  const int64_t at_once =
      std::min(end - begin, std::max<int64_t>(1, bytes / p.packed / grain) * grain);
  const std::unique_ptr<uint8_t[]> unpacked(new uint8_t[at_once * p.packed]);
  Product some = p;
  some.codes = unpacked.get();
  for (int64_t row = begin; row < end; row += at_once) {
    const int64_t rows = std::min(at_once, end - row);
    unpack(p.stored(row), rows * (p.packed / p.run), p.run, unpacked.get());
    some.scales = static_cast<const char*>(p.scales) + row * p.blocks * p.scale_size();
    some.y = p.y + row;
    routine.run(some, scratch, 0, rows);
  }
}

}  // namespace eqquant
EQQUANT_TARGET_END
