#define EQQUANT_TARGET_ANY
#if defined(__x86_64__)
#include <immintrin.h>
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

// Three-bit codes, one machine word of bytes at a time. Bits that shifts move in from other bytes are masked.
template <class Word>
void unpack_three(const uint8_t* from, int64_t run, uint8_t* to) {
  const int64_t part = run / 4;
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

// Groups of 16 two-bit codes.
void unpack_two(const uint8_t* from, int64_t, uint8_t* to) {
  uint32_t all;
  std::memcpy(&all, from, sizeof all);
  const uint32_t first = all & 0x33333333u, second = all >> 2 & 0x33333333u;
  std::memcpy(to, &first, sizeof first);
  std::memcpy(to + sizeof first, &second, sizeof second);
}

// Three-bit codes in groups of 64, which most formats have.
void unpack_three_64(const uint8_t* from, int64_t run, uint8_t* to) {
#if defined(__x86_64__)
  constexpr int64_t ones = 0x0001000100010001;
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i lows = _mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 2), 1);
  int64_t eight;
  std::memcpy(&eight, from + 16, sizeof eight);
  // A different shift of each part, as a product: such shifts take longer with some CPUs (Zen 1).
  const __m256i factors = _mm256_setr_epi64x(8 * ones, 4 * ones, 2 * ones, ones);
  const __m256i highs = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_set1_epi64x(eight), factors), 1);
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(to),
      _mm256_or_si256(_mm256_and_si256(lows, _mm256_set1_epi8(low)),
                      _mm256_and_si256(highs, _mm256_set1_epi8(high))));
#else
  unpack_three<uint64_t>(from, run, to);
#endif
}

// Codes of 5 and 6 bits, one machine word of bytes at a time.
template <int bits, class Word>
void unpack_to_int8(const uint8_t* from, int64_t run, uint8_t* to) {
  constexpr int high_bits = bits - 4, planes = 8 / high_bits;
  constexpr Word ones = static_cast<Word>(~0ull / 255);
  const int64_t half = run / 2, part = run / planes;
  for (int plane = 0; plane < planes; plane++)
    for (int64_t i = 0; i < part; i += sizeof(Word)) {
      const int64_t j = plane * part + i;
      Word low, high;
      std::memcpy(&low, from + j % half, sizeof low);
      std::memcpy(&high, from + half + i, sizeof high);
      low = static_cast<Word>(low >> (j < half ? 0 : 4)) & static_cast<Word>(15 * ones);
      high = static_cast<Word>(high >> plane * high_bits) & static_cast<Word>(((1 << high_bits) - 1) * ones);
      // Subtract half of the range from each byte. The highest bit prevents a borrow from the next byte.
      Word code = static_cast<Word>(low | high << 4 | 128 * ones);
      code = static_cast<Word>(code - (1 << (bits - 1)) * ones) ^ static_cast<Word>(128 * ones);
      std::memcpy(to + j, &code, sizeof code);
    }
}

#if defined(__x86_64__)
EQQUANT_INLINE __m256i load(const uint8_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}
EQQUANT_INLINE __m256i twice(const uint8_t* at) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// The same for groups of `run` codes, 32 at a time.
template <int bits, int run>
void unpack_32(const uint8_t* from, int64_t, uint8_t* to) {
  constexpr int high_bits = bits - 4, half = run / 2, part = run * high_bits / 8;
  for (int j = 0; j < run; j += 32) {
    // The low bits are in one plane, or in both if the group has 32 codes.
    __m256i low = half == 16 ? _mm256_srlv_epi64(twice(from), _mm256_setr_epi64x(0, 0, 4, 4))
                             : _mm256_srli_epi16(load(from + j % half), j < half ? 0 : 4);
    __m256i high;
    const uint8_t* const highs = from + half;
    const auto shift = [&](int i) { return (j / part + i) * high_bits; };
    if constexpr (part == 4) {
      int32_t four;
      std::memcpy(&four, highs, sizeof four);
      high = _mm256_srlv_epi32(_mm256_set1_epi32(four), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    } else if constexpr (part == 8) {
      int64_t eight;
      std::memcpy(&eight, highs, sizeof eight);
      high = _mm256_srlv_epi64(_mm256_set1_epi64x(eight),
                               _mm256_setr_epi64x(shift(0), shift(1), shift(2), shift(3)));
    } else if constexpr (part == 16) {
      high = _mm256_srlv_epi64(twice(highs),
                               _mm256_setr_epi64x(shift(0), shift(0), shift(1), shift(1)));
    } else {
      high = _mm256_srl_epi16(load(highs + j % part), _mm_cvtsi32_si128(shift(0)));
    }
    low = _mm256_and_si256(low, _mm256_set1_epi8(15));
    high = _mm256_and_si256(high, _mm256_set1_epi8((1 << high_bits) - 1));
    const __m256i code = _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j),
                        _mm256_sub_epi8(code, _mm256_set1_epi8(1 << (bits - 1))));
  }
}
#endif

// Codes of 6 bits in groups of 16, as in Q6_K of GGUF.
void unpack_six_16(const uint8_t* from, int64_t, uint8_t* to) {
#if defined(__x86_64__)
  int64_t lows;
  int32_t highs;
  std::memcpy(&lows, from, sizeof lows);
  std::memcpy(&highs, from + sizeof lows, sizeof highs);
  const __m128i low = _mm_and_si128(_mm_srlv_epi64(_mm_set1_epi64x(lows), _mm_set_epi64x(4, 0)), _mm_set1_epi8(15));
  const __m128i high =
      _mm_and_si128(_mm_srlv_epi32(_mm_set1_epi32(highs), _mm_setr_epi32(0, 2, 4, 6)), _mm_set1_epi8(3));
  const __m128i code = _mm_or_si128(low, _mm_slli_epi16(high, 4));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_sub_epi8(code, _mm_set1_epi8(32)));
#else
  unpack_to_int8<6, uint32_t>(from, 16, to);  // The constant removes divisions.
#endif
}

// Unpacks groups by a function that is inlined.
using Unpacker = void(const uint8_t* from, int64_t groups, int64_t bytes, int64_t run, int64_t far, uint8_t* to);
template <void (*unpack_group)(const uint8_t*, int64_t, uint8_t*)>
void unpack_all(const uint8_t* from, int64_t groups, int64_t bytes, int64_t run, int64_t far, uint8_t* to) {
  for (int64_t i = 0; i < groups; i++, from += bytes, to += run) {
    prefetch(from, far);
    unpack_group(from, run, to);
  }
}

#if defined(__x86_64__)
// Reads 24 bytes: the first 16 and the last 16 of them, so that no load goes beyond.
EQQUANT_INLINE __m256i read_24(const uint8_t* from) {
  const __m128i *const first = reinterpret_cast<const __m128i*>(from),
                *const second = reinterpret_cast<const __m128i*>(from + 8);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(first)), _mm_loadu_si128(second), 1);
}
#endif

// Groups of 16 codes of 2 bits, as in Q2_K of GGUF, four at a time.
void unpack_twos_16(const uint8_t* from, int64_t groups, int64_t bytes, int64_t run, int64_t far, uint8_t* to) {
#if defined(__x86_64__)
  const __m256i used = _mm256_set1_epi8(low), second = _mm256_set1_epi64x(~0ull << 32);
  for (; groups >= 4; groups -= 4, from += 16, to += 32) {
    prefetch(from, far);
    const __m256i wide = _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i both = _mm256_or_si256(wide, _mm256_and_si256(_mm256_slli_epi64(wide, 30), second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_and_si256(both, used));
  }
#endif
  unpack_all<unpack_two>(from, groups, bytes, run, far, to);
}

// Groups of 16 codes of 3 bits, as in Q3_K of GGUF, four at a time.
void unpack_three_16(const uint8_t* from, int64_t, uint8_t* to) { unpack_three<uint16_t>(from, 8, to); }
void unpack_threes_16(const uint8_t* from, int64_t groups, int64_t bytes, int64_t run, int64_t far, uint8_t* to) {
#if defined(__x86_64__)
  const __m256i bytes_of_lows = _mm256_setr_epi8(0, 1, 2, 3, 0, 1, 2, 3, 6, 7, 8, 9, 6, 7, 8, 9,  //
                                                 4, 5, 6, 7, 4, 5, 6, 7, 10, 11, 12, 13, 10, 11, 12, 13);
  const __m256i bytes_of_highs = _mm256_setr_epi8(4, 5, 4, 5, 4, 5, 4, 5, 10, 11, 10, 11, 10, 11, 10, 11,  //
                                                  8, 9, 8, 9, 8, 9, 8, 9, 14, 15, 14, 15, 14, 15, 14, 15);
  const __m256i factors = _mm256_set1_epi64x(0x0001000200040008), shifts = _mm256_set1_epi64x(int64_t{2} << 32);
  for (; groups >= 4; groups -= 4, from += 24, to += 32) {
    prefetch(from, far);
    const __m256i all = read_24(from);
    const __m256i lows = _mm256_srlv_epi32(_mm256_shuffle_epi8(all, bytes_of_lows), shifts);
    const __m256i highs = _mm256_srli_epi16(_mm256_mullo_epi16(_mm256_shuffle_epi8(all, bytes_of_highs), factors), 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_or_si256(_mm256_and_si256(lows, _mm256_set1_epi8(low)),
                                        _mm256_and_si256(highs, _mm256_set1_epi8(high))));
  }
#endif
  unpack_all<unpack_three_16>(from, groups, bytes, run, far, to);
}

// Two groups of 16 codes of 6 bits at a time.
void unpack_sixes_16(const uint8_t* from, int64_t groups, int64_t bytes, int64_t run, int64_t far, uint8_t* to) {
#if defined(__x86_64__)
  const __m256i bytes_of_lows = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7,  //
                                                 4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9, 10, 11);
  const __m256i bytes_of_highs = _mm256_setr_epi8(8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11,  //
                                                  12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15, 12, 13, 14, 15);
  for (; groups >= 2; groups -= 2, from += 24, to += 32) {
    prefetch(from, far);
    const __m256i both = read_24(from);
    const __m256i low = _mm256_and_si256(
        _mm256_srlv_epi64(_mm256_shuffle_epi8(both, bytes_of_lows), _mm256_setr_epi64x(0, 4, 0, 4)),
        _mm256_set1_epi8(15));
    const __m256i high = _mm256_and_si256(
        _mm256_srlv_epi32(_mm256_shuffle_epi8(both, bytes_of_highs), _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6)),
        _mm256_set1_epi8(3));
    const __m256i code = _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_sub_epi8(code, _mm256_set1_epi8(32)));
  }
#endif
  unpack_all<unpack_six_16>(from, groups, bytes, run, far, to);
}

template <int bits>
Unpacker* unpacker_to_int8(int64_t run) {
#if defined(__x86_64__)
  if (run == 32) return unpack_all<unpack_32<bits, 32>>;
  if (run == 64) return unpack_all<unpack_32<bits, 64>>;
  if (run == 128) return unpack_all<unpack_32<bits, 128>>;
#endif
  if (bits == 6 && run == 16) return unpack_sixes_16;
  const int64_t part = run * (bits - 4) / 8;
  if (part % 8 == 0) return unpack_all<unpack_to_int8<bits, uint64_t>>;
  return part % 4 == 0 ? unpack_all<unpack_to_int8<bits, uint32_t>> : unpack_all<unpack_to_int8<bits, uint8_t>>;
}

Unpacker* unpacker(const Product& p) {
  if (p.stored_bits == 2) return unpack_twos_16;
  if (p.stored_bits == 5) return unpacker_to_int8<5>(p.run);
  if (p.stored_bits == 6) return unpacker_to_int8<6>(p.run);
  const int64_t part = p.run / 4;
  if (part == 2) return unpack_threes_16;
  if (part == 8) return unpack_all<unpack_three_64>;
  if (part % 8 == 0) return unpack_all<unpack_three<uint64_t>>;
  return part % 4 == 0 ? unpack_all<unpack_three<uint32_t>> : unpack_all<unpack_three<uint8_t>>;
}

}  // namespace

void unpack(const Product& p, const uint8_t* from, int64_t groups, uint8_t* to) {
  if (p.has_history) return p.unpack_states(p, from, groups, to);
  unpacker(p)(from, groups, p.run * p.stored_bits / p.bits, p.run, p.far_from(from), to);
}

void run_units(const Routine& routine, const Product& p, const char* scratch, int64_t begin,
               int64_t end) {
  // In x @ w a routine processes parts of all rows: unpack these parts.
  const bool reads_stored = p.contract_rows || (routine.reads_stored && routine.reads_stored(p));
  if (!p.is_unpacked() || reads_stored) return routine.run(p, scratch, begin, end);
  const int64_t bytes = p.m < few ? few_bytes : many_bytes, grain = routine.grain(p);
  const int64_t at_once =
      std::min(end - begin, std::max<int64_t>(1, bytes / p.packed / grain) * grain);
  // The last piece has at least `grain` rows, because tiles need some.
  const std::unique_ptr<uint8_t[]> unpacked(new uint8_t[std::min(at_once + grain, end - begin) * p.packed]);
  Product some = p;
  some.codes = unpacked.get();
  some.own_end = nullptr, some.to_next = -far_ahead;  // These codes are in a cache.
  for (int64_t row = begin, rows; row < end; row += rows) {
    rows = end - row < at_once + grain ? end - row : at_once;
    unpack(p, p.stored(row), rows * (p.packed / p.run), unpacked.get());
    some.scales = p.scales.from(row, p.blocks);
    if (p.block_sums) some.offsets = p.offsets.from(row, p.blocks);
    some.y = p.y + row;
    routine.run(some, scratch, 0, rows);
  }
}

}  // namespace eqquant
EQQUANT_TARGET_END
