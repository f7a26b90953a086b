#pragma once

#include <cstddef>
#include <cstdint>

namespace santa::cpu {

// Scratch memory of the calling thread, kept between calls: fresh pages would cost a decode step more than its
// arithmetic. Grows to the largest step seen and is freed with the thread.
class Workspace {
 public:
  static Workspace& of_this_thread();

  // At least `bytes` bytes, aligned to a page, contents undefined. Throws std::runtime_error.
  std::byte* reserve(int64_t bytes);

  ~Workspace();

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace santa::cpu
