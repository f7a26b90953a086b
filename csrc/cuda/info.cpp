#include "info.h"

#include <torch/csrc/stable/library.h>

// No tensor argument names a device here, so the operator is not registered under CUDA.
STABLE_TORCH_LIBRARY_IMPL(santa, CompositeExplicitAutograd, m) {
  m.impl("cuda_info", TORCH_BOX(&santa::cuda::compiled_for));
}
