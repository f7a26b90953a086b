// Stage "bernoulli_query": the stochastic query [B, Hq, D] in fp32 that takes the place of q [B, Hq, D] in every
// score, before the keys are read.
//
// Grid: one block per group, 128 threads: a thread to a feature where the heads of a group share their draw, a
// warp to a head where they do not. A step has few queries and reads them from the caches.
#include "../math/bernoulli.h"
#include "kernels.h"
#include "scan.cuh"
#include "step.cuh"

namespace santa::cuda {
namespace {

// One past the last row of a sequence that any of its heads attends. What stage "score" knows of it is not there
// yet: the mask is searched from its end. Every thread calls.
__device__ int64_t find_attended_end(const DecodeParams& params, int64_t b) {
  constexpr int kRows = 8;  // of a thread at once
  const int64_t length = length_of(params, b);
  if (params.mask.kind == MaskParams::Kind::kNone) return length;
  const int64_t heads = params.mask.head_stride == 0 ? 1 : params.shape.query_heads;
  for (int64_t end = length; end > 0; end -= kRows * kThreads) {
    int64_t last = 0;
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = end - 1 - i * kThreads - threadIdx.x;
      float bias;
      for (int64_t h = 0; row >= last && h < heads; ++h) {
        if (attends(params.mask, b, h, row, &bias)) last = row + 1;
      }
    }
    last = block_max<kThreads>(last);
    if (last != 0) return last;
  }
  return 0;
}

class Randomizer {
 public:
  // For KV head kv of sequence b.
  __device__ Randomizer(const Step& step, int64_t b, int64_t kv, int64_t position)
      : step_(step),
        params_(step.params),
        dim_(static_cast<int>(params_.shape.head_dim)),
        heads_(static_cast<int>(params_.shape.group_size())),
        first_(b * params_.shape.query_heads + kv * heads_),
        q_(b * params_.q_batch_stride + kv * heads_ * params_.q_head_stride),
        key_{.seed = params_.draw.seed[b],
             .position = position,
             .layer = params_.draw.layer,
             .global_head = params_.draw.head_offset + kv * heads_} {}

  // One draw for each head: a warp draws for one.
  __device__ void draw_heads() const {
    for (int h = static_cast<int>(threadIdx.x) / kWarpLanes; h < heads_; h += kWarps) {
      const float most = largest(h);
      DrawKey key = key_;
      key.global_head += h;
      for (int d = static_cast<int>(lane_id()); d < dim_; d += kWarpLanes) {
        float q = is_finite(most) ? feature(h, d) : nan();
        if (most > 0.0f && is_finite(most)) {
          const int64_t draws = params_.bernoulli.draws;
          const uint32_t chance = feature_chance(fabsf(q), most);
          q = ternary_mean(q, most, ternary_count(feature_word(key, d), draws, chance), draws);
        }
        out(h)[d] = q;
      }
    }
  }

  // One draw for the group. Every thread calls.
  __device__ void draw_group() const {
    float most = 0.0f;
    for (int h = static_cast<int>(threadIdx.x) / kWarpLanes; h < heads_; h += kWarps) {
      const float of_head = largest(h);
      if (lane_id() == 0) step_.query_maxima[first_ + h] = of_head;
      if (is_finite(of_head)) most = max(most, of_head);
    }
    most = block_max<kThreads>(most);  // behind it, all of query_maxima is there
    float largest_size = 0.0f;
    for (int d = static_cast<int>(threadIdx.x); d < dim_ && most != 0.0f; d += kThreads) {
      largest_size = max(largest_size, size(d, most));
    }
    largest_size = block_max<kThreads>(largest_size);
    const uint64_t bits = random64(key_, 0, santa::Stream::kFeatures);
    uint64_t before = 0;
    for (int base = 0; base < dim_; base += kThreads) {
      const int d = base + static_cast<int>(threadIdx.x);
      const bool drawing = d < dim_ && most != 0.0f;
      const uint32_t inclusion =
          drawing ? feature_inclusion(feature_chance(size(d, most), largest_size), params_.bernoulli.draws) : 0;
      const auto scan = block_scan<kThreads>(uint64_t{inclusion});
      const bool taken = takes_feature(before + scan.before, inclusion, bits);
      before += scan.total;
      if (d < dim_) write_feature(d, most, taken, inclusion);
    }
  }

  // Features of K that the queries of the group use. Every thread calls, behind a barrier.
  __device__ int64_t used_features() const {
    int64_t used = 0;
    for (int d = static_cast<int>(threadIdx.x); d < dim_; d += kThreads) {
      bool needed = false;
      for (int h = 0; h < heads_ && !needed; ++h) needed = needs_keys(out(h)[d]);
      used += needed ? 1 : 0;
    }
    return max(block_sum<kThreads>(used), int64_t{1});
  }

 private:
  __device__ static float nan() { return __int_as_float(0x7FC00000); }

  __device__ float* out(int h) const { return step_.query + (first_ + h) * dim_; }

  __device__ float feature(int h, int d) const {
    return load_as_float(params_.q_dtype, params_.q, q_ + h * params_.q_head_stride + d);
  }

  // The largest |q| of a head, NaN where any feature is. A warp calls.
  __device__ float largest(int h) const {
    float largest = 0.0f;
    for (int d = static_cast<int>(lane_id()); d < dim_; d += kWarpLanes) {
      const float size = fabsf(feature(h, d));
      if (!(size <= largest)) largest = size;
      if (largest != largest) break;
    }
    return warp_max(largest);
  }

  // Feature d of all heads.
  __device__ void write_feature(int d, float most, bool taken, uint32_t inclusion) const {
    for (int h = 0; h < heads_; ++h) {
      const float q = feature(h, d);
      out(h)[d] = !is_finite(step_.query_maxima[first_ + h]) ? nan()
                  : most == 0.0f                             ? q
                  : taken                                    ? expanded_feature(q, inclusion)
                                                             : 0.0f;
    }
  }

  // What feature d weighs in the draw of the group, from the heads that are finite.
  __device__ float size(int d, float most) const {
    float square = 0.0f;
    for (int h = 0; h < heads_; ++h) {
      if (is_finite(step_.query_maxima[first_ + h])) square = add_feature_square(square, feature(h, d), most);
    }
    return __fsqrt_rn(square);
  }

  const Step& step_;
  const DecodeParams& params_;
  const int dim_;
  const int heads_;
  const int64_t first_;  // of the group's heads, over the batch
  const int64_t q_;      // where its query begins
  const DrawKey key_;
};

template <bool kShared>
__global__ void __launch_bounds__(kThreads, 4) bernoulli_kernel(const __grid_constant__ Step step) {
  wait_for_previous_grid();
  let_next_grid_start();
  const DecodeParams& params = step.params;
  const auto kv_heads = static_cast<uint32_t>(params.shape.kv_heads);
  const int64_t b = blockIdx.x / kv_heads;
  const int64_t position =
      params.draw.position.data != nullptr ? params.draw.position[b] : find_attended_end(params, b);
  const Randomizer randomizer(step, b, blockIdx.x % kv_heads, position);
  if constexpr (kShared) {
    randomizer.draw_group();
  } else {
    randomizer.draw_heads();
  }
  if (params.keys_read == nullptr) return;
  __syncthreads();
  const int64_t used = randomizer.used_features();
  if (threadIdx.x == 0) params.keys_read[blockIdx.x].features = used;
}

}  // namespace

void bernoulli(const Step& step, void* stream) {
  const DecodeShape& shape = step.params.shape;
  launch(step.params.bernoulli.shared ? bernoulli_kernel<true> : bernoulli_kernel<false>,
         {.name = "bernoulli",
          .grid = dim3(static_cast<unsigned>(shape.batch * shape.kv_heads)),
          .block = dim3(kThreads),
          .stream = static_cast<Stream>(stream)},
         step);
}

}  // namespace santa::cuda
