// Large results, and scratch space, in pages of 2 MB.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace eqquant {

// glibc asks the operating system for so much memory each time, and gives it back when it is
// freed. The system fills each page with zeros when it is first written to, and with pages of 4 KB
// that may take as long as the product.
constexpr int64_t always_fresh = 32 << 20, huge_page = 2 << 20;

inline void ask_for_huge_pages(void* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  if (bytes < always_fresh) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  // Only whole ones: the first and the last may hold what belongs to others.
  const uintptr_t first = (begin + huge_page - 1) / huge_page * huge_page;
  const uintptr_t last = (begin + bytes) / huge_page * huge_page;
  // Linux may have been built without them, or told not to.
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace eqquant
