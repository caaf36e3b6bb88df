// Transposition of matrices of bytes, independent of XLA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace eqquant {

constexpr int64_t transpose_tile = 64;  // A cache line of the result.

// Transposes a block of 8 by 8 bytes, in three steps that swap blocks of 4, 2 and 1 (Hacker's Delight, 7-3).
inline void transpose_block(const uint8_t* from, int64_t stride, uint8_t* to, int64_t to_stride) {
  uint64_t r[8];
  for (int i = 0; i < 8; i++) std::memcpy(&r[i], from + i * stride, 8);
  const auto swap = [&](int i, int j, int bits, uint64_t mask) {
    const uint64_t t = ((r[i] >> bits) ^ r[j]) & mask;
    r[j] ^= t;
    r[i] ^= t << bits;
  };
  for (int i = 0; i < 4; i++) swap(i, i + 4, 32, 0x00000000ffffffffull);
  for (int i : {0, 1, 4, 5}) swap(i, i + 2, 16, 0x0000ffff0000ffffull);
  for (int i : {0, 2, 4, 6}) swap(i, i + 1, 8, 0x00ff00ff00ff00ffull);
  for (int i = 0; i < 8; i++) std::memcpy(to + i * to_stride, &r[i], 8);
}

// Writes rows `begin` to `end` of the result, which has a row for each column of `x`, (rows, columns).
inline void transpose_bytes(const uint8_t* x, uint8_t* y, int64_t rows, int64_t columns, int64_t begin,
                            int64_t end) {
  for (int64_t row = 0; row < rows; row += transpose_tile) {
    const int64_t last = std::min(rows, row + transpose_tile);
    for (int64_t c = begin; c < end; c += 8) {
      for (int64_t i = row; i < last; i += 8) {
        if (c + 8 <= end && i + 8 <= last) {
          transpose_block(x + i * columns + c, columns, y + c * rows + i, rows);
          continue;
        }
        for (int64_t k = i; k < std::min(last, i + 8); k++)
          for (int64_t j = c; j < std::min(end, c + 8); j++) y[j * rows + k] = x[k * columns + j];
      }
    }
  }
}

}  // namespace eqquant
