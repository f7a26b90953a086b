#include "gather.h"

#include <algorithm>

#include "../math/softmax.h"
#include "convert.h"

namespace santa::cpu {
Gatherer::Gatherer(const RowAddress& v, int64_t value_dim, Dtype dtype, const KernelTable& kernels)
    : v_(v), value_dim_(value_dim), value_stride_(pad(value_dim)), dtype_(dtype), kernels_(kernels) {}

void Gatherer::gather(int64_t b, int64_t kv_head, const int64_t* rows, int64_t n, const float* coefficients,
                      int64_t coefficient_stride, int64_t heads) {
  offsets_.resize(n);
  chunks_.resize(n + 1);
  for (int64_t i = 0; i < n; ++i) {
    offsets_[i] = v_.offset(b, kv_head, rows[i]);
    chunks_[i] = rows[i] / kChunkRows;
  }
  chunks_[n] = -1;
  out_.resize(heads * value_stride_);
  const GatherTile tile = {.values = v_.data,
                           .offsets = offsets_.data(),
                           .chunks = chunks_.data(),
                           .rows = n,
                           .value_dim = value_dim_,
                           .weights = coefficients,
                           .weights_stride = coefficient_stride,
                           .heads = heads,
                           .sums = out_.data(),
                           .sums_stride = value_stride_};
  kernels_.gather[static_cast<int>(dtype_)](tile);
  for (int64_t h = 0; h < heads; ++h) {
    bool nan = false;
    for (int64_t d = 0; d < value_dim_; ++d) nan |= sums(h)[d] != sums(h)[d];
    if (nan) gather_used(tile, h);
  }
}

// One head once more, over the rows that it uses: only 0 * NaN from the others can be undone so.
void Gatherer::gather_used(GatherTile tile, int64_t head) {
  const float* coefficients = tile.weights + head * tile.weights_stride;
  std::vector<int64_t> offsets;
  std::vector<int64_t> chunks;
  std::vector<float> weights;
  for (int64_t i = 0; i < tile.rows; ++i) {
    if (coefficients[i] == 0.0f) continue;
    offsets.push_back(tile.offsets[i]);
    chunks.push_back(tile.chunks[i]);
    weights.push_back(coefficients[i]);
  }
  chunks.push_back(-1);
  tile.offsets = offsets.data();
  tile.chunks = chunks.data();
  tile.rows = static_cast<int64_t>(offsets.size());
  tile.weights = weights.data();
  tile.heads = 1;
  tile.sums += head * tile.sums_stride;
  kernels_.gather[static_cast<int>(dtype_)](tile);
}

void Gatherer::load_row(int64_t b, int64_t kv_head, int64_t row, double factor) {
  const int64_t offset = v_.offset(b, kv_head, row);
  with_dtype(dtype_, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(v_.data) + offset;
    for (int64_t d = 0; d < value_dim_; ++d) row_[d] = factor * static_cast<double>(to_float(from[d]));
  });
}

double Gatherer::squared_error(int64_t b, int64_t kv_head, const int64_t* rows, int64_t n,
                               const float* coefficients, const double* slack) {
  // A shared sample may hold rows that this head does not attend. They are draws of the design all the same, with
  // a contribution of zero; their V is not looked at.
  const auto load = [&](int64_t i) {
    if (coefficients[i] != 0.0f) return load_row(b, kv_head, rows[i], coefficients[i]);
    std::fill(row_.begin(), row_.end(), 0.0);
  };
  double total = 0.0;
  row_.resize(value_dim_);
  mean_.assign(value_dim_, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    if (slack[i] == 0.0) continue;
    load(i);
    total += slack[i];
    for (int64_t d = 0; d < value_dim_; ++d) mean_[d] += slack[i] * row_[d];
  }
  if (total == 0.0) return 0.0;
  for (double& x : mean_) x /= total;
  double error = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    if (slack[i] == 0.0) continue;
    load(i);
    double distance = 0.0;
    for (int64_t d = 0; d < value_dim_; ++d) distance += (row_[d] - mean_[d]) * (row_[d] - mean_[d]);
    error += slack[i] * distance;
  }
  return error;
}

}  // namespace santa::cpu
