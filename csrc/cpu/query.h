#pragma once

#include <vector>

#include "../params.h"
#include "tasks.h"

namespace santa::cpu {

class Step;

// The queries of a step as its scores want them: in fp32, stochastic where asked for, and beside key_blocks
// feature by feature.
void prepare_queries(const Step& step, const ParallelFor& parallel_for);

// Stage "bernoulli_query": q^ [B, Hq, D] in fp32.
void bernoulli_query(const DecodeParams& params, float* to, const ParallelFor& parallel_for);

}  // namespace santa::cpu
