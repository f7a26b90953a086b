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

// The reciprocal total by which a head's weights become probabilities when rows are sized for the shared
// sample. 0 leaves the head out.
SANTA_HD float reciprocal_total(uint64_t total) { return total == 0 ? 0.0f : 1.0f / static_cast<float>(total); }

// Horvitz-Thompson coefficient p / pi of a sampled row. In fp64 and rounded once, so that every backend
// has the same bits.
SANTA_HD float horvitz_thompson(uint32_t weight, uint64_t total, uint32_t inclusion) {
  if (weight == 0) return 0.0f;
  const double p = static_cast<double>(weight) / static_cast<double>(total);
  return static_cast<float>(p * kWeightOne / static_cast<double>(inclusion));
}

}  // namespace santa
