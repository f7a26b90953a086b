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

// Chance of a feature of a ternary query, from its size and the largest one (> 0).
SANTA_HD uint32_t feature_chance(float size, float largest) {
  return static_cast<uint32_t>(rint(static_cast<double>(size / largest) * kWeightOne));
}

// ---- One query head (the paper): the mean of several draws of -largest, 0 or largest.

// A block of random words serves four features: the word of feature d.
SANTA_HD uint32_t feature_word(const DrawKey& key, int64_t d) {
  const Philox4x32 bits = random_words(key, static_cast<uint32_t>(d / 4), Stream::kFeatures);
  // Chosen, not indexed: a GPU has no registers by number.
  const uint32_t low = d % 2 == 0 ? bits.word[0] : bits.word[1];
  const uint32_t high = d % 2 == 0 ? bits.word[2] : bits.word[3];
  return d % 4 < 2 ? low : high;
}

// How many of the draws take a feature. They are stratified: each compares a random number of its own slice of [0,
// 1) with the chance. Only the slice that holds the chance is in doubt, so that one random word decides.
SANTA_HD int64_t ternary_count(uint32_t word, int64_t draws, uint32_t chance) {
  const uint64_t expected = static_cast<uint64_t>(chance) * static_cast<uint64_t>(draws);
  const auto part = static_cast<uint32_t>(expected & (kWeightOne - 1));
  const bool in_doubt = (word >> (32 - kWeightBits)) < part;
  return static_cast<int64_t>(expected >> kWeightBits) + (in_doubt ? 1 : 0);
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

// Inclusion: the chance that any of so many stratified draws of the combined query takes the feature.
SANTA_HD uint32_t feature_inclusion(uint32_t chance, int64_t draws) {
  const uint64_t expected = static_cast<uint64_t>(chance) * static_cast<uint64_t>(draws);
  return expected < kWeightOne ? static_cast<uint32_t>(expected) : kWeightOne;
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
