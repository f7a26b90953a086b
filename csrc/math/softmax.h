#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "host_device.h"
#include "layout.h"

namespace santa {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// A head takes part in the softmax when its largest score is a number. -inf: nothing attended. NaN or +inf:
// softmax is NaN; such a head must neither draw nor weigh on the sample it shares with its group.
SANTA_HD bool is_live(float maximum) { return maximum - maximum == 0.0f; }

}  // namespace santa
