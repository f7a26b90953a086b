#pragma once

#include <torch/csrc/stable/library.h>

// The namespace that operators are registered in: torch.ops.santa. Tests build the CUDA backend a second time, for
// tensors of the CPU, under another name.
#ifndef SANTA_LIBRARY
#define SANTA_LIBRARY santa
#endif
#ifndef SANTA_SIMT
#define SANTA_SIMT 0
#endif

// The name is expanded before torch's macros paste it.
#define SANTA_EXPAND(macro, ...) macro(__VA_ARGS__)
#define SANTA_OPERATORS(m) SANTA_EXPAND(STABLE_TORCH_LIBRARY, SANTA_LIBRARY, m)
#define SANTA_KERNELS(key, m) SANTA_EXPAND(STABLE_TORCH_LIBRARY_IMPL, SANTA_LIBRARY, key, m)
