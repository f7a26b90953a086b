#pragma once

#include <string>

namespace santa::cuda {

// The toolkit that compiled the device code, and the architectures that it was compiled for:
// "CUDA 13.0, sm_80 sm_90".
std::string compiled_for();

}  // namespace santa::cuda
