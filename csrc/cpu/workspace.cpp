#include "workspace.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace santa::cpu {
namespace {

constexpr int64_t kHugePage = int64_t{1} << 21;
constexpr int64_t kPage = 4096;

}  // namespace

Workspace& Workspace::of_this_thread() {
  static thread_local Workspace workspace;
  return workspace;
}

std::byte* Workspace::reserve(int64_t bytes) {
  if (bytes <= size_) return data_;
  const int64_t alignment = bytes >= kHugePage ? kHugePage : kPage;
  const int64_t size = (bytes + alignment - 1) / alignment * alignment;
  std::free(data_);
  size_ = 0;
  data_ = static_cast<std::byte*>(std::aligned_alloc(alignment, size));
  if (data_ == nullptr) {
    throw std::runtime_error("santa: cannot allocate " + std::to_string(size) + " bytes of scratch memory");
  }
  size_ = size;
#if defined(__linux__)
  if (alignment == kHugePage) madvise(data_, size, MADV_HUGEPAGE);  // a hint: refusal costs time, not results
#endif
  return data_;
}

Workspace::~Workspace() { std::free(data_); }

}  // namespace santa::cpu
