// Stage "draw": the rows of every sample, from integer weights (per-head methods) or inclusion probabilities
// (shared).
//
// Grid: one block per sample. Every draw is a threshold on the exact prefix sum of the density; a thread finds the
// row of a threshold on its own, through the prefix over chunks, the sums of blocks in a chunk and the rows of a
// block. Equal rows lie side by side afterwards, since thresholds ascend or, for multinomial draws, rows are
// sorted.
#include "../math/draws.h"
#include "kernels.h"
#include "scan.cuh"
#include "step.cuh"

namespace santa::cuda {
namespace {

// A density with everything that finding a row needs.
struct Density {
  const uint32_t* values;      // [chunks * kChunkRows]
  const uint64_t* block_sums;  // [chunks * kBlocksPerChunk]
  const uint64_t* chunk_sums;  // [chunks]
  uint64_t* prefix;            // [chunks]: mass before each chunk
  int64_t chunks;

  // The row with mass before it <= threshold < mass with it; threshold is below the total.
  __device__ int64_t find(uint64_t threshold) const {
    int64_t low = 0;  // the last chunk with prefix <= threshold: it is not empty
    int64_t high = chunks;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (prefix[middle] <= threshold ? low : high) = middle;
    }
    uint64_t mass = prefix[low];
    int64_t block = low * kBlocksPerChunk;
    while (mass + block_sums[block] <= threshold) mass += block_sums[block++];
    int64_t row = block * kBlockRows;
    while (mass + values[row] <= threshold) mass += values[row++];
    return row;
  }

  // Mass before a row.
  __device__ uint64_t before(int64_t row) const {
    uint64_t mass = prefix[row / kChunkRows];
    for (int64_t block = row / kChunkRows * kBlocksPerChunk; block < row / kBlockRows; ++block) {
      mass += block_sums[block];
    }
    for (int64_t i = row / kBlockRows * kBlockRows; i < row; ++i) mass += values[i];
    return mass;
  }
};

// Fills density.prefix and returns the total. Every thread calls.
__device__ uint64_t scan_chunks(const Density& density) {
  uint64_t total = 0;
  for (int64_t base = 0; base < density.chunks; base += kDrawThreads) {
    const int64_t c = base + threadIdx.x;
    const auto scan = block_scan<kDrawThreads>(c < density.chunks ? density.chunk_sums[c] : uint64_t{0});
    if (c < density.chunks) density.prefix[c] = total + scan.before;
    total += scan.total;
  }
  __syncthreads();
  return total;
}

// One past the last row of a sequence that any of its heads attends. Every thread calls.
__device__ int64_t attended_end(const Step& step, int64_t b) {
  const int64_t length = length_of(step.params, b);
  if (step.params.mask.kind == MaskParams::Kind::kNone) return length;
  const int64_t kv_heads = step.params.shape.kv_heads;
  const int64_t chunks = chunk_count(length);
  int64_t end = 0;
  for (int64_t i = threadIdx.x; i < kv_heads * chunks; i += kDrawThreads) {
    const int64_t at = (b * kv_heads + i / chunks) * step.plan.chunks + i % chunks;
    const int64_t last = step.attended[at * 2 + 1];
    if (last != 0) end = max(end, i % chunks * kChunkRows + last);
  }
  return block_max<kDrawThreads>(end);
}

// The thresholds of a sample: draw m of n.
class Thresholds {
 public:
  __device__ Thresholds(const DrawParams& params, const DrawKey& key, uint64_t total, int64_t most)
      : method_(params.method),
        samples_(static_cast<uint64_t>(params.samples)),
        key_(key),
        total_(total),
        bits_(random64(key, 0)),
        n_(method_ == Method::kShared ? min(static_cast<int64_t>(shared_count(total, bits_)), most)
           : total == 0               ? 0
                                      : params.samples) {}

  __device__ int64_t size() const { return n_; }

  __device__ uint64_t operator[](int64_t m) const {
    const auto index = static_cast<uint64_t>(m);
    if (method_ == Method::kShared) return shared_threshold(index, bits_);
    const uint64_t bits = method_ == Method::kSystematic ? bits_ : random64(key_, static_cast<uint32_t>(m));
    const uint64_t u = multiply_high(bits, total_);
    return method_ == Method::kMultinomial ? u : stratum_threshold(index, samples_, total_, u);
  }

 private:
  const Method method_;
  const uint64_t samples_;
  const DrawKey key_;
  const uint64_t total_;
  const uint64_t bits_;
  const int64_t n_;
};

// Sorts n numbers by merging ever longer runs, from one half of the memory to the other. Every thread calls,
// behind a barrier; returns the half that holds the result.
__device__ int32_t* sort(int32_t* from, int32_t* to, int64_t n) {
  for (int64_t width = 1; width < n; width *= 2) {
    for (int64_t i = threadIdx.x; i < n; i += kDrawThreads) {
      const int64_t run = i / width;
      // A number's place: its own in its run, and how many of the run beside it go before it.
      const int64_t begin = min((run ^ 1) * width, n);
      int64_t low = begin;
      int64_t high = min(begin + width, n);
      const int32_t x = from[i];
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const bool before = run % 2 == 0 ? from[middle] < x : from[middle] <= x;
        low = before ? middle + 1 : low;
        high = before ? high : middle;
      }
      to[run / 2 * 2 * width + (i - run * width) + (low - begin)] = x;
    }
    __syncthreads();
    int32_t* const sorted = to;
    to = from;
    from = sorted;
  }
  return from;
}

// How uncertain the selection of a row was: the factor of its term in the estimated squared error, for a row drawn
// `count` times, first by draw `begin`. The same as that of the CPU backend (csrc/cpu/draw.h).
__device__ double slack_of(const DrawParams& params, const Density& density, uint64_t total, int64_t row,
                           int64_t count, int64_t begin) {
  const auto samples = static_cast<double>(params.samples);
  const auto mass = static_cast<double>(density.values[row]);
  switch (params.method) {
    case Method::kShared:
      return 1.0 - mass / kWeightOne;
    case Method::kMultinomial:
      // One draw says nothing of its variance.
      return params.samples == 1 ? degenerate_value(0.0f) : static_cast<double>(count) * samples / (samples - 1.0);
    case Method::kStratified: {
      const double per_mass = samples / static_cast<double>(total);
      const uint64_t before = density.before(row);
      const double start = static_cast<double>(before) * per_mass;
      const double end = static_cast<double>(before + density.values[row]) * per_mass;
      double slack = 0.0;
      for (int64_t m = begin; m < begin + count; ++m) {  // 1 - the share of stratum m that the row covers
        const double from = max(start - static_cast<double>(m), 0.0);
        const double to = min(end - static_cast<double>(m), 1.0);
        slack += min(max(1.0 - (to - from), 0.0), 1.0);
      }
      return slack;
    }
    default: {
      const double expected = samples * mass / static_cast<double>(total);
      const double whole = floor(expected);
      return static_cast<double>(count) > whole ? 1.0 - (expected - whole) : 0.0;
    }
  }
}

__global__ void __launch_bounds__(kDrawThreads, 2) draw_kernel(const __grid_constant__ Step step) {
  wait_for_previous_grid();
  if (step.coefficients != nullptr) let_next_grid_start();  // or there is none of this step
  const DecodeParams& params = step.params;
  const LaunchPlan& plan = step.plan;
  const DecodeShape& shape = params.shape;
  const bool shared = params.draw.method == Method::kShared;
  const int64_t at = blockIdx.x;
  const int64_t heads = shared ? shape.group_size() : 1;  // that share the sample
  const int64_t first = at * heads;
  const int64_t b = first / shape.query_heads;
  const Density density = {
      .values = shared ? step.inclusion + at * plan.padded_rows : step.weights + at * step.weights_stride,
      .block_sums = step.block_sums + at * plan.chunks * kBlocksPerChunk,
      .chunk_sums = (shared ? step.inclusion_sums : step.weight_sums) + at * plan.chunks,
      .prefix = step.prefix + at * plan.chunks,
      .chunks = chunks_of(step, b)};
  const uint64_t total = scan_chunks(density);
  const DrawKey key = {
      .seed = params.draw.seed[b],
      .position = params.draw.position.data != nullptr ? params.draw.position[b] : attended_end(step, b),
      .layer = params.draw.layer,
      .global_head = params.draw.head_offset + first % shape.query_heads};

  // Draws.
  const bool sorted = params.draw.method != Method::kMultinomial;
  int32_t* drawn = step.drawn + at * plan.picks * (sorted ? 1 : 2);
  const Thresholds thresholds(params.draw, key, total, plan.picks);
  const int64_t n = thresholds.size();
  for (int64_t m = threadIdx.x; m < n; m += kDrawThreads) {
    drawn[m] = static_cast<int32_t>(density.find(thresholds[m]));
  }
  __syncthreads();
  if (!sorted) drawn = sort(drawn, drawn + plan.picks, n);

  // Distinct rows.
  int64_t* rows = step.rows + at * plan.capacity;
  int32_t* begins = step.begins + at * plan.capacity;
  int64_t distinct = 0;
  for (int64_t base = 0; base < n; base += kDrawThreads) {
    const int64_t m = base + threadIdx.x;
    const bool fresh = m < n && (m == 0 || drawn[m] != drawn[m - 1]);
    const auto scan = block_scan<kDrawThreads>(fresh ? 1u : 0u);
    const int64_t place = distinct + scan.before;
    if (fresh) {
      rows[place] = drawn[m];
      begins[place] = static_cast<int32_t>(m);
    }
    distinct += scan.total;
  }
  __syncthreads();

  // What each row brings along.
  if (threadIdx.x == 0) step.num_rows[at] = static_cast<int32_t>(distinct);
  int32_t* counts = step.counts + at * plan.capacity;
  float row_mass = 1.0f;
  if (!shared && step.coefficients != nullptr && is_live(step.maxima[first])) {
    const double lse = log_sum_exp(step.maxima[first], total);
    row_mass = static_cast<float>(row_share(params, first % shape.query_heads, lse));
  }
  for (int64_t i = threadIdx.x; i < distinct; i += kDrawThreads) {
    const int64_t end = i + 1 < distinct ? begins[i + 1] : n;
    const int64_t count = end - begins[i];
    counts[i] = static_cast<int32_t>(shared ? density.values[rows[i]] : count);
    if (step.slack != nullptr) {
      step.slack[at * plan.capacity + i] = slack_of(params.draw, density, total, rows[i], count, begins[i]);
    }
    if (step.coefficients == nullptr) continue;
    for (int64_t head = first; head < first + heads; ++head) {
      step.coefficients[head * plan.capacity + i] =
          shared ? horvitz_thompson(step.weights[head * step.weights_stride + rows[i]], step.totals[head],
                                    step.row_mass[head], density.values[rows[i]])
                 : share_of_draws(static_cast<int32_t>(count), params.draw.samples, row_mass);
    }
  }
  if (step.clear_rest) {
    for (int64_t i = distinct + threadIdx.x; i < plan.capacity; i += kDrawThreads) {
      rows[i] = 0;
      counts[i] = 0;
    }
  }
  if (step.coefficients == nullptr) return;
  for (int64_t head = first + threadIdx.x; head < first + heads; head += kDrawThreads) {
    const float maximum = step.maxima[head];
    const uint64_t mass = shared ? step.totals[head] : total;
    const double lse = is_live(maximum) ? log_sum_exp(maximum, mass) : 0.0;
    params.lse[head] = final_lse(params, head % shape.query_heads, maximum, lse);
    if (!shared) step.row_mass[head] = row_mass;
  }
}

}  // namespace

void draw(const Step& step, void* stream) {
  launch(draw_kernel,
         {.name = "draw",
          .grid = dim3(static_cast<unsigned>(step.plan.draw_heads)),
          .block = dim3(kDrawThreads),
          .stream = static_cast<Stream>(stream),
          .overlap = step.plan.overlap},
         step);
}

}  // namespace santa::cuda
