// Stage "score": scores [B, Hq, rows] from q [B, Hq, D] and k [B, Hkv, L, D], and the largest of every chunk.
//
// Grid: (group, block of heads) times splits of the sequence's chunks, flattened; 128 threads. A block streams its
// chunks of K once for all its heads: decoding is bound by that stream, and one row of queries gives tensor cores
// nothing to share.
#include "kernels.h"
#include "score.cuh"

namespace santa::cuda {
namespace {

template <class T, bool kSketch>
__global__ void __launch_bounds__(kThreads, kScoreBlocks) score_kernel(const __grid_constant__ Step step) {
  wait_for_previous_grid();
  let_next_grid_start();
  const Scorer<T, kSketch> scorer(step, blockIdx.x);
  scorer.run([&](int64_t chunk) {
    for (int h = static_cast<int>(threadIdx.x) / kWarpLanes; h < scorer.heads(); h += kWarps) {
      const float* scores = scorer.scores(h);
      const int64_t head = scorer.head(h);
      const int64_t begin = chunk * kChunkRows;
      for (int i = static_cast<int>(lane_id()); i < kChunkRows; i += kWarpLanes) {
        if (begin + i >= step.scores_rows) break;
        step.scores[head * step.scores_stride + begin + i] = __float_as_uint(scores[i]);
      }
      const float largest = chunk_maximum(scores);
      if (lane_id() == 0) step.chunk_maxima[head * step.plan.chunks + chunk] = largest;
    }
  });
}

// Grid: one block per head.
__global__ void __launch_bounds__(kThreads) finish_maxima_kernel(const __grid_constant__ Step step) {
  wait_for_previous_grid();
  const float largest = head_maximum<kThreads>(step, blockIdx.x);
  if (threadIdx.x == 0) step.maxima[blockIdx.x] = largest;
}

}  // namespace

void score(const Step& step, void* stream) {
  launch_for_dtype(step.params.shape.dtype, [&](auto type) {
    using T = decltype(type);
    launch(step.sketch() ? score_kernel<T, true> : score_kernel<T, false>,
           {.name = "score",
            .grid = dim3(static_cast<unsigned>(step.plan.score.blocks())),
            .block = dim3(kThreads),
            .shared_bytes = static_cast<size_t>(step.plan.score_shared),
            .stream = static_cast<Stream>(stream),
            .overlap = step.plan.overlap && step.query != nullptr},
           step);
  });
}

void finish_maxima(const Step& step, void* stream) {
  launch(finish_maxima_kernel,
         {.name = "finish_maxima",
          .grid = dim3(static_cast<unsigned>(step.plan.weigh.units)),
          .block = dim3(kThreads),
          .stream = static_cast<Stream>(stream),
          .overlap = step.plan.overlap},
         step);
}

}  // namespace santa::cuda
