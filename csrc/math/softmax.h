#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "host_device.h"

namespace santa {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// A head takes part in the softmax when its largest score is a number. -inf: nothing attended. NaN or +inf:
// softmax is NaN; such a head must neither draw nor weigh on the sample it shares with its group.
SANTA_HD bool is_live(float maximum) { return maximum - maximum == 0.0f; }

// Rows are cut into chunks of this many, counted from row 0 whatever the batch, the capacity or the device:
// the sums below a chunk are fp32 and those between chunks fp64, so the cut decides the bits of the result.
constexpr int64_t kChunkRows = 256;

SANTA_HD int64_t chunk_count(int64_t rows) { return (rows + kChunkRows - 1) / kChunkRows; }

}  // namespace santa
