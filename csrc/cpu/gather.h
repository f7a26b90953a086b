#pragma once

#include <vector>

#include "../params.h"
#include "kernels.h"

namespace santa::cpu {

// Weighted sums of chosen V rows: out[h] = sum_i coefficients[h][i] v[rows[i]].
// fp32 in row order within a chunk, fp64 between chunks, so that a split at a chunk changes no bit.
class Gatherer {
 public:
  Gatherer(const RowAddress& v, int64_t value_dim, Dtype dtype, const KernelTable& kernels);

  // Of one group: rows [n] ascending, coefficients [heads, coefficient_stride]. The result is read with sums().
  // A row with a coefficient of 0 is not used for that head, even where it holds NaN.
  void gather(int64_t b, int64_t kv_head, const int64_t* rows, int64_t n, const float* coefficients,
              int64_t coefficient_stride, int64_t heads);

  // Estimate of |out - exact|^2 of one head from the rows that it read: sum_i a_i |y_i - mean|^2 with
  // y_i = coefficients[i] v[rows[i]], a_i = slack[i] and the a-weighted mean of the y_i.
  double squared_error(int64_t b, int64_t kv_head, const int64_t* rows, int64_t n, const float* coefficients,
                       const double* slack);

  // [Dv] of a head of the last gather.
  const double* sums(int64_t head) const { return out_.data() + head * value_stride_; }

 private:
  void gather_used(GatherTile tile, int64_t head);
  void load_row(int64_t b, int64_t kv_head, int64_t row, double factor);

  RowAddress v_;
  int64_t value_dim_;
  int64_t value_stride_;
  Dtype dtype_;
  const KernelTable& kernels_;
  std::vector<int64_t> offsets_;
  std::vector<int64_t> chunks_;
  std::vector<double> out_;  // [heads, value_stride]
  std::vector<double> row_;
  std::vector<double> mean_;
};

// sums[h] += sum_i weights[h][i] v_i over one chunk, into zeroed sums. A head in whose sums a NaN appears is done
// again over the rows that `uses(h, i)` admits: only then can 0 * NaN from a row it does not use have entered.
template <class Uses>
void accumulate_used(const KernelTable& kernels, Dtype dtype, const AccumulateTile& tile, const Uses& uses) {
  kernels.accumulate[static_cast<int>(dtype)](tile);
  for (int64_t h = 0; h < tile.heads; ++h) {
    float* sums = tile.sums + h * tile.sums_stride;
    const float largest = kernels.maximum(sums, pad(tile.value_dim));
    if (largest == largest) continue;
    std::vector<int64_t> offsets;
    std::vector<float> weights;
    for (int64_t i = 0; i < tile.rows; ++i) {
      if (!uses(h, i)) continue;
      offsets.push_back(tile.offsets[i]);
      weights.push_back(tile.weights[h * tile.weights_stride + i]);
    }
    if (static_cast<int64_t>(offsets.size()) == tile.rows) continue;
    for (int64_t d = 0; d < pad(tile.value_dim); ++d) sums[d] = 0.0f;
    AccumulateTile again = tile;
    again.offsets = offsets.data();
    again.rows = static_cast<int64_t>(offsets.size());
    again.ahead = {};
    again.weights = weights.data();
    again.heads = 1;
    again.sums = sums;
    kernels.accumulate[static_cast<int>(dtype)](again);
  }
}

}  // namespace santa::cpu
