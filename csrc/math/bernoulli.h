#pragma once

#include <cmath>
#include <cstdint>

#include "draws.h"
#include "host_device.h"
#include "philox.h"
#include "weights.h"

namespace santa {

// Stochastic queries: q^ with E q^ = q, most of whose features are 0 and need not be read of the keys. Chances are
// integers in units of 2^-30 and products are IEEE's, none fused, so that every backend has the same bits.

constexpr int64_t kMaxBernoulliDraws = 1024;

// A query of which one feature is NaN or infinite has no largest one, and is NaN as a whole.
SANTA_HD bool is_finite(float x) { return x - x == 0.0f; }

// ---- One query head (the paper): the mean of several draws of -largest, 0 or largest.

// Chance that one draw takes a feature; `largest` > 0 is the head's largest |q|.
SANTA_HD uint32_t ternary_chance(float q, float largest) {
  return static_cast<uint32_t>(rint(static_cast<double>(std::fabs(q) / largest) * kWeightOne));
}

// How many of the draws take feature d. Four draws share a block of random words; fewer draws are the first ones.
SANTA_HD int64_t ternary_count(const DrawKey& key, int64_t draws, int64_t head_dim, int64_t d, uint32_t chance) {
  int64_t count = 0;
  for (int64_t first = 0; first < draws; first += 4) {
    const Philox4x32 bits = random_words(key, static_cast<uint32_t>(first / 4 * head_dim + d), Stream::kFeatures);
    for (int64_t j = 0; j < 4 && first + j < draws; ++j) {
      count += (bits.word[j] >> (32 - kWeightBits)) < chance ? 1 : 0;
    }
  }
  return count;
}

// The mean of the draws.
SANTA_HD float ternary_mean(float q, float largest, int64_t count, int64_t draws) {
  const double mean = static_cast<double>(largest) * static_cast<double>(count) / static_cast<double>(draws);
  return static_cast<float>(q < 0.0f ? 0.0 - mean : mean);
}

// ---- One draw for all heads of a group, from their combined size.

// The square of a feature's size, head after head; `largest` is that of all heads of the group that are finite.
SANTA_HD float add_feature_square(float square, float q, float largest) {
  const float share = q / largest;
  return square + share * share;
}

// Inclusion: the chance that so many ternary draws would touch the feature, from its share of the largest one.
SANTA_HD uint32_t feature_inclusion(float share, int64_t draws) {
  double missed = 1.0;  // (1 - share)^draws
  double power = 1.0 - static_cast<double>(share);
  for (int64_t n = draws; n != 0; n >>= 1) {
    if ((n & 1) != 0) missed *= power;
    power *= power;
  }
  return static_cast<uint32_t>(rint((1.0 - missed) * kWeightOne));
}

// Features are drawn as rows are: where the running sum of inclusions passes one of the shared thresholds.
// `before` is the sum before the feature; `bits` are random64(first head of the group, draw 0, kFeatures).
SANTA_HD bool takes_feature(uint64_t before, uint32_t inclusion, uint64_t bits) {
  return shared_count(before + inclusion, bits) != shared_count(before, bits);
}

// Horvitz-Thompson.
SANTA_HD float expanded_feature(float q, uint32_t inclusion) {
  return static_cast<float>(static_cast<double>(q) * kWeightOne / static_cast<double>(inclusion));
}

}  // namespace santa
