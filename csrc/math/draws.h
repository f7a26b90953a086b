#pragma once

#include <cstdint>

#include "host_device.h"
#include "philox.h"
#include "weights.h"

namespace santa {

// Numbers above this have no exact fp32 form, which the inclusion probabilities need.
constexpr int64_t kMaxSamples = int64_t{1} << 24;

// High half of a 64 x 64-bit product: maps 64 random bits onto [0, bound) without a division.
SANTA_HD uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// Threshold m of `samples` over a total mass: floor((m * total + u) / samples) with u in [0, total), written
// so that no product passes 64 bits. The row with prefix before it <= threshold < prefix with it is drawn:
// half-open, hence a row of zero weight is never drawn and the last row of nonzero weight closes the range.
SANTA_HD uint64_t stratum_threshold(uint64_t m, uint64_t samples, uint64_t total, uint64_t u) {
  return m * (total / samples) + (m * (total % samples) + u) / samples;
}

// Thresholds of the shared sample lie 2^30 apart: a row of inclusion 2^30 is always taken, none is taken twice.
SANTA_HD uint64_t shared_threshold(uint64_t k, uint64_t bits) {
  const uint64_t offset = multiply_high(bits, kWeightOne);
  return (k + 1) * kWeightOne - 1 - offset;
}

// How many of them lie below a total: shared_threshold(k, bits) < total holds for k below this.
SANTA_HD uint64_t shared_count(uint64_t total, uint64_t bits) {
  return (total + multiply_high(bits, kWeightOne)) >> kWeightBits;
}

// Most rows that a draw can return, before the cut at the number of rows. Each query head's probabilities sum
// to 1, so `samples` times the root of summed squares stays below samples * group_size; the slack covers the
// rounding of fp32 probabilities (2^-22 relative, generously) and of stored inclusions.
SANTA_HD int64_t draw_capacity(bool shared, int64_t samples, int64_t group_size) {
  if (!shared) return samples;
  const int64_t expected = samples * group_size;
  return expected + (expected >> 20) + 2;
}

}  // namespace santa
