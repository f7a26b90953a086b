#include <cuda_runtime_api.h>

#include "info.h"

namespace santa::cuda {

std::string compiled_for() {
  std::string text =
      "CUDA " + std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10) + ",";
  for (const int arch : {__CUDA_ARCH_LIST__}) text += " sm_" + std::to_string(arch / 10);
  return text;
}

int code_for(int compute_capability) {
  int newest = 0;
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    if (arch / 10 <= compute_capability && arch / 10 > newest) newest = arch / 10;
  }
  return newest;
}

}  // namespace santa::cuda
