#include "torch_side.h"

#if !SANTA_SIMT
#include <cuda_runtime_api.h>

#include "info.h"
#endif

#include <stdexcept>

namespace santa::cuda {

#if SANTA_SIMT

namespace {

// An A100, but for the least shared memory that a block of any architecture has.
DeviceInfo emulated = {.multiprocessors = 108,
                       .shared_bytes = 99 << 10,
                       .shared_bytes_per_multiprocessor = 164 << 10,
                       .compute_capability = 80};

}  // namespace

void set_device(const DeviceInfo& info) { emulated = info; }

OnDevice::OnDevice(const std::string& op, const char* name, const Tensor& tensor) : device_(cpu_device()) {
  check_given(op, name, tensor);
  if (!kHome.holds(tensor)) fail(op, name, " must be ", kHome.text, ", got ", shape_text(tensor));
  info_ = emulated;
}

#else

namespace {

int64_t attribute(cudaDeviceAttr what, int device) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, what, device);
  if (error != cudaSuccess) {
    cudaGetLastError();  // or the next to ask is told of this error too
    throw std::runtime_error("santa: cannot ask CUDA device " + std::to_string(device) +
                             " for its properties: " + cudaGetErrorString(error));
  }
  return value;
}

}  // namespace

OnDevice::OnDevice(const std::string& op, const char* name, const Tensor& tensor) : device_{} {
  check_given(op, name, tensor);
  if (!kHome.holds(tensor)) fail(op, name, " must be ", kHome.text, ", got ", shape_text(tensor), " elsewhere");
  device_ = {aoti_torch_device_type_cuda(), tensor.get_device_index()};
  const int index = device_.index;
  info_ = {
      .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index),
      .shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
      .shared_bytes_per_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, index),
      .compute_capability = code_for(static_cast<int>(10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                                                      attribute(cudaDevAttrComputeCapabilityMinor, index)))};
  guard_.emplace(index);
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream_));
}

#endif

}  // namespace santa::cuda
