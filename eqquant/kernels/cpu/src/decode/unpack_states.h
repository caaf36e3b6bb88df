// Decodes codes with a history, for any `ByteVector`.
//
// The index of a level is linear in the bits of a window of the stream, so it is the sum (XOR) of an index for each
// byte of the window. A vector has a byte for each column: the codes that share a byte.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "decode/byte_vector.h"
#include "decode/states.h"
#include "products/unrolled.h"
#include "runtime/product.h"
#include "runtime/target.h"

EQQUANT_BEGIN

template <int bits>
class States {
 public:
  static constexpr int planes = bits == 4 ? 2 : 4;
  // The bytes of a window: a column and the columns before it. For 3 bits, also the high bits of two columns.
  static constexpr int columns_of_window = bits == 2 ? 3 : 2, bytes_of_window = bits == 3 ? 4 : columns_of_window;
  using Bytes = ByteVector::Bytes;
  using Window = ByteVector::Input[bytes_of_window];

 private:
  static constexpr int64_t size = ByteVector::size;
  using Map = ByteVector::Map;

  LinearTable table;
  Map maps[planes][bytes_of_window];
  static constexpr int index_bits = 3 + bits;
  ByteVector::Table<1 << index_bits> levels;
  ByteVector::Order<planes> order;
  // For 3 bits and some blocks: zero, and the high bits of each column, in even bits.
  std::vector<uint8_t> high_bits;

  // The byte of a window that has bit `bit` of a state, and the place of the bit in it. States end in a plane.
  struct Place {
    int byte, bit;
  };
  static constexpr Place place_of(int plane, int bit) {
    constexpr int of_codes = state_bits / bits;
    const int code = plane + 1 - of_codes + bit / bits, back = code < 0 ? (-code + planes - 1) / planes : 0;
    const int in_column = code + back * planes;
    if (bits != 3) return {back, in_column * bits + bit % bits};
    return bit % 3 == 2 ? Place{columns_of_window + back, 2 * in_column} : Place{back, 2 * in_column + bit % 3};
  }
  // The bits of a byte of a window that select the level of a plane.
  static constexpr int used(int plane, int byte) {
    int of_byte = 0;
    for (int bit = 0; bit < state_bits; bit++) {
      const Place at = place_of(plane, bit);
      if (at.byte == byte) of_byte |= 1 << at.bit;
    }
    return of_byte;
  }

 public:
  explicit States(const LinearTable& table) : table(table), levels(table.levels) {
    // The level of an index is the negative of the level of the index with opposite bits.
    uint32_t masks_of_index[LinearTable::most_masks];
    for (int i = 0; i < LinearTable::most_masks; i++) {
      const bool is_below_sign = ByteVector::indices_have_signs && i < index_bits - 1;
      masks_of_index[i] = table.masks[i] ^ (is_below_sign ? table.masks[index_bits - 1] : 0);
    }
    for (int plane = 0; plane < planes; plane++) {
      uint8_t masks[bytes_of_window][8] = {};
      for (int i = 0; i < LinearTable::most_masks; i++)
        for (int bit = 0; bit < state_bits; bit++) {
          const Place at = place_of(plane, bit);
          masks[at.byte][i] = static_cast<uint8_t>(masks[at.byte][i] | (masks_of_index[i] >> bit & 1) << at.bit);
        }
      for (int byte = 0; byte < bytes_of_window; byte++) maps[plane][byte] = Map(masks[byte]);
    }
  }
  // The states of a table. They are kept, because preparing them takes as long as decoding some thousand codes.
  static States& of(const LinearTable& table) {
    thread_local std::unique_ptr<States> last;
    if (!last || std::memcmp(&last->table, &table, sizeof table)) last = std::make_unique<States>(table);
    return *last;
  }

  // The level of the code of a plane in each column.
  template <int plane>
  EQQUANT_INLINE Bytes level(const Window& window) const {
    Bytes index = maps[plane][0].template of<used(plane, 0)>(window[0]);
    unrolled<bytes_of_window - 1>([&](auto before) {
      constexpr int byte = before + 1, bits_of_byte = used(plane, byte);
      if constexpr (bits_of_byte != 0)
        index = ByteVector::add(index, maps[plane][byte].template of<bits_of_byte>(window[byte]));
    });
    return levels.look_up(index);
  }

  // Unpacks `groups` blocks of `run` codes.
  void unpack(const uint8_t* from, int64_t groups, int64_t run, int64_t far, uint8_t* to) {
    // Long before they are read: loads of bytes that were just stored by several instructions are slow.
    constexpr int64_t at_once = bits == 3 ? 16 : 1;
    const int64_t columns = run / planes, bytes = run * bits / 8;
    high_bits.resize(bits == 3 ? at_once * space(columns) : 0);
    for (int64_t first = 0; first < groups; first += at_once) {
      const int64_t some = std::min(at_once, groups - first);
      for (int64_t i = 0; bits == 3 && i < some; i++)
        spread_high_bits(from + i * bytes + columns, columns / 2, &high_bits[i * space(columns)]);
      for (int64_t i = 0; i < some; i++, from += bytes, to += run) {
        for (int64_t line = 0; line < bytes; line += 64) prefetch(from + line, far);
        const uint8_t* const high = high_bits.data() + i * space(columns);
        for (int64_t j = 0; j < columns; j += size)
          unpack(from, high, j, std::min(size, columns - j), to + j * planes);
      }
    }
  }

 private:
  static int64_t space(int64_t columns) { return 1 + columns + size; }

  // Writes zero, and the high bits of both halves of the columns of a block.
  static EQQUANT_INLINE void spread_high_bits(const uint8_t* high, int64_t half, uint8_t* to) {
    *to++ = 0;
    for (int part = 0; part < 2; part++, to += half)
      for (int64_t j = 0; j < half; j += size) {
        const Bytes some = ByteVector::load(high + j, std::min(size, half - j));
        ByteVector::store(to + j, part ? ByteVector::halve(some) : some);
      }
  }
  // Unpacks `count` columns from column `i` of a block on, with the columns before.
  EQQUANT_INLINE void unpack(const uint8_t* from, const uint8_t* high, int64_t i, int64_t count, uint8_t* to) const {
    Window window;
    unrolled<columns_of_window>([&](auto back) {
      const Bytes some = back == 0 ? ByteVector::load(from + i, count)
                         : i > 0   ? ByteVector::load(from + i - back, count)
                                   : ByteVector::template load_after_zeros<back>(from, count);
      window[back] = ByteVector::input(order.place(some));
    });
    if constexpr (bits == 3)
      unrolled<2>([&](auto back) {
        const Bytes some = ByteVector::load(high + 1 + i - back, count);
        window[columns_of_window + back] = ByteVector::input(order.place(some));
      });
    Bytes of[planes];
    unrolled<planes>([&](auto plane) { of[plane] = level<plane>(window); });
    if constexpr (planes == 4) {
      const Bytes low = ByteVector::interleave<1, false>(of[0], of[1]);
      const Bytes high = ByteVector::interleave<1, true>(of[0], of[1]);
      const Bytes low_of = ByteVector::interleave<1, false>(of[2], of[3]);
      const Bytes high_of = ByteVector::interleave<1, true>(of[2], of[3]);
      of[0] = ByteVector::interleave<2, false>(low, low_of), of[1] = ByteVector::interleave<2, true>(low, low_of);
      of[2] = ByteVector::interleave<2, false>(high, high_of), of[3] = ByteVector::interleave<2, true>(high, high_of);
    } else {
      const Bytes low = ByteVector::interleave<1, false>(of[0], of[1]);
      of[1] = ByteVector::interleave<1, true>(of[0], of[1]), of[0] = low;
    }
    unrolled<planes>([&](auto part) {
      const int64_t left = count * planes - part * size;
      if (left >= size) ByteVector::store(to + part * size, of[part]);
      else if (left > 0) ByteVector::store(to + part * size, of[part], left);
    });
  }
};

inline void unpack_states(const Product& p, const uint8_t* from, int64_t groups, uint8_t* to) {
  const auto unpack = [&](auto& states) { states.unpack(from, groups, p.run, p.far_from(from), to); };
  if (p.stored_bits == 2) return unpack(States<2>::of(*p.linear_table));
  if (p.stored_bits == 3) return unpack(States<3>::of(*p.linear_table));
  unpack(States<4>::of(*p.linear_table));
}

EQQUANT_END
