#include "workspace.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "huge_pages.h"

namespace santa::cpu {
namespace {

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
  prefer_huge_pages(data_, size);
  return data_;
}

Workspace::~Workspace() { std::free(data_); }

}  // namespace santa::cpu
