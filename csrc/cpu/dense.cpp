#include <cmath>

#include "decode.h"
#include "gather.h"
#include "score.h"
#include "stage_timer.h"
#include "step.h"

namespace santa::cpu {
namespace {

// What the chunks of a head leave: sums of exponentials and of weighted V rows, relative to the chunk's maximum.
class Partials {
 public:
  explicit Partials(const Step& step)
      : sums_(step.piece<float>(step.plan.partial_sums)),
        out_(step.piece<float>(step.plan.partial_out)),
        chunks_(step.plan.chunks),
        stride_(step.plan.value_stride) {}

  float& sum(int64_t head, int64_t chunk) const { return sums_[head * chunks_ + chunk]; }
  float* out(int64_t head, int64_t chunk) const { return out_ + (head * chunks_ + chunk) * stride_; }
  int64_t head_stride() const { return chunks_ * stride_; }

 private:
  float* const sums_;
  float* const out_;
  const int64_t chunks_;
  const int64_t stride_;
};

// Adds the chunks of a head in row order and in fp64.
class Merger {
 public:
  explicit Merger(const Step& step) : step_(step), partials_(step), sums_(step.plan.value_stride) {}

  void merge(int64_t head) {
    const StageTimer timer(Stage::kMerge);
    const float maximum = step_.maximum(head);
    if (!is_live(maximum)) return step_.results.write_degenerate(head, maximum);
    std::fill(sums_.begin(), sums_.end(), 0.0);
    double total = 0.0;
    for (int64_t c = 0; c < step_.chunks_of(head / step_.group_size()); ++c) {
      const float chunk_maximum = step_.chunk_maxima(head)[c];
      if (chunk_maximum == kNegativeInfinity) continue;
      const double factor = chunk_maximum == maximum
                                ? 1.0
                                : std::exp(static_cast<double>(chunk_maximum) - static_cast<double>(maximum));
      total += factor * static_cast<double>(partials_.sum(head, c));
      if (factor == 0.0) {
        add_nan(partials_.out(head, c));
      } else {
        step_.kernels.fold(partials_.out(head, c), step_.plan.value_stride, factor, sums_.data());
      }
    }
    const double lse = static_cast<double>(maximum) + std::log(total);
    double row_mass = 1.0;
    if (step_.sinks.present()) {
      row_mass = share_of_rows(lse, static_cast<double>(step_.sinks[head % step_.shape.query_heads]));
    }
    step_.results.write(head, maximum, sums_.data(), row_mass / total, lse);
  }

 private:
  // A chunk that counts for nothing adds nothing, not even where its fp32 sums ran to infinity; NaN it passes on.
  void add_nan(const float* partial) {
    for (int64_t d = 0; d < step_.shape.value_dim; ++d) {
      if (partial[d] != partial[d]) sums_[d] = static_cast<double>(partial[d]);
    }
  }

  const Step& step_;
  const Partials partials_;
  std::vector<double> sums_;  // [value_stride]
};

// What a thread needs for chunk after chunk: K and V of a chunk are read in one go.
class DenseWorker {
 public:
  explicit DenseWorker(const Step& step)
      : step_(step),
        mask_(step.params.mask),
        scorer_(step, true),
        partials_(step),
        merger_(step),
        scores_(step.group_size() * kChunkRows) {}

  void add_chunk(const ChunkTask& task, const ChunkTask* next) {
    const AttendedRows& attended = scorer_.score(task, next, scores_.data(), kChunkRows);
    exponentiate(task);
    if (attended.count != 0) accumulate(task, attended);
  }

  void merge(int64_t group) {
    step_.finish_maxima(group);
    for (int64_t head = step_.first_head(group); head < step_.first_head(group + 1); ++head) merger_.merge(head);
  }

 private:
  void exponentiate(const ChunkTask& task) {
    const StageTimer timer(Stage::kSoftmax);
    const int64_t rows = step_.padded_rows(task.group, task.chunk);
    for (int64_t g = 0; g < step_.group_size(); ++g) {
      const int64_t head = step_.first_head(task.group) + g;
      const float maximum = step_.chunk_maxima(head)[task.chunk];
      float* p = scores_.data() + g * kChunkRows;
      if (is_live(maximum)) {
        partials_.sum(head, task.chunk) = step_.kernels.exponentiate(p, rows, maximum);
      } else {
        partials_.sum(head, task.chunk) = 0.0f;
        std::fill_n(p, rows, 0.0f);
      }
      std::fill_n(partials_.out(head, task.chunk), step_.plan.value_stride, 0.0f);
    }
  }

  void accumulate(const ChunkTask& task, const AttendedRows& attended) {
    const StageTimer timer(Stage::kAccumulate);
    const float* weights = scores_.data();
    if (attended.count != attended.rows) {
      packed_.resize(scores_.size());
      for (int64_t g = 0; g < step_.group_size(); ++g) {
        for (int64_t i = 0; i < attended.count; ++i) {
          packed_[g * kChunkRows + i] = weights[g * kChunkRows + attended.local[i]];
        }
      }
      weights = packed_.data();
    }
    const int64_t head = step_.first_head(task.group);
    accumulate_used(step_.kernels, step_.shape.dtype,
                    {.values = step_.params.v.data,
                     .offsets = attended.value_offsets,
                     .rows = attended.count,
                     .value_dim = step_.shape.value_dim,
                     .weights = weights,
                     .weights_stride = kChunkRows,
                     .heads = step_.group_size(),
                     .sums = partials_.out(head, task.chunk),
                     .sums_stride = partials_.head_stride(),
                     .ahead = scorer_.keys_ahead()},
                    [&](int64_t g, int64_t i) {
                      return mask_.attends(step_.batch_of(task.group), head % step_.shape.query_heads + g,
                                           attended.row(i));
                    });
  }

  const Step& step_;
  const Mask mask_;
  Scorer scorer_;
  const Partials partials_;
  Merger merger_;
  std::vector<float> scores_;  // [G, kChunkRows], then exp(score - maximum of the chunk)
  std::vector<float> packed_;  // [G, kChunkRows]: those of the attended rows
};

}  // namespace

void decode_dense(const Step& step, const ParallelFor& parallel_for) {
  const std::vector<int64_t> rest = for_each_chunk(
      step, parallel_for, true, [&] { return DenseWorker(step); },
      [](DenseWorker& worker, const ChunkTask& task, const ChunkTask* next) { worker.add_chunk(task, next); },
      [](DenseWorker& worker, int64_t group) { worker.merge(group); });
  for (const int64_t group : rest) step.finish_maxima(group);
  const int64_t heads = step.group_size();
  parallel_for(static_cast<int64_t>(rest.size()) * heads, 1, [&](int64_t begin, int64_t end) {
    Merger merger(step);
    for (int64_t i = begin; i < end; ++i) merger.merge(step.first_head(rest[i / heads]) + i % heads);
  });
  if (step.params.value_rows == nullptr) return;
  for (int64_t group = 0; group < step.groups(); ++group) {
    step.params.value_rows[group] = step.params.keys_read[group].rows;
  }
  std::fill_n(step.params.squared_error, step.heads(), 0.0f);
}

}  // namespace santa::cpu
