#include <algorithm>
#include <cstring>

#include "grid.h"

#if SANTA_SIMT_RACES

// The calls that -fsanitize=thread puts before each access, by the names that GCC and LLVM give them. Those
// without "unaligned" come from accesses whose type promises alignment, of 8 bytes at most.
namespace santa::simt {
namespace {

using races::Access;

void announce(const void* p, int64_t bytes, Access access, bool aligned, const void* pc) {
  // The host's code beside the kernels announces its accesses too, on this thread and on others.
  if (!launching || running.in_engine) return;
  const InEngine inside;
  if (aligned && reinterpret_cast<uintptr_t>(p) % std::min<int64_t>(bytes, 8) != 0) {
    fail(text("access to ", bytes, " bytes at address ", p, ", which is not a multiple of them, at ",
              Site{{}, pc}));
  }
  races::note(p, bytes, access, pc);
}

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {
#define SANTA_HOOK(name, bytes, access, aligned) \
  void name(const void* p) { announce(p, bytes, Access::access, aligned, __builtin_return_address(0)); }
#define SANTA_HOOKS(bytes)                                        \
  SANTA_HOOK(__tsan_read##bytes, bytes, kRead, true)              \
  SANTA_HOOK(__tsan_write##bytes, bytes, kWrite, true)            \
  SANTA_HOOK(__tsan_unaligned_read##bytes, bytes, kRead, false)   \
  SANTA_HOOK(__tsan_unaligned_write##bytes, bytes, kWrite, false) \
  SANTA_HOOK(__tsan_volatile_read##bytes, bytes, kRead, true)     \
  SANTA_HOOK(__tsan_volatile_write##bytes, bytes, kWrite, true)
SANTA_HOOKS(1)
SANTA_HOOKS(2)
SANTA_HOOKS(4)
SANTA_HOOKS(8)
SANTA_HOOKS(16)
void __tsan_read_range(const void* p, size_t bytes) {
  announce(p, static_cast<int64_t>(bytes), Access::kRead, false, __builtin_return_address(0));
}
void __tsan_write_range(const void* p, size_t bytes) {
  announce(p, static_cast<int64_t>(bytes), Access::kWrite, false, __builtin_return_address(0));
}
// Only LLVM names these: GCC leaves calls of memcpy as they are, and those are not seen.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  announce(from, static_cast<int64_t>(bytes), Access::kRead, false, __builtin_return_address(0));
  announce(to, static_cast<int64_t>(bytes), Access::kWrite, false, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  announce(from, static_cast<int64_t>(bytes), Access::kRead, false, __builtin_return_address(0));
  announce(to, static_cast<int64_t>(bytes), Access::kWrite, false, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  announce(to, static_cast<int64_t>(bytes), Access::kWrite, false, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}
// Of the guards of static variables. No others: std::atomic is not CUDA's.
uint8_t __tsan_atomic8_load(const volatile uint8_t* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
void __tsan_init() {}
void __tsan_func_entry(const void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(const void*) {}
void __tsan_vptr_update(const void*, const void*) {}
}
// NOLINTEND(bugprone-reserved-identifier)

}  // namespace santa::simt

#endif
