#pragma once

#include "../params.h"
#include "tasks.h"

namespace santa::cpu {

// Operator "sketch_append". Throws std::invalid_argument where rows do not fit, and has written nothing then.
void append(const AppendParams& params, const ParallelFor& parallel_for);

}  // namespace santa::cpu
