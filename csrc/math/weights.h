#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace santa {

// Weights and inclusion probabilities are integers in units of 2^-30. Sums of integers are exact in any
// order, so prefixes over a million rows are unbiased and do not depend on how the work was cut.
constexpr int kWeightBits = 30;
constexpr uint32_t kWeightOne = 1u << kWeightBits;
constexpr float kWeightScale = 1073741824.0f;  // 2^30

// Log-sum-exp of a head from its largest score and the sum of its integer weights.
SANTA_HD double log_sum_exp(float maximum, uint64_t total) {
  return static_cast<double>(maximum) + std::log(static_cast<double>(total) / kWeightOne);
}

// Log-sum-exp of a head's rows and its sink together; `lse` is finite, a sink of -inf adds nothing.
SANTA_HD double add_sink(double lse, double sink) {
  const double larger = lse > sink ? lse : sink;
  return larger + std::log1p(std::exp((lse > sink ? sink : lse) - larger));
}

// Share of a head's softmax that lies on its rows; the rest lies on the sink, which has no value. Sampling the
// rows alone and multiplying by their share has less variance than drawing the sink among them.
SANTA_HD double share_of_rows(double lse, double sink) { return 1.0 / (1.0 + std::exp(sink - lse)); }

// The reciprocal total by which a head's weights become probabilities when rows are sized for the shared
// sample; `row_mass` is its share_of_rows. 0 leaves the head out.
SANTA_HD float reciprocal_total(uint64_t total, float row_mass) {
  return total == 0 ? 0.0f : 1.0f / static_cast<float>(total) * row_mass;
}

// Horvitz-Thompson coefficient p / pi of a sampled row. In fp64 and rounded once, so that every backend
// has the same bits.
SANTA_HD float horvitz_thompson(uint32_t weight, uint64_t total, float row_mass, uint32_t inclusion) {
  if (weight == 0) return 0.0f;
  const double p = static_cast<double>(weight) / static_cast<double>(total) * static_cast<double>(row_mass);
  return static_cast<float>(p * kWeightOne / static_cast<double>(inclusion));
}

// Coefficient of a row that a head's own sample holds `count` times.
SANTA_HD float share_of_draws(int32_t count, int64_t samples, float row_mass) {
  return static_cast<float>(count) / static_cast<float>(samples) * row_mass;
}

}  // namespace santa
