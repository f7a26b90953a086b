#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "../math/softmax.h"
#include "../math/weights.h"
#include "../params.h"
#include "convert.h"
#include "kernels.h"

namespace santa::cpu {

// The sinks of a step in fp32; -inf, hence without effect, where there are none. Without any, who asks present()
// first is spared the logarithms and exponentials that would come to nothing.
class Sinks {
 public:
  Sinks(const SinkParams& params, int64_t query_heads) {
    if (params.data == nullptr) return;
    logits_.resize(query_heads);
    with_dtype(params.dtype, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(params.data);
      for (int64_t h = 0; h < query_heads; ++h) logits_[h] = to_float(from[h * params.stride]);
    });
  }

  bool present() const { return !logits_.empty(); }

  float operator[](int64_t head) const { return present() ? logits_[head] : kNegativeInfinity; }

  // NaN or +inf among the logits of a softmax makes it NaN.
  bool undefined(int64_t head) const { return !((*this)[head] < std::numeric_limits<float>::infinity()); }

 private:
  std::vector<float> logits_;  // [Hq], or empty
};

// Writes what a step returns, head by head; `head` counts over the batch, [B, Hq].
class Results {
 public:
  Results(const DecodeParams& params, const Sinks& sinks, const KernelTable& kernels)
      : params_(params), sinks_(sinks), kernels_(kernels) {}

  // out = factor * values, [Dv]. `lse` is that of the rows; the values have their share of the softmax.
  void write(int64_t head, float maximum, const double* values, double factor, double lse) const {
    if (!is_live(maximum)) return write_degenerate(head, maximum);
    write_out(head, values, factor);
    params_.lse[head] = static_cast<float>(sinks_.present() ? add_sink(lse, sink(head)) : lse);
  }

  // Nothing attended: output 0, and the sink alone in the log-sum-exp. NaN or +inf among the logits: NaN, as
  // softmax gives.
  void write_degenerate(int64_t head, float maximum) const {
    const bool empty = maximum == kNegativeInfinity;
    const std::vector<double> values(params_.shape.value_dim,
                                     empty ? 0.0 : std::numeric_limits<double>::quiet_NaN());
    write_out(head, values.data(), 1.0);
    params_.lse[head] = empty ? static_cast<float>(sink(head)) : maximum;
  }

  void write_error(int64_t head, float maximum, double error) const {
    const bool undefined = !is_live(maximum) && maximum != kNegativeInfinity;
    params_.squared_error[head] = undefined ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(error);
  }

 private:
  double sink(int64_t head) const { return static_cast<double>(sinks_[head % params_.shape.query_heads]); }

  void write_out(int64_t head, const double* values, double factor) const {
    const int64_t row_bytes = params_.shape.value_dim * element_size(params_.shape.dtype);
    kernels_.narrow[static_cast<int>(params_.shape.dtype)](values, params_.shape.value_dim, factor,
                                                           static_cast<char*>(params_.out) + head * row_bytes);
  }

  const DecodeParams& params_;
  const Sinks& sinks_;
  const KernelTable& kernels_;
};

}  // namespace santa::cpu
