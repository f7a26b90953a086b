#include "score.h"

#include <algorithm>
#include <atomic>

#include "stage_timer.h"

namespace santa::cpu {

Scorer::Scorer(const Step& step, bool reads_values)
    : step_(step), reads_values_(reads_values), mask_(step.params.mask) {
  if (mask_.present()) packed_.resize(step.group_size() * kChunkRows);
}

void Scorer::list(const ChunkTask& task, AttendedRows* attended) const {
  const DecodeParams& params = step_.params;
  const int64_t b = step_.batch_of(task.group);
  const int64_t kv = task.group % step_.shape.kv_heads;
  attended->begin = task.chunk * kChunkRows;
  attended->rows = std::min(kChunkRows, step_.extents[b] - attended->begin);
  attended->all = mask_.selects_all(b, attended->begin, attended->begin + attended->rows);
  if (attended->all) {
    attended->count = attended->rows;
    params.k.offsets(b, kv, attended->begin, attended->rows, attended->key_offsets);
    if (reads_values_) params.v.offsets(b, kv, attended->begin, attended->rows, attended->value_offsets);
    return;
  }
  attended->count = 0;
  const int64_t heads = mask_.same_for_all_heads() ? 1 : step_.group_size();
  for (int64_t j = 0; j < attended->rows; ++j) {
    const int64_t row = attended->begin + j;
    bool any = false;
    for (int64_t g = 0; g < heads && !any; ++g) any = mask_.attends(b, kv * step_.group_size() + g, row);
    if (!any) continue;
    attended->local[attended->count] = static_cast<int16_t>(j);
    attended->key_offsets[attended->count] = params.k.offset(b, kv, row);
    if (reads_values_) attended->value_offsets[attended->count] = params.v.offset(b, kv, row);
    ++attended->count;
  }
}

RowsAhead Scorer::keys_ahead() const {
  if (!listed_) return {};
  const AttendedRows& attended = lists_[current_];
  return {.data = step_.params.k.data, .offsets = attended.key_offsets, .rows = attended.count};
}

// Moves the scores of the attended rows to their places and applies the mask.
void Scorer::spread(int64_t group, const AttendedRows& attended, int64_t padded_rows, float* scores,
                    int64_t stride) const {
  const int64_t b = step_.batch_of(group);
  const int64_t first = step_.first_head(group) % step_.shape.query_heads;
  for (int64_t g = 0; g < step_.group_size(); ++g) {
    float* to = scores + g * stride;
    const float* from = packed_.data() + g * kChunkRows;
    std::fill_n(to, padded_rows, kNegativeInfinity);
    for (int64_t i = 0; i < attended.count; ++i) {
      const int64_t j = attended.local[i];
      float bias;
      if (mask_.attends(b, first + g, attended.begin + j, &bias)) to[j] = from[i] + bias;
    }
  }
}

const AttendedRows& Scorer::score(const ChunkTask& task, const ChunkTask* next, float* scores, int64_t stride) {
  const StageTimer timer(Stage::kScore);
  const DecodeParams& params = step_.params;
  if (!listed_) list(task, &lists_[current_]);
  const AttendedRows& attended = lists_[current_];
  current_ ^= 1;
  listed_ = next != nullptr;
  if (listed_) list(*next, &lists_[current_]);
  RowsAhead ahead = keys_ahead();
  if (reads_values_) {
    ahead = {.data = params.v.data, .offsets = attended.value_offsets, .rows = attended.count};
  }
  const int64_t group = step_.group_size();
  const int64_t head = step_.first_head(task.group);
  if (attended.count != 0) {
    step_.kernels.score[static_cast<int>(step_.shape.dtype)]({.q = step_.query(head),
                                                              .q_stride = step_.plan.query_stride,
                                                              .heads = group,
                                                              .keys = params.k.data,
                                                              .offsets = attended.key_offsets,
                                                              .rows = attended.count,
                                                              .head_dim = step_.shape.head_dim,
                                                              .scale = params.scale,
                                                              .scores = attended.all ? scores : packed_.data(),
                                                              .scores_stride = attended.all ? stride : kChunkRows,
                                                              .ahead = ahead});
  }
  if (params.softcap != 0.0f) {
    for (int64_t g = 0; g < group; ++g) {
      float* row = attended.all ? scores + g * stride : packed_.data() + g * kChunkRows;
      step_.kernels.softcap(row, pad(attended.count), params.softcap);
    }
  }
  const int64_t padded_rows = step_.padded_rows(task.group, task.chunk);
  if (!attended.all) spread(task.group, attended, padded_rows, scores, stride);
  for (int64_t g = 0; g < group; ++g) {
    float* row = scores + g * stride;
    if (attended.all) std::fill(row + attended.rows, row + padded_rows, kNegativeInfinity);
    step_.chunk_maxima(head + g)[task.chunk] = step_.kernels.maximum(row, padded_rows);
  }
  if (params.key_rows != nullptr) std::atomic_ref(params.key_rows[task.group]) += attended.count;
  return attended;
}

}  // namespace santa::cpu
