#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace santa::cpu {

// Keeps subnormal numbers as they are within a scope. torch.set_flush_denormal(True) makes the calling thread, and
// no other, flush them: results would depend on which thread computed what, and subnormal float16 inputs vanish.
class KeepDenormals {
 public:
#if defined(__SSE2__)
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlush); }
  ~KeepDenormals() { _mm_setcsr(saved_); }
#else
  KeepDenormals() {}
  ~KeepDenormals() {}
#endif
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;

#if defined(__SSE2__)
 private:
  static constexpr unsigned kFlush = 0x8040;  // flush results to zero, take subnormal inputs for zero
  const unsigned saved_;
#endif
};

}  // namespace santa::cpu
