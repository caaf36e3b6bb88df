// 2 MB pages for large results and scratch buffers.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace eqquant {

// glibc maps large allocations anew each time, and unmaps them when they are freed. The system clears
// each page on first write. With 4 KB pages, this can take as long as the product.
constexpr int64_t always_fresh = 32 << 20, huge_page = 2 << 20;

inline void ask_for_huge_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  if (bytes < always_fresh) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  // Whole pages only: the first and the last page may contain other data.
  const uintptr_t first = (begin + huge_page - 1) / huge_page * huge_page;
  const uintptr_t last = (begin + bytes) / huge_page * huge_page;
  // Ignore errors: Linux may be built or configured without huge pages.
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace eqquant
