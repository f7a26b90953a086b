#pragma once

#include <array>
#include <csetjmp>
#include <csignal>
#include <memory>
#include <string>

namespace santa::simt {

// Where a fault of the processor within a kernel leads while there is a FaultHandler.
extern sigjmp_buf fault_exit;

// What the last one was.
std::string describe_fault();

// Turns faults of kernels into a return to sigsetjmp(fault_exit); faults of anything else take their course.
class FaultHandler {
 public:
  FaultHandler();
  ~FaultHandler();
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;

 private:
  static constexpr size_t kStackBytes = 64 << 10;
  static constexpr std::array<int, 3> kSignals = {SIGSEGV, SIGBUS, SIGFPE};

  // The kernel's own stack may be what overflowed.
  std::unique_ptr<char[]> stack_{new char[kStackBytes]};
  stack_t old_stack_{};
  std::array<struct sigaction, kSignals.size()> old_{};
};

}  // namespace santa::simt
