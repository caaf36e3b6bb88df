#include "runtime/read_ahead.h"

namespace eqquant {

Bytes Order::after(Bytes codes) {
  constexpr uint64_t spread = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio.
  const std::lock_guard<std::mutex> lock(mutex_);
  if (last_) {
    last_->repeats = last_->next.begin == codes.begin;
    last_->next = codes;
  }
  last_ = &entries_[reinterpret_cast<uintptr_t>(codes.begin) * spread >> (64 - hash_bits)];
  if (last_->codes != codes.begin) *last_ = {codes.begin, {}, false};
  return last_->repeats ? last_->next : Bytes{};
}

Order& order() {
  static Order& only = *new Order;  // Never destroyed: threads may use it while the process exits.
  return only;
}

}  // namespace eqquant
