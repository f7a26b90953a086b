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
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kHugePage);
  const int64_t skipped = past == 0 ? 0 : kHugePage - past;
  if (bytes - skipped < kHugePage) return;
  char* first = static_cast<char*>(const_cast<void*>(data)) + skipped;
  madvise(first, (bytes - skipped) / kHugePage * kHugePage, MADV_HUGEPAGE);
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

}  // namespace santa::cpu
