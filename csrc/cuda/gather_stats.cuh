#pragma once

#include "../math/weights.h"
#include "step.cuh"

// What was read, and the estimated squared error, from the rows of a sample.
namespace santa::cuda {

// One list of drawn rows.
class DrawnRows {
 public:
  int64_t size;

  __device__ DrawnRows(const Step& step, int64_t list)
      : size(size_of(step, list)),
        rows_(step.rows + list * step.plan.capacity),
        last_(step.params.shape.rows - 1),
        b_(list * step.heads_per_list / step.params.shape.query_heads),
        kv_(list * step.heads_per_list % step.params.shape.query_heads / step.params.shape.group_size()) {}

  // Cut to the rows that V has: a list may be a user's, and nothing on the host may look.
  __device__ int64_t row(int64_t i) const { return max(min(rows_[i], last_), int64_t{0}); }

  __device__ int64_t offset(const Step& step, int64_t i) const { return step.params.v.offset(b_, kv_, row(i)); }

  __device__ static int64_t size_of(const Step& step, int64_t list) {
    if (step.params.shape.rows == 0) return 0;
    return max(min(static_cast<int64_t>(step.num_rows[list]), step.plan.capacity), int64_t{0});
  }

 private:
  const int64_t* const rows_;
  const int64_t last_;
  const int64_t b_;
  const int64_t kv_;
};

// Estimate of |out - exact|^2 of one head: sum_i a_i |y_i - mean|^2 with y_i what row i contributes, a_i its slack
// and the a-weighted mean of the y_i. A row that the head does not attend contributes 0; its V is not looked at.
// Two passes over the rows, features by lanes. A warp calls.
template <class T>
__device__ void write_squared_error(const Step& step, const DrawnRows& drawn, int64_t head) {
  const DecodeParams& params = step.params;
  const bool shared = params.draw.method == Method::kShared;
  const auto* values = static_cast<const T*>(params.v.data);
  const int64_t list = head / step.heads_per_list;
  const double* slack = step.slack + list * step.plan.capacity;
  const float* coefficients = step.coefficients + head * step.plan.capacity;
  const float one_draw = share_of_draws(1, params.draw.samples, step.row_mass[head]);
  double total = 0.0;
  for (int64_t i = 0; i < drawn.size; ++i) total += slack[i];
  double error = 0.0;
  for (int64_t d = lane_id(); d < params.shape.value_dim && total != 0.0; d += kWarpLanes) {
    const auto contribution = [&](int64_t i) {
      const float coefficient = shared ? coefficients[i] : one_draw;
      if (coefficient == 0.0f) return 0.0;
      return static_cast<double>(coefficient) * static_cast<double>(to_float(values[drawn.offset(step, i) + d]));
    };
    double mean = 0.0;
    for (int64_t i = 0; i < drawn.size; ++i) {
      if (slack[i] != 0.0) mean += slack[i] * contribution(i);
    }
    mean /= total;
    for (int64_t i = 0; i < drawn.size; ++i) {
      if (slack[i] == 0.0) continue;
      const double distance = contribution(i) - mean;
      error += slack[i] * distance * distance;
    }
  }
  error = warp_sum(error);
  if (lane_id() != 0) return;
  const float maximum = step.maxima[head];
  const bool undefined = !is_live(maximum) && maximum != kNegativeInfinity;
  params.squared_error[head] = static_cast<float>(undefined ? degenerate_value(maximum) : error);
}

// Whether a list of ascending rows holds one.
__device__ inline bool holds(const int64_t* rows, int64_t size, int64_t row) {
  int64_t low = 0;
  int64_t high = size;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (rows[middle] < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < size && rows[low] == row;
}

// Distinct rows of V that a group has read, and its rows of K. Lists of one group count what no list before them
// holds. The block of a list calls.
__device__ inline void count_rows(const Step& step, const DrawnRows& drawn, int64_t list) {
  const int64_t group_size = step.params.shape.group_size();
  const int64_t head = list * step.heads_per_list;
  const int64_t group = head / group_size;
  const int64_t first_list = group * group_size / step.heads_per_list;
  int64_t fresh = 0;
  for (int64_t i = threadIdx.x; i < drawn.size; i += kThreads) {
    bool known = false;
    for (int64_t other = first_list; other < list && !known; ++other) {
      known = holds(step.rows + other * step.plan.capacity, DrawnRows::size_of(step, other), drawn.row(i));
    }
    fresh += known ? 0 : 1;
  }
  fresh = block_sum<kThreads>(fresh);
  if (threadIdx.x == 0) {
    atomic_add(reinterpret_cast<uint64_t*>(step.params.value_rows + group), static_cast<uint64_t>(fresh));
  }
  if (list != first_list) return;
  count_keys<kThreads>(step, group);
}

}  // namespace santa::cuda
