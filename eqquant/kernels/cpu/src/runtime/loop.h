// Loops that several threads share, independent of XLA.
//
// A thread that has finished a loop waits for the next one for a short time without sleeping, because waking a
// thread takes as long as a small product.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/read_ahead.h"

namespace eqquant {

// A loop over `pieces` pieces of [0, count). Each piece except the last has `piece` elements. The last has the rest.
//
// A thread processes the consecutive pieces of its own lane, and then the remaining pieces of other lanes. So a thread
// prefetches the memory that it reads itself. If threads take pieces in turn, a token of SmolLM2 takes a quarter longer
// (Zen 5, two cores).
struct Loop {
  // `after` is what the thread reads after the last piece of its lane, and nothing after other pieces.
  void (*call)(const void* use, int64_t begin, int64_t end, Bytes after);
  const void* use;
  int64_t count, piece, pieces;
  std::vector<std::atomic<int64_t>> next;  // The number of pieces of each lane that a thread has started.
  std::atomic<int64_t> threads{0}, done{0};
  std::mutex mutex;
  std::condition_variable all_done;
  // What the next loop will read, an equal part in each lane. A thread that waits for the next loop reads its part.
  Bytes ahead;

  Loop(int64_t lanes) : next(lanes) {}
  bool is_done() const { return done.load(std::memory_order_acquire) == pieces; }
  // Processes pieces until none is left. A late call finds no piece, and touches nothing except the counters.
  void work();
  void work_on(int64_t lane);
  // Waits for pieces that other threads have started.
  void wait();
};

// Gives a loop to the threads that wait for one, and returns their number.
int64_t announce(const std::shared_ptr<Loop>& loop);
// Processes a loop and the loops that are announced soon after. At most `most` threads wait for a loop, and read ahead.
void help(std::shared_ptr<Loop> loop, int64_t most);

}  // namespace eqquant
