#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <type_traits>

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

// A contiguous tensor with undefined contents, straight from the allocator: the dispatcher would look up an
// operator by name and box its arguments, which takes longer than the smallest decode step.
inline AtenTensorHandle empty_handle(std::initializer_list<int64_t> sizes, torch::headeronly::ScalarType dtype) {
  constexpr size_t kMaxDims = 3;
  STD_TORCH_CHECK(sizes.size() <= kMaxDims, "santa: a result of more than ", kMaxDims, " dimensions");
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  bool overflow = false;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    overflow |= __builtin_mul_overflow(stride, std::max<int64_t>(sizes.begin()[d], 1), &stride);
  }
  STD_TORCH_CHECK(!overflow, "santa: a result would have 2^63 elements or more");
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(),
                                                         strides, code, aoti_torch_device_type_cpu(), 0, &handle));
  return handle;
}

inline torch::stable::Tensor empty(std::initializer_list<int64_t> sizes, torch::headeronly::ScalarType dtype) {
  return torch::stable::Tensor(empty_handle(sizes, dtype));
}

// An output of an operator, handed to the dispatcher as the handle that it is: a Tensor would first be copied into
// a second one.
class Output {
 public:
  // What the dispatcher takes over. A type of its own, since torch still has a global function for bare handles.
  // torch's conversion of returned values copies any small trivial type bit by bit; what a schema calls a Tensor
  // is then owned by the caller.
  struct Handle {
    AtenTensorHandle handle;
  };
  static_assert(sizeof(Handle) == sizeof(StableIValue) && std::is_trivially_copyable_v<Handle>);

  Output(std::initializer_list<int64_t> sizes, torch::headeronly::ScalarType dtype)
      : handle_(empty_handle(sizes, dtype)) {}

  template <class T>
  T* data() const {
    void* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle_.get(), &data));
    return static_cast<T*>(data);
  }

  Handle release() { return {handle_.release()}; }

 private:
  struct Delete {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
  };
  std::unique_ptr<AtenTensorOpaque, Delete> handle_;
};

}  // namespace santa::cpu
