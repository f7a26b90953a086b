#include "info.h"

#include "../registration.h"

// No tensor argument names a device here, so the operator is not registered under CUDA.
SANTA_KERNELS(CompositeExplicitAutograd, m) { m.impl("cuda_info", TORCH_BOX(&santa::cuda::compiled_for)); }
