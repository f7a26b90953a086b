#pragma once

#include <vector>

#include "../math/draws.h"
#include "../params.h"

namespace santa::cpu {

// What rows are drawn from: integer weights of one head, or integer inclusion probabilities of one group, with the
// sums that let a draw skip what it does not need.
struct Density {
  const uint32_t* values;      // [chunks * kChunkRows]; zero to the end of the last row's block, then undefined
  const uint64_t* block_sums;  // [chunks * kChunkRows / kBlockRows]
  const uint64_t* chunk_sums;  // [chunks]
  int64_t chunks;

  uint64_t total() const;
};

// The rows drawn for one head or group, ascending and distinct.
struct Sample {
  std::vector<int64_t> rows;
  std::vector<int32_t> counts;       // multiplicity; for the shared method the inclusion in units of 2^-30
  std::vector<double> slack;         // how uncertain each row's selection was; see draw(). Empty unless asked for
  std::vector<uint64_t> thresholds;  // scratch of the multinomial method

  void clear();
};

// Draws rows into `sample`, which it clears first.
//
// With `want_slack`, slack[i] is the factor a of row i in the estimate sum a |y - b|^2 of the squared error, where
// y is the row's contribution and b the a-weighted mean (design-based variance of a fixed-size sample):
//   shared       1 - pi                           (pi the inclusion probability)
//   systematic   1 - f when the row was drawn once more than floor(S p), else 0   (f = S p - floor(S p))
//   stratified   sum over the strata that drew the row of 1 - (share of the stratum that the row covers)
//   multinomial  c S / (S - 1)                    (unbiased variance of a mean of S independent draws)
void draw(Method method, int64_t samples, const Density& density, const DrawKey& key, bool want_slack,
          Sample* sample);

}  // namespace santa::cpu
