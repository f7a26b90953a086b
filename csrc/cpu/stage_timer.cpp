#include "stage_timer.h"

#include <sstream>

namespace santa::cpu {
namespace {

constexpr const char* kNames[kStages] = {"score", "softmax", "include", "draw", "gather", "accumulate", "merge"};

}  // namespace

std::string StageTimes::take() {
  std::ostringstream text;
  for (int stage = 0; stage < kStages; ++stage) {
    const int64_t spent = nanoseconds_[stage].exchange(0, std::memory_order_relaxed);
    text << (stage == 0 ? "" : " ") << kNames[stage] << "=" << static_cast<double>(spent) * 1e-9;
  }
  return text.str();
}

}  // namespace santa::cpu
