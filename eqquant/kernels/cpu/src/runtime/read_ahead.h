// What a program will read next, so that waiting threads can read it into their caches.
//
// A program multiplies by the same weights in the same order each time. Between two products, XLA computes for some
// microseconds on one thread, and the memory would be idle.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace eqquant {

struct Bytes {
  const uint8_t* begin = nullptr;
  int64_t count = 0;
};

// The order in which products read their codes.
class Order {
 public:
  // Notes that a product reads codes. Returns what the next product probably reads: what followed these codes the last
  // two times. Otherwise returns nothing.
  Bytes after(Bytes codes);

 private:
  static constexpr int hash_bits = 12;
  struct Entry {
    const uint8_t* codes = nullptr;
    Bytes next;
    bool repeats = false;  // True if `next` followed twice.
  };
  std::mutex mutex_;
  // Entries with the same hash replace each other.
  std::vector<Entry> entries_ = std::vector<Entry>(1 << hash_bits);
  Entry* last_ = nullptr;
};

// The order of all products of this process.
Order& order();

// Reads some bytes into the second-level cache, and returns the rest.
inline Bytes read_ahead(Bytes bytes) {
  constexpr int64_t at_once = 512;
  for (int64_t i = 0; i < at_once; i += 64) __builtin_prefetch(bytes.begin + i, 0, 2);
  return {bytes.begin + at_once, bytes.count - at_once};
}

}  // namespace eqquant
