#pragma once

#include "../params.h"
#include "tasks.h"

namespace santa::cpu {

// One decode step on the CPU: out, lse and, where asked for, statistics. Arguments have been checked.
void decode(const DecodeParams& params, const ParallelFor& parallel_for);

// Stage "score" alone: scores [B, Hq, L] and their maxima [B, Hq]; -inf where a head does not attend.
void score(const DecodeParams& params, float* scores, float* maxima, const ParallelFor& parallel_for);

// The two ways through a step.
class Step;
void decode_dense(const Step& step, const ParallelFor& parallel_for);
void decode_sampled(const Step& step, const ParallelFor& parallel_for);

}  // namespace santa::cpu
