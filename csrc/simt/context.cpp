#include "context.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace santa::simt {

#if SANTA_SIMT_ASSEMBLY

// Saves what a called function must keep. The last step is a jump rather than `ret`: the processor predicts a
// return to the caller of this call, which is never where a switch goes, and pays four times the switch for it.
extern "C" void santa_simt_switch(void** from, void* to);
asm(R"(
.text
.globl santa_simt_switch
.hidden santa_simt_switch
.type santa_simt_switch, @function
santa_simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  pop %rcx
  jmp *%rcx
.size santa_simt_switch, . - santa_simt_switch
)");

void make_context(Context* context, char* stack, size_t bytes, void (*entry)()) {
  constexpr int kSaved = 6;  // registers that the switch restores before it jumps
  auto** top = reinterpret_cast<void**>(stack + bytes);
  *--top = nullptr;  // where a return address would be: entry() starts on a stack aligned as a call leaves it
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSaved; ++i) *--top = nullptr;
  context->stack_pointer = static_cast<void*>(top);
}

void switch_context(Context* from, Context* to) { santa_simt_switch(&from->stack_pointer, to->stack_pointer); }

#else

void make_context(Context* context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context->registers);
  context->registers.uc_stack.ss_sp = stack;
  context->registers.uc_stack.ss_size = bytes;
  context->registers.uc_link = nullptr;
  makecontext(&context->registers, entry, 0);
}

void switch_context(Context* from, Context* to) { swapcontext(&from->registers, &to->registers); }

#endif

char* map_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(memory);
}

void unmap_memory(char* begin, size_t bytes) { munmap(begin, bytes); }

void guard(char* begin) {
  if (mprotect(begin, kGuardBytes, PROT_NONE) != 0) throw std::bad_alloc();
}

Stacks::Stacks(size_t count, size_t bytes) : base_(map_memory(count * bytes)), count_(count), bytes_(bytes) {
  for (size_t i = 0; i < count; ++i) guard(base_ + i * bytes);  // stacks grow downwards
}

Stacks::~Stacks() { unmap_memory(base_, count_ * bytes_); }

}  // namespace santa::simt
