// Stages "weigh" and "include": integer weights [B, Hq, rows] in the place of scores, and for the shared method
// the inclusion probabilities [B, Hkv, rows] that they give; each with its sums over 16 and over 256 rows. Sums of
// integers are exact in any order.
#include "kernels.h"
#include "step.cuh"

namespace santa::cuda {
namespace {

// Sums of a chunk that a warp walks 32 rows at a time.
class ChunkSums {
 public:
  // `block_sums` of the chunk, or null.
  __device__ explicit ChunkSums(uint64_t* block_sums) : block_sums_(block_sums) {}

  // Row i * 32 + lane; every lane calls.
  __device__ void add(int i, uint32_t x) {
    total_ += x;
    if (block_sums_ == nullptr) return;
    constexpr int kLanes = static_cast<int>(kBlockRows);
    const uint64_t sum = warp_sum<kLanes>(static_cast<uint64_t>(x));
    const int lane = static_cast<int>(lane_id());
    if (lane % kLanes == 0) block_sums_[i * (kWarpLanes / kLanes) + lane / kLanes] = sum;
  }

  // Every lane calls; that of the whole chunk.
  __device__ uint64_t total() const { return warp_sum(total_); }

 private:
  uint64_t* const block_sums_;
  uint64_t total_ = 0;
};

// What a row weighs. A head without a finite maximum weighs nothing: it must neither draw nor weigh on the sample
// that it shares with its group.
template <Source kSource>
__device__ uint32_t weight_of(uint32_t bits, float maximum) {
  if constexpr (kSource == Source::kWeights) {
    return min(static_cast<uint32_t>(max(static_cast<int32_t>(bits), 0)), kWeightOne);
  } else {
    if (!is_live(maximum)) return 0;
    const float shifted = __fsub_rn(__uint_as_float(bits), maximum);
    if (shifted != shifted) return 0;  // a user's score of NaN below a maximum that is a number
    return scalar::integer_weight(kSource == Source::kScores ? shifted : scalar::Isa::min(shifted, 0.0f));
  }
}

// Grid: heads times splits of their chunks, a warp to a chunk. Out-of-range weights of a user are cut to the
// range, and so are scores above the maximum that came with them: nothing on the host may look.
template <Source kSource>
__global__ void __launch_bounds__(kThreads) weigh_kernel(const __grid_constant__ Step step) {
  wait_for_previous_grid();
  if (step.weight_sums != nullptr) let_next_grid_start();  // or there is none of this step
  const DecodeShape& shape = step.params.shape;
  const ChunkRange range = range_of(step.plan.weigh, blockIdx.x);
  const int64_t head = range.unit;
  float maximum = 0.0f;
  int64_t chunks = step.plan.chunks;
  if constexpr (kSource == Source::kScores) {
    maximum = head_maximum<kThreads>(step, head);
    chunks = chunks_of(step, head / shape.query_heads);
    if (range.split == 0 && threadIdx.x == 0) {
      step.maxima[head] = maximum;
      // Counted by stage "gather", list by list.
      if (step.params.value_rows != nullptr && head % shape.group_size() == 0) {
        step.params.value_rows[head / shape.group_size()] = 0;
      }
    }
  } else if constexpr (kSource == Source::kScoresAndMaxima) {
    maximum = step.maxima[head];
  }
  const bool per_head = step.plan.method != Method::kShared;
  const uint32_t* from = step.scores + head * step.scores_stride;
  uint32_t* to = step.weights + head * step.weights_stride;
  for (int64_t chunk = range.begin + threadIdx.x / kWarpLanes; chunk < min(range.end, chunks); chunk += kWarps) {
    const bool summed = step.weight_sums != nullptr;
    ChunkSums sums(summed && per_head ? step.block_sums + (head * step.plan.chunks + chunk) * kBlocksPerChunk
                                      : nullptr);
    for (int i = 0; i < static_cast<int>(kChunkRows) / kWarpLanes; ++i) {
      const int64_t row = chunk * kChunkRows + i * kWarpLanes + lane_id();
      const uint32_t weight = row < step.scores_rows ? weight_of<kSource>(from[row], maximum) : 0;
      if (row < step.weights_rows) to[row] = weight;
      sums.add(i, weight);
    }
    if (!summed) continue;
    const uint64_t total = sums.total();
    if (lane_id() == 0) step.weight_sums[head * step.plan.chunks + chunk] = total;
  }
}

// Reciprocals of the totals of up to kIncludeHeads heads from `first` on. Every thread calls.
__device__ void invert_totals(const Step& step, int64_t first, int heads, bool keep, float* reciprocals) {
  const DecodeShape& shape = step.params.shape;
  const int64_t chunks = chunks_of(step, first / shape.query_heads);
  __syncthreads();
  for (int h = static_cast<int>(threadIdx.x) / kWarpLanes; h < heads; h += kWarps) {
    const int64_t head = first + h;
    uint64_t total = 0;
    for (int64_t c = lane_id(); c < chunks; c += kWarpLanes) {
      total += step.weight_sums[head * step.plan.chunks + c];
    }
    total = warp_sum(total);
    if (lane_id() != 0) continue;
    float row_mass = 1.0f;
    if (step.given_row_mass != nullptr) {
      const float given = step.given_row_mass[head];
      row_mass = given > 0.0f ? scalar::Isa::min(given, 1.0f) : 0.0f;
    } else if (step.maxima != nullptr && is_live(step.maxima[head])) {
      const double lse = log_sum_exp(step.maxima[head], total);
      row_mass = static_cast<float>(row_share(step.params, head % shape.query_heads, lse));
    }
    reciprocals[h] = reciprocal_total(total, row_mass);
    if (!keep) continue;
    step.totals[head] = total;
    step.row_mass[head] = row_mass;
  }
  __syncthreads();
}

// Grid: groups times splits of their chunks, a warp to a chunk. Groups of more than kIncludeHeads heads go through
// their totals once for every round of chunks, others once in all.
__global__ void __launch_bounds__(kThreads, 4) include_kernel(const __grid_constant__ Step step) {
  wait_for_previous_grid();
  let_next_grid_start();
  constexpr int kRows = static_cast<int>(kChunkRows) / kWarpLanes;  // of a lane, in one chunk
  auto& reciprocals = shared_memory<struct Reciprocals, float[kIncludeHeads]>();
  const DecodeShape& shape = step.params.shape;
  const ChunkRange range = range_of(step.plan.include, blockIdx.x);
  const int64_t group = range.unit;
  const int64_t group_size = shape.group_size();
  const int64_t first = group * group_size;
  const int64_t end = min(range.end, chunks_of(step, group / shape.kv_heads));
  const auto samples = static_cast<float>(step.params.draw.samples);
  for (int64_t round = range.begin; round < end || round == 0; round += kWarps) {
    const int64_t chunk = round + threadIdx.x / kWarpLanes;
    float square[kRows] = {};
    for (int64_t tile = 0; tile < group_size; tile += kIncludeHeads) {
      const int heads = static_cast<int>(min(group_size - tile, int64_t{kIncludeHeads}));
      if (round == range.begin || group_size > kIncludeHeads) {
        invert_totals(step, first + tile, heads, round == 0, reciprocals);
      }
      if (chunk >= end) continue;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t row = chunk * kChunkRows + i * kWarpLanes + lane_id();
        for (int h = 0; h < heads; ++h) {
          const int64_t at = (first + tile + h) * step.weights_stride + row;
          square[i] = scalar::add_square(square[i], step.weights[at], reciprocals[h]);
        }
      }
    }
    if (chunk >= end) continue;
    ChunkSums sums(step.block_sums + (group * step.plan.chunks + chunk) * kBlocksPerChunk);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint32_t inclusion = scalar::integer_inclusion(square[i], samples);
      step.inclusion[group * step.plan.padded_rows + chunk * kChunkRows + i * kWarpLanes + lane_id()] = inclusion;
      sums.add(i, inclusion);
    }
    const uint64_t total = sums.total();
    if (lane_id() == 0) step.inclusion_sums[group * step.plan.chunks + chunk] = total;
  }
}

}  // namespace

void weigh(const Step& step, Source source, void* stream) {
  const auto run = [&](void (*kernel)(Step), bool first) {
    launch(kernel,
           {.name = "weigh",
            .grid = dim3(static_cast<unsigned>(step.plan.weigh.blocks())),
            .block = dim3(kThreads),
            .stream = static_cast<Stream>(stream),
            .overlap = step.plan.overlap && !first},
           step);
  };
  switch (source) {
    case Source::kScores:
      return run(weigh_kernel<Source::kScores>, false);
    case Source::kScoresAndMaxima:
      return run(weigh_kernel<Source::kScoresAndMaxima>, true);
    case Source::kWeights:
      return run(weigh_kernel<Source::kWeights>, true);
  }
}

void include(const Step& step, void* stream) {
  launch(include_kernel,
         {.name = "include",
          .grid = dim3(static_cast<unsigned>(step.plan.include.blocks())),
          .block = dim3(kThreads),
          .stream = static_cast<Stream>(stream),
          .overlap = step.plan.overlap},
         step);
}

}  // namespace santa::cuda
