// Loops on XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/machine.h"
#include "xla/ffi/api/ffi.h"

namespace eqquant {

// Calls `use(begin, end)` for pieces of [0, count). Each piece except the last is a multiple of `grain`.
//
// The calling thread also works, and waits only for pieces that a thread has started. So it finishes even if
// all other threads are busy. A late task finds no piece, and touches nothing except the counters.
template <class Use>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, int64_t grain, const Use& use) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  // Several pieces per thread, because some threads have other work.
  const int64_t wanted = (count + 4 * threads - 1) / (4 * threads);
  const int64_t piece = (wanted + grain - 1) / grain * grain;
  const int64_t pieces = (count + piece - 1) / piece;
  if (threads == 1 || pieces <= 1) return use(0, count);

  struct Counters {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto counters = std::make_shared<Counters>();
  const auto work = [counters, pieces, piece, count, &use] {
    for (int64_t i; (i = counters->next.fetch_add(1)) < pieces;) {
      use(i * piece, std::min(count, (i + 1) * piece));
      if (counters->done.fetch_add(1, std::memory_order_acq_rel) + 1 < pieces) continue;
      // Lock between the two, so that the waiting thread has seen the change or is waiting.
      { std::lock_guard<std::mutex> lock(counters->mutex); }
      counters->all_done.notify_one();
    }
  };
  for (int64_t i = 1; i < std::min(threads, pieces); i++) {
    auto task = work;
    pool.Schedule(std::move(task));
  }
  work();
  const auto is_done = [&] { return counters->done.load(std::memory_order_acquire) == pieces; };
  for (int i = 0; i < 1000 && !is_done(); i++) pause();
  if (is_done()) return;
  // Rarely reached. The awaited thread may need this core, and yielding in a loop would not free it for long.
  std::unique_lock<std::mutex> lock(counters->mutex);
  counters->all_done.wait(lock, is_done);
}

}  // namespace eqquant
