#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <tuple>
#include <type_traits>

#include "params.h"

namespace santa {

// torch's own numbers for a device.
struct Device {
  int32_t type;
  int32_t index;
};

inline Device cpu_device() { return {aoti_torch_device_type_cpu(), 0}; }

// A contiguous tensor with undefined contents, straight from the allocator: the dispatcher would look up an
// operator by name and box its arguments, which takes longer than the smallest decode step.
inline AtenTensorHandle empty_handle(std::initializer_list<int64_t> sizes, torch::headeronly::ScalarType dtype,
                                     Device device) {
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
                                                         strides, code, device.type, device.index, &handle));
  return handle;
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

  Output(std::initializer_list<int64_t> sizes, torch::headeronly::ScalarType dtype, Device device)
      : handle_(empty_handle(sizes, dtype, device)) {}

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

// Numbers of a KeysRead.
constexpr int64_t kKeysReadNumbers = sizeof(KeysRead) / sizeof(int64_t);

// What a decode step returns, in the order of its schema; statistics have no elements unless asked for.
class DecodeOutputs {
 public:
  // Makes the tensors and points `params` to them.
  DecodeOutputs(DecodeParams* params, torch::headeronly::ScalarType dtype, bool return_stats, Device device)
      : out_({params->shape.batch, params->shape.query_heads, params->shape.value_dim}, dtype, device),
        lse_({params->shape.batch, params->shape.query_heads}, torch::headeronly::ScalarType::Float, device),
        keys_read_({return_stats ? params->shape.batch : 0, params->shape.kv_heads, kKeysReadNumbers},
                   torch::headeronly::ScalarType::Long, device),
        value_rows_({return_stats ? params->shape.batch : 0, params->shape.kv_heads},
                    torch::headeronly::ScalarType::Long, device),
        squared_error_({return_stats ? params->shape.batch : 0, params->shape.query_heads},
                       torch::headeronly::ScalarType::Float, device) {
    params->out = out_.data<void>();
    params->lse = lse_.data<float>();
    if (!return_stats) return;
    params->keys_read = keys_read_.data<KeysRead>();
    params->value_rows = value_rows_.data<int64_t>();
    params->squared_error = squared_error_.data<float>();
  }

  using Handles = std::tuple<Output::Handle, Output::Handle, Output::Handle, Output::Handle, Output::Handle>;
  Handles release() {
    return {out_.release(), lse_.release(), keys_read_.release(), value_rows_.release(), squared_error_.release()};
  }

 private:
  Output out_, lse_, keys_read_, value_rows_, squared_error_;
};

}  // namespace santa
