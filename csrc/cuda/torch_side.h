#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "../check_stages.h"
#include "../output.h"
#include "../planner.h"

// What operators want of torch's CUDA: the device of a tensor, its current stream, its memory. Nothing is read
// back and nothing waits, so that a graph can capture a call. Tests build the same operators for tensors of the
// CPU, with SANTA_SIMT, where kernels run on the emulator.
namespace santa::cuda {

#if SANTA_SIMT
inline constexpr Home kHome = kCpuHome;
#else
inline constexpr Home kHome = {[](const Tensor& tensor) { return tensor.is_cuda(); }, "on a CUDA device"};
#endif

// Makes a tensor's device the current one for as long as it lives.
class OnDevice {
 public:
  // Throws std::invalid_argument where `tensor`, argument `name`, is elsewhere; std::runtime_error without a
  // driver.
  OnDevice(const std::string& op, const char* name, const Tensor& tensor);

  const DeviceInfo& info() const { return info_; }
  void* stream() const { return stream_; }
  Device device() const { return device_; }

  Tensor empty(std::initializer_list<int64_t> sizes, torch::headeronly::ScalarType dtype) const {
    return Tensor(empty_handle(sizes, dtype, device_));
  }

 private:
  Device device_;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  DeviceInfo info_;
  void* stream_ = nullptr;
};

#if SANTA_SIMT
// The device that plans are made for.
void set_device(const DeviceInfo& info);
#endif

}  // namespace santa::cuda
