#include "decode.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "../math/draws.h"
#include "../math/softmax.h"
#include "../math/weights.h"
#include "convert.h"
#include "denormals.h"
#include "draw.h"
#include "gather.h"
#include "mask.h"
#include "results.h"
#include "score.h"
#include "workspace.h"

namespace santa::cpu {
namespace {

constexpr int64_t kChunkGrain = 2;  // chunks below which a thread is not worth waking
constexpr int64_t kBlocksPerChunk = kChunkRows / kBlockRows;

// One step through its stages. Every stage is a loop over independent tasks; what passes between stages is exact
// (maxima, integers) or merged in row order, so that neither threads nor batch change a bit.
class Step {
 public:
  Step(const DecodeParams& params, Method method, const ParallelFor& parallel_for)
      : params_(params),
        shape_(params.shape),
        group_(params.shape.group_size()),
        kernels_(active_kernels()),
        sinks_(params.sinks, params.shape.query_heads),
        results_(params, sinks_),
        parallel_for_(parallel_for),
        extents_(attended_extents()),
        grid_(extents_, shape_.kv_heads),
        plan_(plan_cpu(shape_, method, *std::max_element(extents_.begin(), extents_.end()))),
        memory_(Workspace::of_this_thread().reserve(plan_.bytes)) {
    convert_query();
  }

  void run_dense() {
    score_chunks(true);
    finish_maxima();
    parallel_for_(shape_.batch * shape_.query_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) merge_dense(head);
    });
    if (params_.value_rows != nullptr) {
      const int64_t groups = shape_.batch * shape_.kv_heads;
      std::copy_n(params_.key_rows, groups, params_.value_rows);
      std::fill_n(params_.squared_error, shape_.batch * shape_.query_heads, 0.0f);
    }
  }

  void run_sampled() {
    const bool shared = params_.draw.method == Method::kShared;
    score_chunks(false);
    finish_maxima();
    parallel_for_(grid_.size(), kChunkGrain, [&](int64_t begin, int64_t end) {
      grid_.for_each(begin, end, [&](int64_t b, int64_t kv, int64_t chunk) { weigh_chunk(b, kv, chunk, shared); });
    });
    finish_totals();
    if (shared) {
      parallel_for_(grid_.size(), kChunkGrain, [&](int64_t begin, int64_t end) {
        std::vector<float> reciprocal(group_);
        grid_.for_each(begin, end, [&](int64_t b, int64_t kv, int64_t chunk) {
          include_chunk(b, kv, chunk, reciprocal.data());
        });
      });
    }
    const int64_t groups = shape_.batch * shape_.kv_heads;
    parallel_for_(groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) shared ? sample_group(at) : sample_heads(at);
    });
  }

  void run_score(float* scores, float* maxima) {
    score_chunks(false);
    finish_maxima();
    const int64_t heads = shape_.batch * shape_.query_heads;
    std::copy_n(piece<float>(plan_.maxima), heads, maxima);
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t extent = extents_[head / shape_.query_heads];
      float* to = scores + head * shape_.rows;
      std::copy_n(piece<float>(plan_.scores) + head * padded_rows(), extent, to);
      std::fill(to + extent, to + shape_.rows, kNegativeInfinity);
    }
  }

 private:
  template <class T>
  T* piece(int64_t offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  int64_t padded_rows() const { return plan_.chunks * kChunkRows; }
  int64_t head_index(int64_t b, int64_t kv, int64_t g) const { return b * shape_.query_heads + kv * group_ + g; }

  std::vector<int64_t> attended_extents() const {
    const Mask mask(params_.mask);
    std::vector<int64_t> extents(shape_.batch);
    for (int64_t b = 0; b < shape_.batch; ++b) {
      const int64_t rows = params_.seq_lens.data == nullptr ? shape_.rows : params_.seq_lens[b];
      extents[b] = mask.attended_end(b, shape_.query_heads, rows);
    }
    return extents;
  }

  void convert_query() {
    float* query = piece<float>(plan_.query);
    with_dtype(shape_.dtype, [&](auto type) {
      for (int64_t b = 0; b < shape_.batch; ++b) {
        for (int64_t h = 0; h < shape_.query_heads; ++h) {
          const auto* from = static_cast<const decltype(type)*>(params_.q) + b * params_.q_batch_stride +
                             h * params_.q_head_stride;
          float* to = query + head_index(b, 0, h) * plan_.query_stride;
          for (int64_t d = 0; d < shape_.head_dim; ++d) to[d] = to_float(from[d]);
          std::fill(to + shape_.head_dim, to + plan_.query_stride, 0.0f);
        }
      }
    });
  }

  // ---- score: one pass over K for all heads of a group; dense reads V in the same pass ----

  void score_chunks(bool dense) {
    const int64_t groups = shape_.batch * shape_.kv_heads;
    std::vector<std::atomic<int64_t>> key_rows(params_.key_rows != nullptr ? groups : 0);
    parallel_for_(grid_.size(), kChunkGrain, [&](int64_t begin, int64_t end) {
      Scorer scorer(params_, kernels_);
      ChunkBuffers buffers;
      if (dense) buffers.scores.resize(group_ * kChunkRows);
      grid_.for_each(begin, end, [&](int64_t b, int64_t kv, int64_t chunk) {
        const int64_t head = head_index(b, kv, 0);
        float* scores =
            dense ? buffers.scores.data() : piece<float>(plan_.scores) + head * padded_rows() + chunk * kChunkRows;
        const int64_t stride = dense ? kChunkRows : padded_rows();
        const AttendedRows& attended =
            scorer.score(b, kv, chunk, extents_[b], piece<float>(plan_.query) + head * plan_.query_stride,
                         plan_.query_stride, scores, stride);
        for (int64_t g = 0; g < group_; ++g) {
          piece<float>(plan_.chunk_maxima)[(head + g) * plan_.chunks + chunk] =
              kernels_.maximum(scores + g * stride, kChunkRows);
        }
        if (dense) accumulate_chunk(b, kv, chunk, attended, &buffers);
        if (!key_rows.empty()) key_rows[b * shape_.kv_heads + kv] += attended.count;
      });
    });
    std::copy(key_rows.begin(), key_rows.end(), params_.key_rows);
  }

  struct ChunkBuffers {
    std::vector<float> scores;   // [G, kChunkRows], then exp(score - maximum of the chunk)
    std::vector<float> weights;  // [G, kChunkRows]: those of the attended rows, packed
    int64_t offsets[kChunkRows];
  };

  void accumulate_chunk(int64_t b, int64_t kv, int64_t chunk, const AttendedRows& attended,
                        ChunkBuffers* buffers) {
    const int64_t head = head_index(b, kv, 0);
    float* out = piece<float>(plan_.partial_out) + (head * plan_.chunks + chunk) * plan_.value_stride;
    const int64_t out_stride = plan_.chunks * plan_.value_stride;
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t at = (head + g) * plan_.chunks + chunk;
      const float maximum = piece<float>(plan_.chunk_maxima)[at];
      float* p = buffers->scores.data() + g * kChunkRows;
      if (is_live(maximum)) {
        piece<float>(plan_.partial_sums)[at] = kernels_.exponentiate(p, kChunkRows, maximum);
      } else {
        piece<float>(plan_.partial_sums)[at] = 0.0f;
        std::fill_n(p, kChunkRows, 0.0f);
      }
      std::fill_n(out + g * out_stride, plan_.value_stride, 0.0f);
    }
    if (attended.count == 0) return;
    const float* weights = buffers->scores.data();
    if (attended.count != attended.rows) {
      buffers->weights.resize(group_ * kChunkRows);
      for (int64_t g = 0; g < group_; ++g) {
        for (int64_t i = 0; i < attended.count; ++i) {
          buffers->weights[g * kChunkRows + i] = weights[g * kChunkRows + attended.local[i]];
        }
      }
      weights = buffers->weights.data();
    }
    for (int64_t i = 0; i < attended.count; ++i) {
      buffers->offsets[i] = params_.v.offset(b, kv, attended.begin + attended.local[i]);
    }
    const Mask mask(params_.mask);
    accumulate_used(kernels_, shape_.dtype,
                    {.values = params_.v.data,
                     .offsets = buffers->offsets,
                     .rows = attended.count,
                     .listed = attended.count,
                     .value_dim = shape_.value_dim,
                     .weights = weights,
                     .weights_stride = kChunkRows,
                     .heads = group_,
                     .sums = out,
                     .sums_stride = out_stride},
                    [&](int64_t g, int64_t i) {
                      return mask.attends(b, kv * group_ + g, attended.begin + attended.local[i]);
                    });
  }

  // The largest score of each head over its whole sequence. Maxima are exact in any order.
  void finish_maxima() {
    for (int64_t head = 0; head < shape_.batch * shape_.query_heads; ++head) {
      const float* chunks = piece<float>(plan_.chunk_maxima) + head * plan_.chunks;
      float largest = kNegativeInfinity;
      const int64_t h = head % shape_.query_heads;
      if (sinks_.undefined(h)) {
        piece<float>(plan_.maxima)[head] = sinks_[h];
        continue;
      }
      for (int64_t c = 0; c < chunk_count(extents_[head / shape_.query_heads]); ++c) {
        if (chunks[c] > largest || chunks[c] != chunks[c]) largest = chunks[c];
        if (largest != largest) break;
      }
      piece<float>(plan_.maxima)[head] = largest;
    }
  }

  void merge_dense(int64_t head) {
    const float maximum = piece<float>(plan_.maxima)[head];
    if (!is_live(maximum)) return results_.write_degenerate(head, maximum);
    std::vector<double> sum(shape_.value_dim, 0.0);
    double total = 0.0;
    for (int64_t c = 0; c < chunk_count(extents_[head / shape_.query_heads]); ++c) {
      const int64_t at = head * plan_.chunks + c;
      const float chunk_maximum = piece<float>(plan_.chunk_maxima)[at];
      if (chunk_maximum == kNegativeInfinity) continue;
      const double factor = std::exp(static_cast<double>(chunk_maximum) - static_cast<double>(maximum));
      total += factor * static_cast<double>(piece<float>(plan_.partial_sums)[at]);
      const float* partial = piece<float>(plan_.partial_out) + at * plan_.value_stride;
      for (int64_t d = 0; d < shape_.value_dim; ++d) sum[d] += scaled(factor, partial[d]);
    }
    const double lse = static_cast<double>(maximum) + std::log(total);
    const double row_mass = share_of_rows(lse, static_cast<double>(sinks_[head % shape_.query_heads]));
    for (double& x : sum) x = x / total * row_mass;
    results_.write(head, maximum, sum.data(), lse);
  }

  // factor * partial, where a chunk that counts for nothing adds nothing: its fp32 sum may have run to infinity.
  static double scaled(double factor, float partial) {
    return factor == 0.0 && partial == partial ? 0.0 : factor * static_cast<double>(partial);
  }

  // ---- weigh, include ----

  void weigh_chunk(int64_t b, int64_t kv, int64_t chunk, bool shared) {
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t head = head_index(b, kv, g);
      const float maximum = piece<float>(plan_.maxima)[head];
      float* scores = piece<float>(plan_.scores) + head * padded_rows() + chunk * kChunkRows;
      uint32_t* weights = reinterpret_cast<uint32_t*>(scores);
      uint64_t* blocks =
          shared ? nullptr : piece<uint64_t>(plan_.block_sums) + (head * plan_.chunks + chunk) * kBlocksPerChunk;
      uint64_t sum = 0;
      if (is_live(maximum)) {
        sum = kernels_.weigh(scores, kChunkRows, maximum, weights, blocks);
      } else {
        std::fill_n(weights, kChunkRows, 0u);
        if (blocks != nullptr) std::fill_n(blocks, kBlocksPerChunk, uint64_t{0});
      }
      piece<uint64_t>(plan_.weight_sums)[head * plan_.chunks + chunk] = sum;
    }
  }

  void finish_totals() {
    for (int64_t head = 0; head < shape_.batch * shape_.query_heads; ++head) {
      const uint64_t* sums = piece<uint64_t>(plan_.weight_sums) + head * plan_.chunks;
      uint64_t total = 0;
      for (int64_t c = 0; c < chunk_count(extents_[head / shape_.query_heads]); ++c) total += sums[c];
      piece<uint64_t>(plan_.totals)[head] = total;
      const double sink = static_cast<double>(sinks_[head % shape_.query_heads]);
      piece<float>(plan_.row_mass)[head] = static_cast<float>(share_of_rows(lse_of_rows(head), sink));
    }
  }

  double lse_of_rows(int64_t head) const {
    return log_sum_exp(piece<float>(plan_.maxima)[head], piece<uint64_t>(plan_.totals)[head]);
  }

  void include_chunk(int64_t b, int64_t kv, int64_t chunk, float* reciprocal) {
    const int64_t head = head_index(b, kv, 0);
    for (int64_t g = 0; g < group_; ++g) {
      reciprocal[g] =
          reciprocal_total(piece<uint64_t>(plan_.totals)[head + g], piece<float>(plan_.row_mass)[head + g]);
    }
    const int64_t at = (b * shape_.kv_heads + kv) * plan_.chunks + chunk;
    piece<uint64_t>(plan_.inclusion_sums)[at] =
        kernels_.include({.weights = piece<uint32_t>(plan_.scores) + head * padded_rows() + chunk * kChunkRows,
                          .weights_stride = padded_rows(),
                          .reciprocal = reciprocal,
                          .heads = group_,
                          .rows = kChunkRows,
                          .samples = static_cast<float>(params_.draw.samples),
                          .inclusion = piece<uint32_t>(plan_.inclusion) + at * kChunkRows,
                          .block_sums = piece<uint64_t>(plan_.block_sums) + at * kBlocksPerChunk});
  }

  // ---- draw and gather ----

  DrawKey key_of(int64_t b, int64_t head) const {
    const DrawParams& draw = params_.draw;
    return {.seed = draw.seed[b],
            .position = draw.position.data != nullptr ? draw.position[b] : extents_[b],
            .layer = draw.layer,
            .global_head = draw.head_offset + head};
  }

  // What head or group `index` draws from; `values` and `sums` are offsets of pieces of the plan.
  Density density_of(int64_t index, int64_t b, int64_t values, int64_t sums) const {
    return {.values = piece<uint32_t>(values) + index * padded_rows(),
            .block_sums = piece<uint64_t>(plan_.block_sums) + index * plan_.chunks * kBlocksPerChunk,
            .chunk_sums = piece<uint64_t>(sums) + index * plan_.chunks,
            .chunks = chunk_count(extents_[b])};
  }

  void sample_heads(int64_t group_index) {
    const int64_t b = group_index / shape_.kv_heads;
    const int64_t kv = group_index % shape_.kv_heads;
    const bool stats = params_.value_rows != nullptr;
    Gatherer gatherer(params_.v, shape_.value_dim, shape_.dtype, kernels_);
    Sample sample;
    std::vector<float> coefficients;
    std::set<int64_t> read;
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t head = head_index(b, kv, g);
      draw(params_.draw.method, params_.draw.samples, density_of(head, b, plan_.scores, plan_.weight_sums),
           key_of(b, kv * group_ + g), stats, &sample);
      prefetch_rows(b, kv, sample);
      const int64_t n = static_cast<int64_t>(sample.rows.size());
      coefficients.resize(n);
      const float row_mass = piece<float>(plan_.row_mass)[head];
      for (int64_t i = 0; i < n; ++i) {
        coefficients[i] = share_of_draws(sample.counts[i], params_.draw.samples, row_mass);
      }
      write_sampled(head, gatherer.gather(b, kv, sample.rows.data(), n, coefficients.data(), n, 1));
      if (!stats) continue;
      read.insert(sample.rows.begin(), sample.rows.end());
      std::fill(coefficients.begin(), coefficients.end(), share_of_draws(1, params_.draw.samples, row_mass));
      write_error(head,
                  gatherer.squared_error(b, kv, sample.rows.data(), n, coefficients.data(), sample.slack.data()));
    }
    if (stats) params_.value_rows[group_index] = static_cast<int64_t>(read.size());
  }

  void sample_group(int64_t group_index) {
    const int64_t b = group_index / shape_.kv_heads;
    const int64_t kv = group_index % shape_.kv_heads;
    const bool stats = params_.value_rows != nullptr;
    Gatherer gatherer(params_.v, shape_.value_dim, shape_.dtype, kernels_);
    Sample sample;
    draw(Method::kShared, params_.draw.samples, density_of(group_index, b, plan_.inclusion, plan_.inclusion_sums),
         key_of(b, kv * group_), stats, &sample);
    prefetch_rows(b, kv, sample);
    const int64_t n = static_cast<int64_t>(sample.rows.size());
    std::vector<float> coefficients(group_ * n);
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t head = head_index(b, kv, g);
      const uint32_t* weights = piece<uint32_t>(plan_.scores) + head * padded_rows();
      const uint64_t total = piece<uint64_t>(plan_.totals)[head];
      const float row_mass = piece<float>(plan_.row_mass)[head];
      for (int64_t i = 0; i < n; ++i) {
        coefficients[g * n + i] =
            horvitz_thompson(weights[sample.rows[i]], total, row_mass, static_cast<uint32_t>(sample.counts[i]));
      }
    }
    const double* out = gatherer.gather(b, kv, sample.rows.data(), n, coefficients.data(), n, group_);
    for (int64_t g = 0; g < group_; ++g) {
      const int64_t head = head_index(b, kv, g);
      write_sampled(head, out + g * gatherer.value_stride());
      if (!stats) continue;
      write_error(head, gatherer.squared_error(b, kv, sample.rows.data(), n, coefficients.data() + g * n,
                                               sample.slack.data()));
    }
    if (stats) params_.value_rows[group_index] = n;
  }

  void prefetch_rows(int64_t b, int64_t kv, const Sample& sample) const {
    const int64_t size = element_size(shape_.dtype);
    for (const int64_t row : sample.rows) {
      const char* at = static_cast<const char*>(params_.v.data) + params_.v.offset(b, kv, row) * size;
      for (int64_t byte = 0; byte < shape_.value_dim * size; byte += 64) __builtin_prefetch(at + byte);
    }
  }

  void write_sampled(int64_t head, const double* values) {
    results_.write(head, piece<float>(plan_.maxima)[head], values, lse_of_rows(head));
  }

  void write_error(int64_t head, double error) {
    results_.write_error(head, piece<float>(plan_.maxima)[head], error);
  }

  const DecodeParams& params_;
  const DecodeShape shape_;
  const int64_t group_;
  const KernelTable& kernels_;
  const Sinks sinks_;
  const Results results_;
  const ParallelFor& parallel_for_;
  const std::vector<int64_t> extents_;  // [B]: one past the last attended row
  const ChunkGrid grid_;
  const CpuPlan plan_;
  std::byte* const memory_;
};

}  // namespace

void decode(const DecodeParams& params, const ParallelFor& parallel_for) {
  if (params.shape.batch * params.shape.query_heads == 0) return;
  const KeepDenormals keep;
  Step step(params, params.draw.method, parallel_for);
  params.draw.method == Method::kDense ? step.run_dense() : step.run_sampled();
}

void score(const DecodeParams& params, float* scores, float* maxima, const ParallelFor& parallel_for) {
  if (params.shape.batch * params.shape.query_heads == 0) return;
  const KeepDenormals keep;
  // The plan of any sampled method holds whole scores, which the dense one does not.
  Step(params, Method::kSystematic, parallel_for).run_score(scores, maxima);
}

}  // namespace santa::cpu
