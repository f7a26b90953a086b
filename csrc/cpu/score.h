#pragma once

#include <vector>

#include "../params.h"
#include "kernels.h"
#include "mask.h"

namespace santa::cpu {

// The rows of one chunk that some head of a group attends. Only they are loaded, from K and from V.
struct AttendedRows {
  int64_t begin;              // first row of the chunk
  int64_t rows;               // rows of the chunk within the sequence
  int64_t count;              // attended ones
  bool all;                   // every head attends every row, nothing is added to its scores
  int16_t local[kChunkRows];  // [count]: row minus `begin`, ascending
};

// What a thread needs to score chunks of one group after another.
class Scorer {
 public:
  Scorer(const DecodeParams& params, const KernelTable& kernels);

  // Scores chunk `chunk` of a group. `query` is [G, query_stride] in fp32; `scores` is [G, scores_stride] with
  // kChunkRows places from the chunk on, all of which are written: -inf where a head does not attend.
  // Returns the rows that were read; they stay valid until the next call.
  const AttendedRows& score(int64_t b, int64_t kv_head, int64_t chunk, int64_t extent, const float* query,
                            int64_t query_stride, float* scores, int64_t scores_stride);

 private:
  void list_rows(int64_t b, int64_t kv_head, int64_t chunk, int64_t extent);
  void spread(int64_t b, int64_t kv_head, float* scores, int64_t scores_stride) const;

  const DecodeParams& params_;
  const KernelTable& kernels_;
  Mask mask_;
  AttendedRows attended_;
  std::vector<int64_t> offsets_;  // of the attended rows in K, then of a few to prefetch
  std::vector<float> packed_;     // [G, kChunkRows]: scores of the attended rows only
};

}  // namespace santa::cpu
