#include "encode/relayout.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace eqquant {
namespace {

// Blocks that are processed together stay in the first-level cache.
constexpr int64_t at_once = 32, largest = 64;

// `count` is constant, so that the compiler unrolls the loop.
template <int count>
void move_bits(const Layout& layout, const Move& move, const uint8_t* from, uint8_t* to, int64_t blocks) {
  using Short = std::conditional_t<count == 4, uint32_t, std::conditional_t<count == 2, uint16_t, uint8_t>>;
  using Word = std::conditional_t<count % 8 == 0, uint64_t, Short>;
  constexpr int size = sizeof(Word);
  const Word mask = static_cast<Word>(static_cast<uint64_t>(move.mask) * (~0ull / 255));
  const int left = std::max(move.shift, 0), right = std::max(-move.shift, 0);
  from += move.from, to += move.to;
  for (int64_t i = 0; i < blocks; i++, from += layout.from_bytes, to += layout.to_bytes)
    for (int j = 0; j < count; j += size) {
      Word in, out;
      std::memcpy(&in, from + j, size);
      std::memcpy(&out, to + j, size);
      // The mask removes bits that shifts move in from other bytes.
      out = static_cast<Word>(out ^ (static_cast<Word>(in << left >> right) & mask));
      std::memcpy(to + j, &out, size);
    }
}

using Mover = void(const Layout&, const Move&, const uint8_t*, uint8_t*, int64_t);

Mover* mover(int count) {
  switch (count) {
    case 1: return move_bits<1>;
    case 2: return move_bits<2>;
    case 4: return move_bits<4>;
    case 8: return move_bits<8>;
    case 16: return move_bits<16>;
    case 32: return move_bits<32>;
    case largest: return move_bits<largest>;
    default: return nullptr;
  }
}

}  // namespace

bool is_valid(const Layout& layout) {
  return std::all_of(layout.moves, layout.moves + layout.num_moves, [&](const Move& move) {
    if (!mover(move.count) || move.shift < -7 || move.shift > 7) return false;
    const int bits = move.shift > 0 ? 255 << move.shift & 255 : 255 >> -move.shift;
    return move.from >= 0 && move.to >= 0 && move.from + move.count <= layout.from_bytes &&
           move.to + move.count <= layout.to_bytes && (move.mask & ~bits) == 0;
  });
}

void relayout(const Layout& layout, const uint8_t* from, int64_t blocks, uint8_t* to) {
  for (int64_t first = 0; first < blocks; first += at_once) {
    const int64_t count = std::min(at_once, blocks - first);
    const uint8_t* const in = from + first * layout.from_bytes;
    uint8_t* const out = to + first * layout.to_bytes;
    for (int64_t i = 0; i < count; i++) std::memcpy(out + i * layout.to_bytes, layout.start, layout.to_bytes);
    for (int64_t i = 0; i < layout.num_moves; i++)
      mover(layout.moves[i].count)(layout, layout.moves[i], in, out, count);
  }
}

}  // namespace eqquant

// Returns 0 if the layout is not valid. `moves` has five numbers for each move.
extern "C" __attribute__((visibility("default"))) int eqquant_relayout(const uint8_t* from, int64_t from_bytes,
                                                                       int64_t blocks, uint8_t* to,
                                                                       int64_t to_bytes, const uint8_t* start,
                                                                       const int32_t* moves, int64_t num_moves) {
  const eqquant::Layout layout{from_bytes, to_bytes, start, reinterpret_cast<const eqquant::Move*>(moves),
                               num_moves};
  if (!eqquant::is_valid(layout)) return 0;
  eqquant::relayout(layout, from, blocks, to);
  return 1;
}
