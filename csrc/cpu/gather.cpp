#include "gather.h"

#include <algorithm>

#include "../math/softmax.h"
#include "convert.h"

namespace santa::cpu {
namespace {

constexpr int64_t kRowsAhead = 16;  // drawn rows that are asked for before they are used

}  // namespace

Gatherer::Gatherer(const RowAddress& v, int64_t value_dim, Dtype dtype, const KernelTable& kernels)
    : v_(v),
      value_dim_(value_dim),
      value_stride_(pad(value_dim)),
      dtype_(dtype),
      kernels_(kernels),
      row_(value_dim),
      mean_(value_dim) {}

void Gatherer::gather(int64_t b, int64_t kv_head, const int64_t* rows, int64_t n, const float* coefficients,
                      int64_t coefficient_stride, int64_t heads) {
  offsets_.resize(n);
  for (int64_t i = 0; i < n; ++i) offsets_[i] = v_.offset(b, kv_head, rows[i]);
  const auto ahead = [&](int64_t from, int64_t to) {
    return RowsAhead{.data = v_.data,
                     .offsets = offsets_.data() + std::min(from, n),
                     .rows = std::min(to, n) - std::min(from, n),
                     .row_bytes = value_dim_ * element_size(dtype_)};
  };
  for (int64_t i = 0; i < std::min(n, kRowsAhead); ++i) {
    const int64_t size = element_size(dtype_);
    const char* row = static_cast<const char*>(v_.data) + offsets_[i] * size;
    for (int64_t byte = 0; byte < value_dim_ * size; byte += 64) __builtin_prefetch(row + byte);
  }
  sums_.resize(heads * value_stride_);
  out_.assign(heads * value_stride_, 0.0);
  for (int64_t begin = 0; begin < n;) {
    const int64_t chunk = rows[begin] / kChunkRows;
    int64_t end = begin + 1;
    while (end < n && rows[end] / kChunkRows == chunk) ++end;
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    const AccumulateTile tile = {.values = v_.data,
                                 .offsets = offsets_.data() + begin,
                                 .rows = end - begin,
                                 .value_dim = value_dim_,
                                 .weights = coefficients + begin,
                                 .weights_stride = coefficient_stride,
                                 .heads = heads,
                                 .sums = sums_.data(),
                                 .sums_stride = value_stride_,
                                 .ahead = ahead(begin + kRowsAhead, end + kRowsAhead)};
    accumulate_used(kernels_, dtype_, tile,
                    [&](int64_t h, int64_t i) { return tile.weights[h * coefficient_stride + i] != 0.0f; });
    kernels_.fold(sums_.data(), heads * value_stride_, 1.0, out_.data());
    begin = end;
  }
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
  std::fill(mean_.begin(), mean_.end(), 0.0);
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
