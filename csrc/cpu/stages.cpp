// The torch side of the stage operators weigh, draw and gather: the kernels of decode on whole tensors.

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../check_stages.h"
#include "../math/softmax.h"
#include "../math/weights.h"
#include "../registration.h"
#include "../text.h"
#include "draw.h"
#include "gather.h"
#include "torch_side.h"

namespace santa::cpu {
namespace {

using torch::headeronly::ScalarType;

Tensor weigh_op(const Tensor& scores_in, const Tensor& maxima_in) {
  const std::string op = "santa::weigh";
  const auto [scores, maxima] = check_weigh(kCpuHome, scores_in, maxima_in);
  const int64_t rows = scores.size(2);
  Tensor weights = empty({scores.size(0), scores.size(1), rows}, ScalarType::Int);
  const float* from = scores.const_data_ptr<float>();
  const float* largest = maxima.const_data_ptr<float>();
  int32_t* to = weights.mutable_data_ptr<int32_t>();
  const KernelTable& kernels = active_kernels();
  std::atomic<int64_t> bad{-1};  // an exception would lose its message on the way out of the threads
  torch_parallel_for(scores.size(0) * scores.size(1), 1, [&](int64_t begin, int64_t end) {
    float chunk[kChunkRows];
    uint32_t weighed[kChunkRows];
    for (int64_t at = begin * rows; at < end * rows;) {
      const int64_t head = at / rows;
      const int64_t n = std::min(kChunkRows, (head + 1) * rows - at);
      if (is_live(largest[head])) {
        std::fill(std::copy_n(from + at, n, chunk), chunk + kChunkRows, kNegativeInfinity);
        for (int64_t i = 0; i < n; ++i) {
          if (!(chunk[i] <= largest[head])) bad = at + i;
        }
        kernels.weigh(chunk, kChunkRows, largest[head], weighed, nullptr);
        std::copy_n(weighed, n, to + at);
      } else {
        std::fill_n(to + at, n, 0);
      }
      at += n;
    }
  });
  if (bad >= 0) {
    fail(op, "scores must not exceed the maximum of their head, got ", from[bad], " above ", largest[bad / rows],
         " at flat index ", bad.load());
  }
  return weights;
}

// One density in memory of its own, from int32 weights of any backend or user.
struct OwnedDensity {
  std::vector<uint32_t> values;
  std::vector<uint64_t> block_sums;
  std::vector<uint64_t> chunk_sums;

  explicit OwnedDensity(int64_t rows)
      : values(chunk_count(rows) * kChunkRows, 0),
        block_sums(values.size() / kBlockRows),
        chunk_sums(chunk_count(rows)) {}

  void sum(const KernelTable& kernels) {
    for (size_t c = 0; c < chunk_sums.size(); ++c) {
      chunk_sums[c] =
          kernels.sum_blocks(values.data() + c * kChunkRows, kChunkRows, block_sums.data() + c * kBlocksPerChunk);
    }
  }

  Density view() const {
    return {values.data(), block_sums.data(), chunk_sums.data(), static_cast<int64_t>(chunk_sums.size())};
  }
};

// Inclusion probabilities of one group from its heads' weights [G, rows]. row_mass [G] may be null: all of it.
void include_rows(const uint32_t* weights, const float* row_mass, int64_t group, int64_t rows, int64_t samples,
                  const KernelTable& kernels, OwnedDensity* density) {
  std::vector<uint32_t> padded(group * density->values.size(), 0);
  std::vector<float> reciprocal(group);
  const int64_t stride = static_cast<int64_t>(density->values.size());
  for (int64_t g = 0; g < group; ++g) {
    uint64_t total = 0;
    for (int64_t j = 0; j < rows; ++j) total += weights[g * rows + j];
    std::copy_n(weights + g * rows, rows, padded.data() + g * stride);
    reciprocal[g] = reciprocal_total(total, row_mass == nullptr ? 1.0f : row_mass[g]);
  }
  for (size_t c = 0; c < density->chunk_sums.size(); ++c) {
    density->chunk_sums[c] =
        kernels.include({.weights = padded.data() + c * kChunkRows,
                         .weights_stride = stride,
                         .reciprocal = reciprocal.data(),
                         .heads = group,
                         .rows = kChunkRows,
                         .samples = static_cast<float>(samples),
                         .inclusion = density->values.data() + c * kChunkRows,
                         .block_sums = density->block_sums.data() + c * (kChunkRows / kBlockRows)});
  }
}

// Values that keep every sum and product of the exact draws within 64 bits.
void check_values_of(const std::string& op, const DrawInputs& inputs) {
  const int32_t* from = inputs.weights.const_data_ptr<int32_t>();
  const int32_t* end = from + inputs.weights.numel();
  const auto bad =
      std::find_if(from, end, [](int32_t w) { return w < 0 || w > static_cast<int32_t>(kWeightOne); });
  if (bad != end) fail(op, "weights must lie between 0 and 2^30, got ", *bad, " at flat index ", bad - from);
  if (!inputs.row_mass.has_value()) return;
  const float* mass = inputs.row_mass->const_data_ptr<float>();
  for (int64_t at = 0; at < inputs.row_mass->numel(); ++at) {
    if (!(mass[at] >= 0.0f && mass[at] <= 1.0f)) {
      fail(op, "row_mass must lie between 0 and 1, got ", mass[at], " at flat index ", at);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> draw_op(const Tensor& weights_in, int64_t samples, const Text& method,
                                           int64_t kv_heads, const Tensor& seed, const Tensor& position,
                                           int64_t layer, int64_t head_offset,
                                           const std::optional<Tensor>& row_mass_in) {
  const std::string op = "santa::draw";
  const DrawInputs inputs = check_draw_inputs(kCpuHome, weights_in, samples, method, kv_heads, seed, position,
                                              layer, head_offset, row_mass_in);
  check_values_of(op, inputs);
  const DrawParams& params = inputs.params;
  const Tensor& weights = inputs.weights;
  const int32_t* from = weights.const_data_ptr<int32_t>();
  const bool shared = inputs.shared();
  const int64_t batch = inputs.shape.batch;
  const int64_t heads = inputs.shape.query_heads;
  const int64_t rows = inputs.shape.rows;
  const int64_t group = inputs.shape.group_size();
  const int64_t draw_heads = inputs.draw_heads();
  const int64_t capacity = inputs.capacity();
  Tensor out_rows = torch::stable::new_zeros(weights, {batch, draw_heads, capacity}, ScalarType::Long);
  Tensor out_counts = torch::stable::new_zeros(weights, {batch, draw_heads, capacity}, ScalarType::Int);
  Tensor num_rows = empty({batch, draw_heads}, ScalarType::Int);
  int64_t* to_rows = out_rows.mutable_data_ptr<int64_t>();
  int32_t* to_counts = out_counts.mutable_data_ptr<int32_t>();
  int32_t* to_num = num_rows.mutable_data_ptr<int32_t>();
  const KernelTable& kernels = active_kernels();
  torch_parallel_for(batch * draw_heads, 1, [&](int64_t begin, int64_t finish) {
    OwnedDensity density(rows);
    Sample sample;
    for (int64_t at = begin; at < finish; ++at) {
      const int64_t b = at / draw_heads;
      const int64_t first_head = shared ? at % draw_heads * group : at % draw_heads;
      const uint32_t* head_weights = reinterpret_cast<const uint32_t*>(from) + (b * heads + first_head) * rows;
      if (shared) {
        const float* mass = inputs.row_mass.has_value()
                                ? inputs.row_mass->const_data_ptr<float>() + b * heads + first_head
                                : nullptr;
        include_rows(head_weights, mass, group, rows, samples, kernels, &density);
      } else {
        std::copy_n(head_weights, rows, density.values.begin());
        density.sum(kernels);
      }
      const DrawKey key = {params.seed[b], params.position[b], layer, head_offset + first_head};
      draw(params.method, samples, density.view(), key, false, &sample);
      const int64_t n = std::min(capacity, static_cast<int64_t>(sample.rows.size()));
      std::copy_n(sample.rows.begin(), n, to_rows + at * capacity);
      std::copy_n(sample.counts.begin(), n, to_counts + at * capacity);
      to_num[at] = static_cast<int32_t>(n);
    }
  });
  return {out_rows, out_counts, num_rows};
}

Tensor gather_op(const Tensor& rows_in, const Tensor& coefficients_in, const Tensor& num_rows_in,
                 const Tensor& v) {
  const std::string op = "santa::gather";
  const auto [rows, coefficients, num_rows, values, row_heads, capacity] =
      check_gather(kCpuHome, rows_in, coefficients_in, num_rows_in, v);
  const int64_t batch = values.shape.batch;
  const int64_t heads = values.shape.query_heads;
  const int64_t kv_heads = values.shape.kv_heads;
  const int64_t* row = rows.const_data_ptr<int64_t>();
  const int32_t* num = num_rows.const_data_ptr<int32_t>();
  for (int64_t at = 0; at < batch * row_heads; ++at) {
    if (num[at] < 0 || num[at] > capacity) {
      fail(op, "num_rows must lie between 0 and the capacity ", capacity, ", got ", num[at]);
    }
    for (int64_t i = at * capacity; i < at * capacity + num[at]; ++i) {
      if (row[i] < 0 || row[i] >= values.shape.rows) {
        fail(op, "rows must lie between 0 and the rows of v (", values.shape.rows, "), got ", row[i]);
      }
    }
  }
  Tensor out = empty({batch, heads, values.shape.value_dim}, ScalarType::Float);
  float* to = out.mutable_data_ptr<float>();
  const float* coefficient = coefficients.const_data_ptr<float>();
  const int64_t heads_per_list = heads / row_heads;
  const int64_t lists_per_kv = row_heads / kv_heads;
  torch_parallel_for(
      batch * row_heads, 1,
      [&, &values = values, row_heads = row_heads, capacity = capacity](int64_t begin, int64_t end) {
        Gatherer gatherer(values.address, values.shape.value_dim, values.shape.dtype, active_kernels());
        for (int64_t at = begin; at < end; ++at) {
          const int64_t first_head = at * heads_per_list;
          gatherer.gather(at / row_heads, at % row_heads / lists_per_kv, row + at * capacity, num[at],
                          coefficient + first_head * capacity, capacity, heads_per_list);
          for (int64_t h = 0; h < heads_per_list; ++h) {
            std::copy_n(gatherer.sums(h), values.shape.value_dim, to + (first_head + h) * values.shape.value_dim);
          }
        }
      });
  return out;
}

}  // namespace
}  // namespace santa::cpu

SANTA_KERNELS(CPU, m) {
  m.impl("weigh", TORCH_BOX(&santa::cpu::weigh_op));
  m.impl("draw", TORCH_BOX(&santa::cpu::draw_op));
  m.impl("gather", TORCH_BOX(&santa::cpu::gather_op));
}
