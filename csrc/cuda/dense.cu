// The dense method: what the sampled ones are compared with. Exact, in the order of sums that the CPU backend has,
// and not tuned: scores stay in shared memory, V is read by whoever owns a feature.
#include "kernels.h"
#include "score.cuh"

namespace santa::cuda {
namespace {

constexpr float kUnused = -1.0f;  // weight of a row that a head does not attend: its V is not looked at

// Weights exp(score - largest of the chunk) in place of a head's scores. A warp calls. Returns their sum.
template <class Scorer>
__device__ float exponentiate(const Scorer& scorer, const Step& step, int64_t chunk, int h, float largest) {
  float* scores = scorer.scores(h);
  float sum = 0.0f;
  for (int i = static_cast<int>(lane_id()); i < kChunkRows; i += kWarpLanes) {
    const int64_t row = chunk * kChunkRows + i;
    float bias;
    const bool used = is_live(largest) && row < scorer.length() &&
                      attends(step.params.mask, scorer.b(), scorer.local_head(h), row, &bias);
    const float p = used ? scalar::exponential(__fsub_rn(scores[i], largest)) : 0.0f;
    scores[i] = used ? p : kUnused;
    sum = __fadd_rn(sum, p);
  }
  return warp_sum(sum);
}

// Sums of one feature over the rows of a chunk, in their order, for a tile of heads.
template <class T, class Scorer>
__device__ void accumulate(const Scorer& scorer, const Step& step, int64_t chunk, int first, int64_t feature) {
  const RowAddress& v = step.params.v;
  const float* weights[kHeadTile];
  float sum[kHeadTile];
  for (int h = 0; h < kHeadTile; ++h) {
    weights[h] = scorer.scores(min(first + h, scorer.heads() - 1));
    sum[h] = 0.0f;
  }
  for (int i = 0; i < kChunkRows; ++i) {
    bool used = false;
    for (int h = 0; h < kHeadTile; ++h) used = used || weights[h][i] >= 0.0f;
    if (!used) continue;
    const int64_t at = v.offset(scorer.b(), scorer.kv_head(), chunk * kChunkRows + i) + feature;
    const float value = to_float(static_cast<const T*>(v.data)[at]);
    for (int h = 0; h < kHeadTile; ++h) {
      if (weights[h][i] >= 0.0f) sum[h] = __fmaf_rn(weights[h][i], value, sum[h]);
    }
  }
  for (int h = 0; h < kHeadTile && first + h < scorer.heads(); ++h) {
    const int64_t partial = scorer.head(first + h) * step.plan.chunks + chunk;
    step.partial_out[partial * step.plan.value_stride + feature] = sum[h];
  }
}

// Grid: as that of stage "score". Leaves, for each chunk, the largest score, the sum of weights and the weighted
// sum of V rows, all relative to the chunk.
template <class T, bool kSketch>
__global__ void __launch_bounds__(kThreads, kScoreBlocks) dense_kernel(const __grid_constant__ Step step) {
  wait_for_previous_grid();
  let_next_grid_start();
  const Scorer<T, kSketch, 3> scorer(step, blockIdx.x);
  scorer.run([&](int64_t chunk) {
    for (int h = static_cast<int>(threadIdx.x) / kWarpLanes; h < scorer.heads(); h += kWarps) {
      const float largest = chunk_maximum(scorer.scores(h));
      const float sum = exponentiate(scorer, step, chunk, h, largest);
      if (lane_id() != 0) continue;
      step.chunk_maxima[scorer.head(h) * step.plan.chunks + chunk] = largest;
      step.partial_sums[scorer.head(h) * step.plan.chunks + chunk] = sum;
    }
    __syncthreads();
    for (int64_t feature = threadIdx.x; feature < step.params.shape.value_dim; feature += kThreads) {
      for (int first = 0; first < scorer.heads(); first += kHeadTile) {
        accumulate<T>(scorer, step, chunk, first, feature);
      }
    }
  });
}

// Adds the chunks of a head in row order and in fp64, each product rounded before it is added.
// Grid: heads times slices of kMergeFeatures features, one to a thread.
template <class T>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ Step step) {
  wait_for_previous_grid();
  auto& factors = shared_memory<struct Factors, double[kThreads]>();
  auto& sums = shared_memory<struct Sums, float[kThreads]>();
  const DecodeShape& shape = step.params.shape;
  const int64_t head = blockIdx.x / step.plan.value_slices;
  const int64_t slice = blockIdx.x % step.plan.value_slices;
  const int64_t feature = slice * kMergeFeatures + threadIdx.x;
  const int64_t local = head % shape.query_heads;
  const bool mine = feature < shape.value_dim;
  const float maximum = head_maximum<kThreads>(step, head);
  const int64_t chunks = is_live(maximum) ? chunks_of(step, head / shape.query_heads) : 0;
  double total = 0.0;
  double sum = 0.0;
  for (int64_t base = 0; base < chunks; base += kThreads) {
    __syncthreads();
    const int64_t c = head * step.plan.chunks + base + threadIdx.x;
    if (base + threadIdx.x < chunks) {
      const float largest = step.chunk_maxima[c];
      factors[threadIdx.x] =
          largest == maximum ? 1.0 : exp(static_cast<double>(largest) - static_cast<double>(maximum));
      sums[threadIdx.x] = step.partial_sums[c];
    }
    __syncthreads();
    for (int i = 0; i < min(chunks - base, int64_t{kThreads}); ++i) {
      const double factor = factors[i];
      total = __dadd_rn(total, __dmul_rn(factor, static_cast<double>(sums[i])));
      if (!mine) continue;
      const int64_t partial = head * step.plan.chunks + base + i;
      const auto x = static_cast<double>(step.partial_out[partial * step.plan.value_stride + feature]);
      // A chunk that counts for nothing adds nothing, not even where its fp32 sums ran to infinity; NaN it passes
      // on.
      if (factor != 0.0) {
        sum = __dadd_rn(sum, __dmul_rn(x, factor));
      } else if (x != x) {
        sum = x;
      }
    }
  }
  const bool live = is_live(maximum);
  const double lse = live ? static_cast<double>(maximum) + log(total) : 0.0;
  const double factor = live ? row_share(step.params, local, lse) / total : 1.0;
  const double value = live ? __dmul_rn(sum, factor) : degenerate_value(maximum);
  if (mine) {
    store_as(static_cast<float>(value), static_cast<T*>(step.params.out) + head * shape.value_dim + feature);
  }
  if (slice != 0) return;
  if (threadIdx.x == 0) step.params.lse[head] = final_lse(step.params, local, maximum, lse);
  if (step.params.value_rows == nullptr) return;
  if (threadIdx.x == 0) step.params.squared_error[head] = 0.0f;
  if (local % shape.group_size() != 0) return;
  const int64_t group = head / shape.group_size();
  const int64_t rows = count_keys<kThreads>(step, group);
  if (threadIdx.x == 0) step.params.value_rows[group] = rows;
}

}  // namespace

void dense(const Step& step, void* stream) {
  launch_for_dtype(step.params.shape.dtype, [&](auto type) {
    using T = decltype(type);
    launch(step.sketch() ? dense_kernel<T, true> : dense_kernel<T, false>,
           {.name = "dense",
            .grid = dim3(static_cast<unsigned>(step.plan.score.blocks())),
            .block = dim3(kThreads),
            .shared_bytes = static_cast<size_t>(step.plan.score_shared),
            .stream = static_cast<Stream>(stream),
            .overlap = step.plan.overlap && step.query != nullptr},
           step);
  });
}

void merge(const Step& step, void* stream) {
  launch_for_dtype(step.params.shape.dtype, [&](auto type) {
    launch(merge_kernel<decltype(type)>,
           {.name = "merge",
            .grid = dim3(static_cast<unsigned>(step.plan.weigh.units * step.plan.value_slices)),
            .block = dim3(kThreads),
            .stream = static_cast<Stream>(stream),
            .overlap = step.plan.overlap},
           step);
  });
}

}  // namespace santa::cuda
