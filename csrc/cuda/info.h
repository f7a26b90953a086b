#pragma once

#include <string>

namespace santa::cuda {

// The toolkit that compiled the device code, and the architectures that it was compiled for:
// "CUDA 13.0, sm_80 sm_90".
std::string compiled_for();

// The architecture whose code runs on a device, 80 for 8.0: the newest that was compiled for and is not newer than
// the device's own. 0 if there is none.
int code_for(int compute_capability);

}  // namespace santa::cuda
