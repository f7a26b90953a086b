#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>

namespace santa {

// Hands out consecutive pieces of a buffer, each aligned. Throws std::invalid_argument past 62 bits: shapes with
// broadcast (stride 0) dimensions can ask for that without holding any memory.
class Carver {
 public:
  explicit Carver(int64_t alignment) : alignment_(alignment) {}

  // A piece of as many bytes as the product of the factors.
  int64_t take(std::initializer_list<int64_t> factors) {
    int64_t bytes = 1;
    bool overflow = false;
    for (const int64_t factor : factors) overflow |= __builtin_mul_overflow(bytes, factor, &bytes);
    const int64_t at = end_;
    overflow |= __builtin_add_overflow(bytes, alignment_ - 1, &bytes);
    overflow |= __builtin_add_overflow(end_, bytes / alignment_ * alignment_, &end_);
    if (overflow || end_ > kMaxBytes) {
      throw std::invalid_argument("santa: q and k are too large together: scratch memory would pass 2^62 bytes");
    }
    return at;
  }
  int64_t end() const { return end_; }

 private:
  static constexpr int64_t kMaxBytes = int64_t{1} << 62;  // whoever allocates may round up
  int64_t alignment_;
  int64_t end_ = 0;
};

}  // namespace santa
