#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace santa::cpu {

enum class Stage : uint8_t { kScore, kSoftmax, kInclude, kDraw, kGather, kAccumulate, kMerge };
constexpr int kStages = 7;

// Time spent in each stage, summed over threads, while switched on: what a profile of a step needs and a sampling
// profiler cannot see through inlined kernels.
class StageTimes {
 public:
  static void set_enabled(bool enabled) { enabled_.store(enabled, std::memory_order_relaxed); }
  static bool enabled() { return enabled_.load(std::memory_order_relaxed); }
  static void add(Stage stage, int64_t nanoseconds) {
    of(stage).fetch_add(nanoseconds, std::memory_order_relaxed);
  }

  // "score=<seconds> softmax=<seconds> ...", and back to zero.
  static std::string take();

 private:
  static std::atomic<int64_t>& of(Stage stage) { return nanoseconds_[static_cast<int>(stage)]; }

  static inline std::atomic<bool> enabled_{false};
  static inline std::atomic<int64_t> nanoseconds_[kStages] = {};
};

// Adds the life of a scope to a stage.
class StageTimer {
 public:
  explicit StageTimer(Stage stage) : stage_(stage), on_(StageTimes::enabled()) {
    if (on_) start_ = std::chrono::steady_clock::now();
  }
  ~StageTimer() {
    if (on_) StageTimes::add(stage_, std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count());
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  const Stage stage_;
  const bool on_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace santa::cpu
