#include "score.h"

#include <algorithm>

namespace santa::cpu {
namespace {

constexpr int64_t kPrefetchedRows = 32;  // rows of the next chunk offered to the kernel's prefetch

}  // namespace

Scorer::Scorer(const DecodeParams& params, const KernelTable& kernels)
    : params_(params), kernels_(kernels), mask_(params.mask), offsets_(kChunkRows + kPrefetchedRows) {
  if (mask_.present()) packed_.resize(params.shape.group_size() * kChunkRows);
}

void Scorer::list_rows(int64_t b, int64_t kv_head, int64_t chunk, int64_t extent) {
  const int64_t group = params_.shape.group_size();
  AttendedRows& attended = attended_;
  attended.begin = chunk * kChunkRows;
  attended.rows = std::min(kChunkRows, extent - attended.begin);
  attended.all = mask_.selects_all(b, attended.begin, attended.begin + attended.rows);
  attended.count = 0;
  const int64_t heads = mask_.same_for_all_heads() ? 1 : group;
  for (int64_t j = 0; j < attended.rows; ++j) {
    bool any = attended.all;
    for (int64_t g = 0; g < heads && !any; ++g) any = mask_.attends(b, kv_head * group + g, attended.begin + j);
    if (any) attended.local[attended.count++] = static_cast<int16_t>(j);
  }
}

// Moves the scores of the attended rows to their places and applies the mask.
void Scorer::spread(int64_t b, int64_t kv_head, float* scores, int64_t scores_stride) const {
  const int64_t group = params_.shape.group_size();
  for (int64_t g = 0; g < group; ++g) {
    float* to = scores + g * scores_stride;
    const float* from = packed_.data() + g * kChunkRows;
    std::fill_n(to, kChunkRows, kNegativeInfinity);
    for (int64_t i = 0; i < attended_.count; ++i) {
      const int64_t j = attended_.local[i];
      float bias;
      if (mask_.attends(b, kv_head * group + g, attended_.begin + j, &bias)) to[j] = from[i] + bias;
    }
  }
}

const AttendedRows& Scorer::score(int64_t b, int64_t kv_head, int64_t chunk, int64_t extent, const float* query,
                                  int64_t query_stride, float* scores, int64_t scores_stride) {
  list_rows(b, kv_head, chunk, extent);
  const AttendedRows& attended = attended_;
  int64_t listed = 0;
  for (; listed < attended.count; ++listed) {
    offsets_[listed] = params_.k.offset(b, kv_head, attended.begin + attended.local[listed]);
  }
  if (attended.all) {
    const int64_t next = attended.begin + attended.rows;
    for (int64_t j = next; j < std::min(extent, next + kPrefetchedRows); ++j) {
      offsets_[listed++] = params_.k.offset(b, kv_head, j);
    }
  }
  const int64_t group = params_.shape.group_size();
  if (attended.count != 0) {
    kernels_.score[static_cast<int>(params_.shape.dtype)](
        {.q = query,
         .q_stride = query_stride,
         .heads = group,
         .keys = params_.k.data,
         .offsets = offsets_.data(),
         .rows = attended.count,
         .listed = listed,
         .head_dim = params_.shape.head_dim,
         .scale = params_.scale,
         .scores = attended.all ? scores : packed_.data(),
         .scores_stride = attended.all ? scores_stride : kChunkRows});
  }
  if (params_.softcap != 0.0f) {
    for (int64_t g = 0; g < group; ++g) {
      float* row = attended.all ? scores + g * scores_stride : packed_.data() + g * kChunkRows;
      kernels_.softcap(row, pad(attended.count), params_.softcap);
    }
  }
  if (!attended.all) {
    spread(b, kv_head, scores, scores_stride);
  } else {
    for (int64_t g = 0; g < group; ++g) {
      float* row = scores + g * scores_stride;
      std::fill(row + attended.rows, row + kChunkRows, kNegativeInfinity);
    }
  }
  return attended;
}

}  // namespace santa::cpu
