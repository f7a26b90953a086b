#include "faults.h"

#include "grid.h"

namespace santa::simt {

sigjmp_buf fault_exit;

namespace {

siginfo_t fault;

void on_fault(int signal, siginfo_t* info, void*) {
  if (!launching || running.thread == nullptr) {
    std::signal(signal, SIG_DFL);  // happens again, and is fatal
    return;
  }
  fault = *info;
  siglongjmp(fault_exit, 1);
}

}  // namespace

std::string describe_fault() {
  if (fault.si_signo == SIGFPE) return "division of an integer by zero";
  const Block& block = *running.block;
  if (block.stacks.contains(fault.si_addr)) return "stack overflow";
  if (block.shared.contains(fault.si_addr)) return "access outside of shared memory";
  if (fault.si_addr == nullptr) return "access to a null pointer, to a wild one, or a misaligned vector";
  return text("access to address ", fault.si_addr, ", where there is no memory");
}

FaultHandler::FaultHandler() {
  stack_t stack{};
  stack.ss_sp = stack_.get();
  stack.ss_size = kStackBytes;
  sigaltstack(&stack, &old_stack_);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &old_[i]);
}

FaultHandler::~FaultHandler() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &old_[i], nullptr);
  sigaltstack(&old_stack_, nullptr);
}

}  // namespace santa::simt
