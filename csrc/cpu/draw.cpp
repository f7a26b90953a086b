#include "draw.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../math/softmax.h"
#include "kernels.h"

namespace santa::cpu {
namespace {

// Walks a density from its first row on; thresholds must not descend.
class Cursor {
 public:
  explicit Cursor(const Density& density) : density_(density) {}

  // Moves on to the row with prefix before it <= threshold < prefix with it. The threshold is below the total and
  // not below row_end().
  void advance(uint64_t threshold) {
    if (threshold >= chunk_start_ + density_.chunk_sums[chunk_]) {
      do {
        chunk_start_ += density_.chunk_sums[chunk_++];
      } while (threshold >= chunk_start_ + density_.chunk_sums[chunk_]);
      enter_block(chunk_ * kBlocksPerChunk, chunk_start_);
    }
    if (threshold >= block_start_ + density_.block_sums[block_]) {
      uint64_t start = block_start_;
      int64_t block = block_;
      do {
        start += density_.block_sums[block++];
      } while (threshold >= start + density_.block_sums[block]);
      enter_block(block, start);
    }
    while (threshold >= end_) end_ += density_.values[++row_];
  }

  int64_t row() const { return row_; }
  uint64_t row_start() const { return end_ - density_.values[row_]; }
  uint64_t row_end() const { return end_; }

 private:
  void enter_block(int64_t block, uint64_t start) {
    block_ = block;
    block_start_ = start;
    row_ = block * kBlockRows - 1;
    end_ = start;
  }

  const Density& density_;
  int64_t chunk_ = 0;
  uint64_t chunk_start_ = 0;
  int64_t block_ = 0;
  uint64_t block_start_ = 0;
  int64_t row_ = -1;
  uint64_t end_ = 0;  // prefix sum with `row_`
};

// Collects the row of each threshold, one entry for all thresholds that fall on it.
class Collector {
 public:
  Collector(const Density& density, Sample* sample) : cursor_(density), sample_(sample) {}

  // Returns whether the row is a new one.
  bool add(uint64_t threshold) {
    if (threshold < cursor_.row_end()) {
      ++sample_->counts.back();
      return false;
    }
    cursor_.advance(threshold);
    sample_->rows.push_back(cursor_.row());
    sample_->counts.push_back(1);
    return true;
  }

  // How many thresholds fall on the row that was added last.
  void set_count(int32_t count) { sample_->counts.back() = count; }

  const Cursor& cursor() const { return cursor_; }

 private:
  Cursor cursor_;
  Sample* sample_;
};

void draw_multinomial(int64_t samples, uint64_t total, const DrawKey& key, Collector* collector, Sample* sample) {
  std::vector<uint64_t>& thresholds = sample->thresholds;
  thresholds.resize(samples);
  for (int64_t m = 0; m < samples; ++m) {
    thresholds[m] = multiply_high(random64(key, static_cast<uint32_t>(m)), total);
  }
  std::sort(thresholds.begin(), thresholds.end());
  for (const uint64_t threshold : thresholds) collector->add(threshold);
}

// 1 - the share of stratum m that the cursor's row covers.
double uncovered(const Cursor& cursor, int64_t m, int64_t samples, uint64_t total) {
  const double per_mass = static_cast<double>(samples) / static_cast<double>(total);
  const double from = std::max(static_cast<double>(cursor.row_start()) * per_mass - static_cast<double>(m), 0.0);
  const double to = std::min(static_cast<double>(cursor.row_end()) * per_mass - static_cast<double>(m), 1.0);
  return std::clamp(1.0 - (to - from), 0.0, 1.0);
}

void draw_stratified(int64_t samples, uint64_t total, const DrawKey& key, bool want_slack, Collector* collector,
                     Sample* sample) {
  for (int64_t m = 0; m < samples; ++m) {
    const uint64_t u = multiply_high(random64(key, static_cast<uint32_t>(m)), total);
    const bool fresh = collector->add(stratum_threshold(m, samples, total, u));
    if (!want_slack) continue;
    if (fresh) sample->slack.push_back(0.0);
    sample->slack.back() += uncovered(collector->cursor(), m, samples, total);
  }
}

// Thresholds are those of stratum_threshold, each from the one before: divisions would take most of the time.
void draw_systematic(uint64_t samples, uint64_t total, const DrawKey& key, Collector* collector) {
  const uint64_t u = multiply_high(random64(key, 0), total);
  const uint64_t step = total / samples;
  const uint64_t step_rest = total % samples;
  uint64_t threshold = u / samples;
  uint64_t rest = u % samples;
  for (uint64_t m = 0; m < samples;) {
    collector->add(threshold);
    const uint64_t end = collector->cursor().row_end();
    int32_t count = 0;
    do {
      rest += step_rest;
      const bool carry = rest >= samples;
      threshold += step + (carry ? 1 : 0);
      rest -= carry ? samples : 0;
      ++count;
    } while (++m < samples && threshold < end);
    collector->set_count(count);
  }
}

void draw_shared(uint64_t total, const DrawKey& key, Collector* collector) {
  const uint64_t bits = random64(key, 0);
  for (uint64_t k = 0;; ++k) {
    const uint64_t threshold = shared_threshold(k, bits);
    if (threshold >= total) return;
    collector->add(threshold);
  }
}

double slack_of(Method method, int64_t samples, const Density& density, uint64_t total, const Sample& sample,
                size_t i) {
  if (method == Method::kShared) return 1.0 - static_cast<double>(sample.counts[i]) / kWeightOne;
  const double s = static_cast<double>(samples);
  if (method == Method::kMultinomial) {
    if (samples == 1) return std::numeric_limits<double>::quiet_NaN();  // one draw says nothing of its variance
    return sample.counts[i] * s / (s - 1.0);
  }
  const double expected = s * density.values[sample.rows[i]] / static_cast<double>(total);
  const double whole = std::floor(expected);
  return sample.counts[i] > whole ? 1.0 - (expected - whole) : 0.0;
}

}  // namespace

uint64_t Density::total() const {
  uint64_t sum = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += chunk_sums[chunk];
  return sum;
}

void Sample::clear() {
  rows.clear();
  counts.clear();
  slack.clear();
}

void draw(Method method, int64_t samples, const Density& density, const DrawKey& key, bool want_slack,
          Sample* sample) {
  sample->clear();
  const uint64_t total = density.total();
  if (total == 0) return;
  Collector collector(density, sample);
  switch (method) {
    case Method::kMultinomial:
      draw_multinomial(samples, total, key, &collector, sample);
      break;
    case Method::kStratified:
      draw_stratified(samples, total, key, want_slack, &collector, sample);
      break;
    case Method::kSystematic:
      draw_systematic(static_cast<uint64_t>(samples), total, key, &collector);
      break;
    case Method::kShared:
      draw_shared(total, key, &collector);
      for (size_t i = 0; i < sample->rows.size(); ++i) {
        sample->counts[i] = static_cast<int32_t>(density.values[sample->rows[i]]);
      }
      break;
    case Method::kDense:
      break;
  }
  if (want_slack && method != Method::kStratified) {
    for (size_t i = 0; i < sample->rows.size(); ++i) {
      sample->slack.push_back(slack_of(method, samples, density, total, *sample, i));
    }
  }
}

}  // namespace santa::cpu
