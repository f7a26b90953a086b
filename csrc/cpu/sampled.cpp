#include <set>

#include "../math/draws.h"
#include "../math/weights.h"
#include "decode.h"
#include "draw.h"
#include "gather.h"
#include "score.h"
#include "stage_timer.h"
#include "step.h"

namespace santa::cpu {
namespace {

// What a thread needs to take groups through the stages score, weigh, include, draw and gather.
class SampledWorker {
 public:
  explicit SampledWorker(const Step& step)
      : step_(step),
        shared_(step.params.draw.method == Method::kShared),
        stats_(step.params.value_rows != nullptr),
        scorer_(step, false),
        gatherer_(step.params.v, step.shape.value_dim, step.shape.dtype, step.kernels),
        reciprocal_(step.group_size()) {}

  void score(const ChunkTask& task, const ChunkTask* next) {
    scorer_.score(task, next, step_.scores(step_.first_head(task.group), task.chunk), step_.scores_stride());
  }

  // All that follows the scores of a group.
  void finish(int64_t group) {
    step_.finish_maxima(group);
    for (int64_t chunk = 0; chunk < step_.chunks_of(group); ++chunk) weigh({group, chunk});
    finish_totals(group);
    if (shared_) {
      for (int64_t chunk = 0; chunk < step_.chunks_of(group); ++chunk) include({group, chunk});
    }
    sample(group);
  }

  // Integer weights, in the place of the scores. Needs the maxima of the whole sequence.
  void weigh(const ChunkTask& task) const {
    const StageTimer timer(Stage::kSoftmax);
    const int64_t rows = step_.padded_rows(task.group, task.chunk);
    for (int64_t head = step_.first_head(task.group); head < step_.first_head(task.group + 1); ++head) {
      const float maximum = step_.maximum(head);
      float* scores = step_.scores(head, task.chunk);
      uint32_t* weights = reinterpret_cast<uint32_t*>(scores);
      uint64_t* blocks = shared_ ? nullptr : block_sums(head, task.chunk);
      uint64_t sum = 0;
      if (is_live(maximum)) {
        sum = step_.kernels.weigh(scores, rows, maximum, weights, blocks);
      } else {
        std::fill_n(weights, rows, 0u);
        if (blocks != nullptr) std::fill_n(blocks, rows / kBlockRows, uint64_t{0});
      }
      weight_sums(head)[task.chunk] = sum;
    }
  }

  void finish_totals(int64_t group) const {
    for (int64_t head = step_.first_head(group); head < step_.first_head(group + 1); ++head) {
      uint64_t total = 0;
      for (int64_t c = 0; c < step_.chunks_of(group); ++c) total += weight_sums(head)[c];
      totals()[head] = total;
      row_mass()[head] = 1.0f;
      if (!step_.sinks.present()) continue;
      const double sink = static_cast<double>(step_.sinks[head % step_.shape.query_heads]);
      row_mass()[head] = static_cast<float>(share_of_rows(lse_of_rows(head), sink));
    }
  }

  // Inclusion probabilities of the shared sample. Needs the totals.
  void include(const ChunkTask& task) {
    const StageTimer timer(Stage::kInclude);
    const int64_t head = step_.first_head(task.group);
    for (int64_t g = 0; g < step_.group_size(); ++g) {
      reciprocal_[g] = reciprocal_total(totals()[head + g], row_mass()[head + g]);
    }
    inclusion_sums(task.group)[task.chunk] =
        step_.kernels.include({.weights = reinterpret_cast<uint32_t*>(step_.scores(head, task.chunk)),
                               .weights_stride = step_.scores_stride(),
                               .reciprocal = reciprocal_.data(),
                               .heads = step_.group_size(),
                               .rows = step_.padded_rows(task.group, task.chunk),
                               .samples = static_cast<float>(step_.params.draw.samples),
                               .inclusion = inclusion(task.group) + task.chunk * kChunkRows,
                               .block_sums = block_sums(task.group, task.chunk)});
  }

  // Draws and gathers.
  void sample(int64_t group) {
    if (shared_) return sample_group(group);
    for (int64_t head = step_.first_head(group); head < step_.first_head(group + 1); ++head)
      sample_head(group, head);
    if (stats_) step_.params.value_rows[group] = static_cast<int64_t>(read_.size());
    read_.clear();
  }

  // Draws and gathers for one head alone. Statistics need the whole group.
  void sample_head(int64_t group, int64_t head) {
    const DrawParams& params = step_.params.draw;
    const int64_t n = draw_rows(group, head,
                                {reinterpret_cast<uint32_t*>(step_.scores(head, 0)), block_sums(head, 0),
                                 weight_sums(head), step_.chunks_of(group)});
    coefficients_.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      coefficients_[i] = share_of_draws(sample_.counts[i], params.samples, row_mass()[head]);
    }
    gather_rows(group, n, 1);
    write(head, 0);
    if (!stats_) return;
    read_.insert(sample_.rows.begin(), sample_.rows.end());
    std::fill(coefficients_.begin(), coefficients_.end(), share_of_draws(1, params.samples, row_mass()[head]));
    write_error(group, head, 0);
  }

 private:
  void sample_group(int64_t group) {
    const int64_t first = step_.first_head(group);
    const int64_t n = draw_rows(
        group, first, {inclusion(group), block_sums(group, 0), inclusion_sums(group), step_.chunks_of(group)});
    coefficients_.resize(step_.group_size() * n);
    for (int64_t g = 0; g < step_.group_size(); ++g) {
      const uint32_t* weights = reinterpret_cast<uint32_t*>(step_.scores(first + g, 0));
      for (int64_t i = 0; i < n; ++i) {
        coefficients_[g * n + i] =
            horvitz_thompson(weights[sample_.rows[i]], totals()[first + g], row_mass()[first + g],
                             static_cast<uint32_t>(sample_.counts[i]));
      }
    }
    gather_rows(group, n, step_.group_size());
    for (int64_t g = 0; g < step_.group_size(); ++g) {
      write(first + g, g);
      if (stats_) write_error(group, first + g, g);
    }
    if (stats_) step_.params.value_rows[group] = n;
  }

  // Returns how many distinct rows were drawn.
  int64_t draw_rows(int64_t group, int64_t head, const Density& density) {
    const StageTimer timer(Stage::kDraw);
    const DrawParams& params = step_.params.draw;
    const int64_t b = step_.batch_of(group);
    const DrawKey key = {.seed = params.seed[b],
                         .position = params.position.data != nullptr ? params.position[b] : step_.extents[b],
                         .layer = params.layer,
                         .global_head = params.head_offset + head % step_.shape.query_heads};
    draw(params.method, params.samples, density, key, stats_, &sample_);
    return static_cast<int64_t>(sample_.rows.size());
  }

  void gather_rows(int64_t group, int64_t n, int64_t heads) {
    const StageTimer timer(Stage::kGather);
    gatherer_.gather(step_.batch_of(group), group % step_.shape.kv_heads, sample_.rows.data(), n,
                     coefficients_.data(), n, heads);
  }

  // Writes row `at` of what was gathered last.
  void write(int64_t head, int64_t at) const {
    step_.results.write(head, step_.maximum(head), gatherer_.sums(at), 1.0, lse_of_rows(head));
  }

  void write_error(int64_t group, int64_t head, int64_t at) {
    const int64_t n = static_cast<int64_t>(sample_.rows.size());
    const double error =
        gatherer_.squared_error(step_.batch_of(group), group % step_.shape.kv_heads, sample_.rows.data(), n,
                                coefficients_.data() + at * n, sample_.slack.data());
    step_.results.write_error(head, step_.maximum(head), error);
  }

  double lse_of_rows(int64_t head) const { return log_sum_exp(step_.maximum(head), totals()[head]); }

  uint64_t* totals() const { return step_.piece<uint64_t>(step_.plan.totals); }
  float* row_mass() const { return step_.piece<float>(step_.plan.row_mass); }
  uint64_t* weight_sums(int64_t head) const {
    return step_.piece<uint64_t>(step_.plan.weight_sums) + head * step_.plan.chunks;
  }
  uint32_t* inclusion(int64_t group) const {
    return step_.piece<uint32_t>(step_.plan.inclusion) + group * step_.scores_stride();
  }
  uint64_t* inclusion_sums(int64_t group) const {
    return step_.piece<uint64_t>(step_.plan.inclusion_sums) + group * step_.plan.chunks;
  }
  // Of a head, or of a group under the shared method.
  uint64_t* block_sums(int64_t index, int64_t chunk) const {
    return step_.piece<uint64_t>(step_.plan.block_sums) + (index * step_.plan.chunks + chunk) * kBlocksPerChunk;
  }

  const Step& step_;
  const bool shared_;
  const bool stats_;
  Scorer scorer_;
  Gatherer gatherer_;
  Sample sample_;
  std::vector<float> reciprocal_;    // [G]
  std::vector<float> coefficients_;  // [heads that share the sample, rows drawn]
  std::set<int64_t> read_;           // rows that some head of the group has drawn; with statistics
};

// The stages after the scores of groups that several threads scored: each is cut among threads once more.
void finish_together(const Step& step, const std::vector<int64_t>& groups, const ParallelFor& parallel_for) {
  const int64_t n = static_cast<int64_t>(groups.size());
  const bool shared = step.params.draw.method == Method::kShared;
  std::vector<ChunkTask> tasks;
  for (const int64_t group : groups) {
    step.finish_maxima(group);
    for (int64_t chunk = 0; chunk < step.chunks_of(group); ++chunk) tasks.push_back({group, chunk});
  }
  constexpr int64_t kGrain = 8;  // chunks
  const auto for_tasks = [&](void (*f)(SampledWorker&, const ChunkTask&)) {
    parallel_for(static_cast<int64_t>(tasks.size()), kGrain, [&](int64_t begin, int64_t end) {
      SampledWorker worker(step);
      for (int64_t at = begin; at < end; ++at) f(worker, tasks[at]);
    });
  };
  for_tasks([](SampledWorker& worker, const ChunkTask& task) { worker.weigh(task); });
  {
    const SampledWorker worker(step);
    for (const int64_t group : groups) worker.finish_totals(group);
  }
  if (shared) for_tasks([](SampledWorker& worker, const ChunkTask& task) { worker.include(task); });
  // A sample, or statistics of one, belong to a whole group; other heads are sampled each for itself.
  const int64_t units = shared || step.params.value_rows != nullptr ? 1 : step.group_size();
  parallel_for(n * units, 1, [&](int64_t begin, int64_t end) {
    SampledWorker worker(step);
    for (int64_t at = begin; at < end; ++at) {
      const int64_t group = groups[at / units];
      units == 1 ? worker.sample(group) : worker.sample_head(group, step.first_head(group) + at % units);
    }
  });
}

}  // namespace

void decode_sampled(const Step& step, const ParallelFor& parallel_for) {
  const std::vector<int64_t> rest = for_each_chunk(
      step, parallel_for, false, [&] { return SampledWorker(step); },
      [](SampledWorker& worker, const ChunkTask& task, const ChunkTask* next) { worker.score(task, next); },
      [](SampledWorker& worker, int64_t group) { worker.finish(group); });
  if (!rest.empty()) finish_together(step, rest, parallel_for);
}

}  // namespace santa::cpu
