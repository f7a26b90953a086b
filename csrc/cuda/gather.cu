// Stage "gather": weighted sums [B, Hq, Dv] of the rows of V that were drawn.
//
// Grid: lists of rows, times blocks of 16 heads, times slices of at most 32 features, flattened; 128 threads. Rows
// of a slice stream through shared memory, so that many are under way at once, wherever they lie. A thread owns a
// feature of up to four heads: fp32 in row order within a chunk, fp64 between chunks.
#include "gather_stats.cuh"
#include "kernels.h"
#include "tile.cuh"

namespace santa::cuda {
namespace {

template <class T>
struct alignas(16) GatherStage {
  T values[kGatherRows * kSliceFeatures];  // [kGatherRows, slice_features]
  float coefficients[kGatherHeads][kGatherRows];
  bool ends_chunk[kGatherRows];  // the next row lies in another chunk, or there is none
};

template <class T, class Out>
class GatherBlock {
 public:
  __device__ GatherBlock(const Step& step, const DrawnRows& drawn, int64_t first_head, int heads,
                         int64_t first_feature)
      : step_(step),
        drawn_(drawn),
        first_head_(first_head),
        heads_(heads),
        first_feature_(first_feature),
        width_(static_cast<int>(step.plan.slice_features)),
        features_(static_cast<int>(min(step.params.shape.value_dim - first_feature, step.plan.slice_features))),
        feature_(static_cast<int>(threadIdx.x) % width_),
        slot_(static_cast<int>(threadIdx.x) / width_),
        slots_(kThreads / width_),
        stages_(shared_memory<struct Stages, GatherStage<T>[kGatherStages]>()) {}

  __device__ void run() const {
    float sum[kHeadTile];
    double total[kHeadTile];
#pragma unroll
    for (int h = 0; h < kHeadTile; ++h) {
      sum[h] = 0.0f;
      total[h] = 0.0;
    }
    pipeline<kGatherStages>((drawn_.size + kGatherRows - 1) / kGatherRows, [&](int64_t t) { issue(t); },
                            [&](int64_t t) { add_tile(t, sum, total); });
#pragma unroll
    for (int h = 0; h < kHeadTile; ++h) write(h, total[h]);
  }

 private:
  static constexpr int kGatherStages = gather_stages(sizeof(T));

  __device__ void issue(int64_t t) const {
    GatherStage<T>& stage = stages_[t % kGatherStages];
    const int64_t base = t * kGatherRows;
    const auto* values = static_cast<const T*>(step_.params.v.data);
    const TileShape tile = {.rows = kGatherRows,
                            .row_bytes = features_ * static_cast<int>(sizeof(T)),
                            .padded_bytes = width_ * static_cast<int>(sizeof(T)),
                            .row_stride = width_ * static_cast<int>(sizeof(T))};
    copy_rows<kThreads>(
        step_.value_access, tile, values, reinterpret_cast<unsigned char*>(stage.values),
        [&](int r) -> const unsigned char* {
          if (base + r >= drawn_.size) return nullptr;
          return reinterpret_cast<const unsigned char*>(values + drawn_.offset(step_, base + r) + first_feature_);
        });
    for (int i = static_cast<int>(threadIdx.x); i < heads_ * kGatherRows; i += kThreads) {
      const int h = i / kGatherRows;
      const int r = i % kGatherRows;
      const bool used = base + r < drawn_.size;
      const float* from = step_.coefficients + (first_head_ + h) * step_.plan.capacity;
      copy_async<4>(&stage.coefficients[h][r], used ? from + base + r : from, used ? 4 : 0);
    }
    for (int r = static_cast<int>(threadIdx.x); r < kGatherRows; r += kThreads) {
      const int64_t i = base + r;
      stage.ends_chunk[r] = i + 1 >= drawn_.size || drawn_.row(i) / kChunkRows != drawn_.row(i + 1) / kChunkRows;
    }
  }

  __device__ void add_tile(int64_t t, float* sum, double* total) const {
    const GatherStage<T>& stage = stages_[t % kGatherStages];
    const int rows = static_cast<int>(min(drawn_.size - t * kGatherRows, int64_t{kGatherRows}));
    if (slot_ >= heads_) return;
    for (int r = 0; r < rows; ++r) {
      const float value = to_float(stage.values[r * width_ + feature_]);
#pragma unroll
      for (int h = 0; h < kHeadTile; ++h) {
        if (slot_ + h * slots_ >= heads_) break;
        // A row with a coefficient of 0 is not used for this head, even where it holds NaN.
        const float coefficient = stage.coefficients[slot_ + h * slots_][r];
        if (coefficient != 0.0f) sum[h] = __fmaf_rn(coefficient, value, sum[h]);
      }
      if (!stage.ends_chunk[r]) continue;
#pragma unroll
      for (int h = 0; h < kHeadTile; ++h) {
        total[h] = __dadd_rn(total[h], static_cast<double>(sum[h]));
        sum[h] = 0.0f;
      }
    }
  }

  __device__ void write(int h, double total) const {
    const int64_t head = first_head_ + slot_ + h * slots_;
    if (slot_ + h * slots_ >= heads_ || feature_ >= features_) return;
    const float maximum = step_.maxima != nullptr ? step_.maxima[head] : 0.0f;
    const double value = is_live(maximum) ? total : degenerate_value(maximum);
    Out* to = static_cast<Out*>(step_.params.out) + head * step_.params.shape.value_dim + first_feature_;
    store_as(static_cast<float>(value), to + feature_);
  }

  const Step& step_;
  const DrawnRows& drawn_;
  const int64_t first_head_;  // over the batch
  const int heads_;
  const int64_t first_feature_;
  const int width_;
  const int features_;  // width_ of them, or what is left
  // This thread's feature of the slice, and its heads: slot_, slot_ + slots_ and so on.
  const int feature_;
  const int slot_;
  const int slots_;
  GatherStage<T> (&stages_)[kGatherStages];
};

template <class T, class Out>
__global__ void __launch_bounds__(kThreads, 4) gather_kernel(const __grid_constant__ Step step) {
  wait_for_previous_grid();
  const LaunchPlan& plan = step.plan;
  const int64_t slice = blockIdx.x % plan.value_slices;
  const int64_t head_block = blockIdx.x / plan.value_slices % plan.gather_head_blocks;
  const int64_t list = blockIdx.x / plan.value_slices / plan.gather_head_blocks;
  const DrawnRows drawn(step, list);
  const int64_t first = list * step.heads_per_list + head_block * kGatherHeads;
  const int heads = static_cast<int>(min(step.heads_per_list - head_block * kGatherHeads, int64_t{kGatherHeads}));
  GatherBlock<T, Out>(step, drawn, first, heads, slice * plan.slice_features).run();
  if (step.params.value_rows == nullptr || slice != 0) return;
  for (int h = static_cast<int>(threadIdx.x) / kWarpLanes; h < heads; h += kWarps) {
    write_squared_error<T>(step, drawn, first + h);
  }
  if (head_block == 0) count_rows(step, drawn, list);
}

}  // namespace

void gather(const Step& step, bool fp32, void* stream) {
  const LaunchPlan& plan = step.plan;
  launch_for_dtype(step.params.shape.dtype, [&](auto type) {
    using T = decltype(type);
    launch(fp32 ? gather_kernel<T, float> : gather_kernel<T, T>,
           {.name = "gather",
            .grid = dim3(static_cast<unsigned>(plan.draw_heads * plan.gather_head_blocks * plan.value_slices)),
            .block = dim3(kThreads),
            .stream = static_cast<Stream>(stream),
            .overlap = plan.overlap && !fp32},
           step);
  });
}

}  // namespace santa::cuda
