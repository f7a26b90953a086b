#include <cuda_runtime_api.h>

#include "info.h"

namespace santa::cuda {

std::string compiled_for() {
  std::string text =
      "CUDA " + std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10) + ",";
  for (const int arch : {__CUDA_ARCH_LIST__}) text += " sm_" + std::to_string(arch / 10);
  return text;
}

}  // namespace santa::cuda
