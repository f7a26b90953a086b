#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace santa::cpu {

constexpr int64_t kHugePage = int64_t{1} << 21;

// Asks for huge pages under the whole ones of [data, data + bytes): rows drawn all over a cache then miss the
// translation buffers less. A hint: refusal costs time, not results. To be given before the memory is first
// written.
inline void prefer_huge_pages(const void* data, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = kHugePage;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

}  // namespace santa::cpu
