#include "runtime/loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "runtime/limits.h"
#include "runtime/machine.h"

namespace eqquant {
namespace {

using Clock = std::chrono::steady_clock;

// The time for which a thread waits for the next loop. Between two products of a layer, XLA's operations take less.
// A token of a small language model (SmolLM2, two cores) takes 10% less time than without waiting.
constexpr auto patience = std::chrono::microseconds(50);

// What the thread of a lane reads ahead: the beginning of its part.
Bytes part(Bytes all, int64_t lane, int64_t lanes) {
  return {all.begin + all.count * lane / lanes, std::min(all.count / lanes, limits::read_ahead)};
}

// The newest loop, and the number of threads that wait for the next one.
class Board {
  std::mutex mutex;
  std::shared_ptr<Loop> newest;
  std::atomic<int64_t> number{0};  // Of loops so far.
  int64_t waiting = 0;

 public:
  // Replaces the loop. Returns the number of threads that will work on it.
  int64_t put(std::shared_ptr<Loop> loop) {
    std::lock_guard<std::mutex> lock(mutex);
    newest.swap(loop);
    number.fetch_add(1, std::memory_order_release);
    return std::exchange(waiting, 0);
  }
  // Returns the next loop, or null if `most` threads wait already, or if there is no loop for a while.
  std::shared_ptr<Loop> next(int64_t most, Bytes all_ahead) {
    std::unique_lock<std::mutex> lock(mutex);
    if (waiting >= most) return nullptr;
    const int64_t seen = number.load(std::memory_order_relaxed);
    const auto is_new = [&] { return number.load(std::memory_order_acquire) != seen; };
    // The calling thread will process the first lane, and this thread the next one.
    Bytes ahead = part(all_ahead, ++waiting, most + 1);
    lock.unlock();
    for (const auto until = Clock::now() + patience; !is_new() && Clock::now() < until;)
      for (int i = 0; i < 8 && !is_new(); i++) ahead.count > 0 ? void(ahead = read_ahead(ahead)) : pause();
    lock.lock();
    if (is_new()) return newest;
    waiting--;
    return nullptr;
  }
};

Board& board() {
  static Board& only = *new Board;  // Never destroyed: threads may use it while the process exits.
  return only;
}

}  // namespace

void Loop::work() {
  const int64_t lanes = next.size(), own = threads.fetch_add(1);
  for (int64_t i = 0; i < lanes; i++) work_on((own + i) % lanes);
}

void Loop::work_on(int64_t lane) {
  const int64_t lanes = next.size(), begin = pieces * lane / lanes, end = pieces * (lane + 1) / lanes;
  for (int64_t i; (i = begin + next[lane].fetch_add(1)) < end;) {
    call(use, i * piece, i + 1 == pieces ? count : (i + 1) * piece, i + 1 == end ? part(ahead, lane, lanes) : Bytes{});
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < pieces) continue;
    // Lock between the two, so that the waiting thread has seen the change or is waiting.
    { std::lock_guard<std::mutex> lock(mutex); }
    all_done.notify_one();
  }
}

void Loop::wait() {
  for (int i = 0; i < 1000 && !is_done(); i++) pause();
  if (is_done()) return;
  // Rarely reached. The awaited thread may need this core, and yielding in a loop would not free it for long.
  std::unique_lock<std::mutex> lock(mutex);
  all_done.wait(lock, [this] { return is_done(); });
}

int64_t announce(const std::shared_ptr<Loop>& loop) { return board().put(loop); }

void help(std::shared_ptr<Loop> loop, int64_t most) {
  for (Bytes ahead; loop; loop = board().next(most, ahead)) {
    loop->work();
    ahead = loop->ahead;
  }
}

}  // namespace eqquant
