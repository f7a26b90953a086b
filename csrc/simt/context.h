#pragma once

#include <cstddef>

// The switch is written for x86-64, where it costs some nanoseconds; elsewhere the C library's is taken, which
// asks the kernel for the signal mask and costs a hundred times that. -DSANTA_SIMT_UCONTEXT forces the latter.
#if defined(__linux__) && defined(__x86_64__) && !defined(SANTA_SIMT_UCONTEXT)
#define SANTA_SIMT_ASSEMBLY 1
#elif defined(__unix__) || defined(__APPLE__)
#define SANTA_SIMT_ASSEMBLY 0
#include <ucontext.h>
#else
#error "csrc/simt needs x86-64 Linux or a system with ucontext.h"
#endif

namespace santa::simt {

// A point of execution with a stack of its own. Nothing below knows of operating-system threads: contexts run
// one at a time, and only until they switch to another.
struct Context {
#if SANTA_SIMT_ASSEMBLY
  void* stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
};

// Prepares a context that runs entry() at the next switch to it. entry() must not return.
void make_context(Context* context, char* stack, size_t bytes, void (*entry)());

// Leaves the running context in *from and goes on in *to.
void switch_context(Context* from, Context* to);

// Stacks of equal size in one mapping, each below it closed by a guard: overflow is a fault, not the
// corruption of a neighbour. Memory that is never touched costs nothing.
class Stacks {
 public:
  Stacks(size_t count, size_t bytes);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  char* operator[](size_t index) const { return base_ + index * bytes_; }
  size_t bytes() const { return bytes_; }
  bool contains(const void* p) const { return p >= base_ && p < base_ + count_ * bytes_; }
  size_t owner(const void* p) const { return static_cast<size_t>(static_cast<const char*>(p) - base_) / bytes_; }

 private:
  char* base_;
  size_t count_, bytes_;
};

// Memory that reads as zero, and a stretch of it that nobody may touch, whole pages whatever their size here.
constexpr size_t kGuardBytes = 64 << 10;
char* map_memory(size_t bytes);
void unmap_memory(char* begin, size_t bytes);
void guard(char* begin);

}  // namespace santa::simt
