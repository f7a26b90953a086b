// What concerns the machine rather than attention: its memory and its clock.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "../check.h"
#include "../registration.h"
#include "huge_pages.h"
#include "kernels.h"
#include "stage_timer.h"
#include "torch_side.h"

namespace santa::cpu {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kGrain = 1024;  // lines below which a thread is not worth waking

const void* check_memory(const std::string& op, const Tensor& x) {
  check_given(op, "x", x);
  if (!x.is_cpu() || !x.is_contiguous()) {
    fail(op, "x must be a contiguous tensor on the CPU, got ", dtype_text(x), " ", shape_text(x));
  }
  return x.const_data_ptr();
}

int64_t bytes_of(const Tensor& x) { return x.numel() * static_cast<int64_t>(x.element_size()); }

// The bytes past the last whole word, as a word.
uint64_t read_rest(const char* from, int64_t bytes) {
  uint64_t all = 0;
  for (int64_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, from + at, static_cast<size_t>(std::min<int64_t>(8, bytes - at)));
    all ^= word;
  }
  return all;
}

int64_t read_through_op(const Tensor& x) {
  const std::string op = "santa::read_through";
  const char* data = static_cast<const char*>(check_memory(op, x));
  const int64_t bytes = bytes_of(x);
  const KernelTable& kernels = active_kernels();
  std::atomic<uint64_t> all{read_rest(data + bytes / kLine * kLine, bytes % kLine)};
  torch_parallel_for(bytes / kLine, kGrain, [&](int64_t begin, int64_t end) {
    all ^= kernels.read_through(data + begin * kLine, (end - begin) * kLine);
  });
  return static_cast<int64_t>(all.load());
}

void prefer_huge_pages_op(Tensor x) {
  const std::string op = "santa::prefer_huge_pages";
  prefer_huge_pages(check_memory(op, x), bytes_of(x));
}

std::string time_stages_op(bool on) {
  StageTimes::set_enabled(on);
  return StageTimes::take();
}

}  // namespace
}  // namespace santa::cpu

SANTA_KERNELS(CPU, m) {
  m.impl("read_through", TORCH_BOX(&santa::cpu::read_through_op));
  m.impl("prefer_huge_pages", TORCH_BOX(&santa::cpu::prefer_huge_pages_op));
}

SANTA_KERNELS(CompositeExplicitAutograd, m) { m.impl("time_stages", TORCH_BOX(&santa::cpu::time_stages_op)); }
