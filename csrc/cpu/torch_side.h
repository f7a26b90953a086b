#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <functional>
#include <initializer_list>

#include "../output.h"
#include "denormals.h"

namespace santa::cpu {

// torch's own thread pool: honours torch.set_num_threads. Every thread computes with subnormal numbers.
inline void torch_parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& f) {
  if (n == 0) return;
  torch::stable::parallel_for(0, n, grain, [&f](int64_t begin, int64_t end) {
    const KeepDenormals keep;
    f(begin, end);
  });
}

inline torch::stable::Tensor empty(std::initializer_list<int64_t> sizes, torch::headeronly::ScalarType dtype) {
  return torch::stable::Tensor(empty_handle(sizes, dtype, cpu_device()));
}

}  // namespace santa::cpu
