#include "decode/states.h"

#include <array>

namespace eqquant {
namespace {

// Moves the codes of 2 bits in a byte, and their high bits in the even bits of a byte, to codes of 3 bits.
struct Spread {
  std::array<uint16_t, 256> low{}, high{};
  Spread() {
    for (int byte = 0; byte < 256; byte++)
      for (int code = 0; code < 4; code++) {
        low[byte] = static_cast<uint16_t>(low[byte] | (byte >> 2 * code & 3) << 3 * code);
        high[byte] = static_cast<uint16_t>(high[byte] | (byte >> 2 * code & 1) << (3 * code + 2));
      }
  }
};

// Decodes a block. `column(i)` is the codes that share byte i. A window of the stream of bits has the codes of a
// column at its top.
template <int bits, class Column>
inline void decode(const uint8_t* levels, int64_t columns, uint8_t* to, const Column& column) {
  constexpr int planes = bits == 4 ? 2 : 4, width = planes * bits, before = 24 - width;
  uint32_t window = 0;
  for (int64_t i = 0; i < columns; i++, to += planes) {
    window = window >> width | column(i) << before;
    for (int plane = 0; plane < planes; plane++)
      to[plane] = levels[window >> (before + (plane + 1) * bits - state_bits) & (num_states - 1)];
  }
}

void unpack_block(int bits, const uint8_t* levels, const uint8_t* from, int64_t run, uint8_t* to) {
  const auto bytes = [&](int64_t i) { return uint32_t{from[i]}; };
  if (bits == 2) return decode<2>(levels, run / 4, to, bytes);
  if (bits == 4) return decode<4>(levels, run / 2, to, bytes);
  static const Spread spread;
  const uint8_t* const high = from + run / 4;
  const int64_t half = run / 8;
  const auto both = [&](int64_t i) {
    const int of_high = i < half ? high[i] : high[i - half] >> 1;
    return uint32_t{spread.low[from[i]]} | spread.high[of_high & 0x55];
  };
  decode<3>(levels, run / 4, to, both);
}

}  // namespace

void unpack_states(const Product& p, const uint8_t* from, int64_t groups, uint8_t* to) {
  const int64_t bytes = p.run * p.stored_bits / 8, far = p.far_from(from);
  for (int64_t i = 0; i < groups; i++, from += bytes, to += p.run) {
    prefetch(from, far);
    unpack_block(p.stored_bits, p.level_of_state, from, p.run, to);
  }
}

}  // namespace eqquant
