#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "../params.h"
#include "../planner.h"
#include "kernels.h"
#include "results.h"
#include "tasks.h"

namespace santa::cpu {

// One decode step: its parameters, its scratch memory and where everything lies in it. What passes between stages
// is exact (maxima, integers) or merged in row order, so that neither threads nor batch change a bit.
class Step {
 public:
  Step(const DecodeParams& params, Method method);

  const DecodeParams& params;
  const DecodeShape shape;
  const KernelTable& kernels;
  const Sinks sinks;
  const Results results;
  const std::vector<int64_t> extents;  // [B]: one past the last attended row
  const ChunkGrid grid;
  const CpuPlan plan;

  int64_t group_size() const { return shape.group_size(); }
  int64_t groups() const { return shape.batch * shape.kv_heads; }
  int64_t heads() const { return shape.batch * shape.query_heads; }
  // First query head of a group, counted over the batch.
  int64_t first_head(int64_t group) const { return group * group_size(); }
  int64_t batch_of(int64_t group) const { return group / shape.kv_heads; }
  int64_t chunks_of(int64_t group) const { return chunk_count(extents[batch_of(group)]); }
  // Rows of one chunk, up to the end of a block: what kernels work on.
  int64_t padded_rows(int64_t group, int64_t chunk) const {
    return std::min(kChunkRows, pad(extents[batch_of(group)] - chunk * kChunkRows, kBlockRows));
  }
  // Chunks below which a second thread costs more than it saves.
  int64_t grain(bool reads_values) const;

  template <class T>
  T* piece(int64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  float* query(int64_t head) const { return piece<float>(plan.query) + head * plan.query_stride; }
  int64_t& used_features(int64_t group) const { return piece<int64_t>(plan.used_features)[group]; }
  // Beside key_blocks; see BlockTile.
  float* block_query(int64_t group) const {
    return piece<float>(plan.block_query) + group * shape.head_dim * plan.block_stride;
  }
  int32_t* features(int64_t group) const { return piece<int32_t>(plan.features) + group * shape.head_dim; }
  int32_t* ascending(int64_t group) const { return piece<int32_t>(plan.ascending) + group * shape.head_dim; }
  int32_t* lane_ends(int64_t group) const { return piece<int32_t>(plan.lane_ends) + group * kMaxLanes; }
  float* chunk_maxima(int64_t head) const { return piece<float>(plan.chunk_maxima) + head * plan.chunks; }
  float& maximum(int64_t head) const { return piece<float>(plan.maxima)[head]; }
  int64_t scores_stride() const { return plan.chunks * kChunkRows; }
  float* scores(int64_t head, int64_t chunk) const {
    return piece<float>(plan.scores) + head * scores_stride() + chunk * kChunkRows;
  }

  // What the group will have read of K, less the rows and their bytes that scoring adds.
  void begin_statistics() const;

  // The largest score of each head of a group over its whole sequence, from those of its chunks.
  void finish_maxima(int64_t group) const;

 private:
  std::byte* const memory_;
};

constexpr int64_t kSmallestPiece = 32;  // chunks: shorter pieces gain nothing (measured)

// Runs f(task, next) over the chunks of the step, cut among threads; `next` is the chunk that the same thread
// turns to afterwards, or null. A group all of whose chunks fell to one thread is finished by that thread at once,
// by finish(group), while what it wrote is in its caches. Returns the other groups, those without chunks among
// them.
//
// begin() makes what each thread needs; f and finish get it as their first argument.
template <class Begin, class Each, class Finish>
std::vector<int64_t> for_each_chunk(const Step& step, const ParallelFor& parallel_for, bool reads_values,
                                    const Begin& begin, const Each& each, const Finish& finish) {
  std::vector<char> finished(step.groups(), 0);
  const int64_t tasks = step.grid.size();
  Claims claims(tasks, kSmallestPiece);
  parallel_for(tasks, step.grain(reads_values), [&](int64_t from, int64_t to) {
    if (from >= to) return;
    const int64_t threads = (tasks - 1) / (to - from) + 1;
    auto piece = claims.take(threads);
    if (piece.begin == piece.end) return;
    auto state = begin();
    for (; piece.begin < piece.end; piece = claims.take(threads)) {
      ChunkTask task = step.grid[piece.begin];
      for (int64_t at = piece.begin; at < piece.end; ++at) {
        const ChunkTask next = at + 1 < piece.end ? step.grid[at + 1] : task;
        each(state, task, at + 1 < piece.end ? &next : nullptr);
        if (task.chunk + 1 == step.chunks_of(task.group) && at - task.chunk >= piece.begin) {
          finish(state, task.group);
          finished[task.group] = 1;
        }
        task = next;
      }
    }
  });
  std::vector<int64_t> rest;
  for (int64_t group = 0; group < step.groups(); ++group) {
    if (!finished[group]) rest.push_back(group);
  }
  return rest;
}

}  // namespace santa::cpu
