// Loops on XLA's own threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "runtime/loop.h"
#include "xla/ffi/api/ffi.h"

namespace eqquant {

// Calls `use` with two or three arguments.
template <class Use>
void process(const Use& use, int64_t begin, int64_t end, Bytes after) {
  if constexpr (std::is_invocable_v<const Use&, int64_t, int64_t, Bytes>)
    use(begin, end, after);
  else
    use(begin, end);
}

// Calls `use(begin, end)` for pieces of [0, count). Each piece except the last is a multiple of `grain`, and the last is
// at least `grain` if `count` is. Afterwards, other threads read `ahead` until the next loop. `use` may have a third
// parameter, the `after` of `Loop`.
//
// The calling thread also works, and waits only for pieces that a thread has started. So it finishes even if
// all other threads are busy.
template <class Use>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, int64_t grain, const Use& use, Bytes ahead = {}) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  // Several pieces per thread, because some threads have other work.
  const int64_t wanted = (count + 4 * threads - 1) / (4 * threads);
  const int64_t piece = (wanted + grain - 1) / grain * grain;
  const int64_t pieces = std::max<int64_t>(1, count / piece + (count % piece >= grain));
  if (threads == 1 || pieces <= 1) return process(use, 0, count, ahead);

  auto loop = std::make_shared<Loop>(std::min(threads, pieces));
  loop->call = [](const void* use, int64_t begin, int64_t end, Bytes after) {
    process(*static_cast<const Use*>(use), begin, end, after);
  };
  loop->ahead = ahead;
  loop->use = &use, loop->count = count, loop->piece = piece, loop->pieces = pieces;
  // One thread of the pool remains for XLA's own work.
  for (int64_t i = announce(loop); i < std::min(threads, pieces) - 1; i++)
    pool.Schedule([loop, most = threads - 1] { help(loop, most); });
  loop->work();
  loop->wait();
}

}  // namespace eqquant
