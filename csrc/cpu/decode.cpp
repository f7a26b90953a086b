#include "decode.h"

#include <algorithm>

#include "denormals.h"
#include "query.h"
#include "score.h"
#include "step.h"

namespace santa::cpu {

void decode(const DecodeParams& params, const ParallelFor& parallel_for) {
  if (params.shape.batch * params.shape.query_heads == 0) return;
  const KeepDenormals keep;
  const Step step(params, params.draw.method);
  prepare_queries(step, parallel_for);
  step.begin_statistics();
  params.draw.method == Method::kDense ? decode_dense(step, parallel_for) : decode_sampled(step, parallel_for);
}

void score(const DecodeParams& params, float* scores, float* maxima, const ParallelFor& parallel_for) {
  if (params.shape.batch * params.shape.query_heads == 0) return;
  const KeepDenormals keep;
  // The plan of any sampled method holds whole scores, which the dense one does not.
  const Step step(params, Method::kSystematic);
  prepare_queries(step, parallel_for);
  for_each_chunk(
      step, parallel_for, false, [&] { return Scorer(step, false); },
      [&](Scorer& scorer, const ChunkTask& task, const ChunkTask* next) {
        scorer.score(task, next, step.scores(step.first_head(task.group), task.chunk), step.scores_stride());
      },
      [](Scorer&, int64_t) {});
  for (int64_t group = 0; group < step.groups(); ++group) {
    step.finish_maxima(group);
    const int64_t extent = step.extents[step.batch_of(group)];
    for (int64_t head = step.first_head(group); head < step.first_head(group + 1); ++head) {
      maxima[head] = step.maximum(head);
      float* to = scores + head * step.shape.rows;
      std::copy_n(step.scores(head, 0), extent, to);
      std::fill(to + extent, to + step.shape.rows, kNegativeInfinity);
    }
  }
}

}  // namespace santa::cpu
