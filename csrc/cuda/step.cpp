#include "step.h"

#include <stdexcept>
#include <string>

#include "geometry.h"

namespace santa::cuda {

int access_bytes(const char* name, const RowAddress& address, const DecodeShape& shape) {
  constexpr uint64_t kMost = 16;
  const auto bytes = static_cast<uint64_t>(element_size(shape.dtype));
  uint64_t bits = reinterpret_cast<uint64_t>(address.data) | kMost;
  if (bits % bytes != 0) {
    throw std::invalid_argument(std::string("santa: ") + name + " must begin at a multiple of " +
                                std::to_string(bytes) + " bytes, the size of its numbers");
  }
  if (shape.batch > 1 || address.page_table != nullptr) bits |= static_cast<uint64_t>(address.page_stride) * bytes;
  if (shape.kv_heads > 1) bits |= static_cast<uint64_t>(address.head_stride) * bytes;
  if (shape.rows > 1) bits |= static_cast<uint64_t>(address.row_stride) * bytes;
  return static_cast<int>(bits & -bits);
}

void check_block_access(const KeyBlocks& blocks, const DecodeShape& shape) {
  const auto bytes = static_cast<uint64_t>(element_size(shape.dtype));
  uint64_t bits = reinterpret_cast<uint64_t>(blocks.data);
  if (shape.batch > 1) bits |= static_cast<uint64_t>(blocks.batch_stride) * bytes;
  if (shape.kv_heads > 1) bits |= static_cast<uint64_t>(blocks.head_stride) * bytes;
  if (blocks.capacity > 1) bits |= static_cast<uint64_t>(blocks.block_stride) * bytes;
  if (bits % kVectorBytes != 0) {
    throw std::invalid_argument(
        "santa: key_blocks must have blocks that begin at multiples of 16 bytes, got one at a multiple of " +
        std::to_string(bits & -bits));
  }
}

Step make_step(const DecodeParams& params, const LaunchPlan& plan, std::byte* memory) {
  Step step{};
  step.params = params;
  step.plan = plan;
  step.key_access = access_bytes("k", params.k, params.shape);
  step.value_access = access_bytes("v", params.v, params.shape);
  const auto piece = [memory](int64_t offset, auto** to) {
    *to = reinterpret_cast<std::remove_reference_t<decltype(**to)>*>(memory + offset);
  };
  if (params.key_blocks.present()) {
    check_block_access(params.key_blocks, params.shape);
    if (params.value_rows != nullptr) piece(plan.block_rows, &step.block_rows);
  }
  if (params.bernoulli.draws != 0) {
    piece(plan.query, &step.query);
    piece(plan.query_maxima, &step.query_maxima);
  }
  piece(plan.attended, &step.attended);
  piece(plan.chunk_maxima, &step.chunk_maxima);
  if (plan.method == Method::kDense) {
    piece(plan.partial_sums, &step.partial_sums);
    piece(plan.partial_out, &step.partial_out);
    return step;
  }
  piece(plan.maxima, &step.maxima);
  piece(plan.scores, &step.scores);
  step.weights = step.scores;
  step.scores_stride = step.weights_stride = plan.padded_rows;
  step.scores_rows = step.weights_rows = plan.padded_rows;
  piece(plan.weight_sums, &step.weight_sums);
  piece(plan.totals, &step.totals);
  piece(plan.row_mass, &step.row_mass);
  piece(plan.inclusion, &step.inclusion);
  piece(plan.inclusion_sums, &step.inclusion_sums);
  piece(plan.block_sums, &step.block_sums);
  piece(plan.prefix, &step.prefix);
  piece(plan.drawn, &step.drawn);
  piece(plan.begins, &step.begins);
  piece(plan.rows, &step.rows);
  piece(plan.counts, &step.counts);
  piece(plan.num_rows, &step.num_rows);
  piece(plan.coefficients, &step.coefficients);
  if (params.value_rows != nullptr) piece(plan.slack, &step.slack);
  step.heads_per_list = plan.method == Method::kShared ? params.shape.group_size() : 1;
  return step;
}

void use_stochastic_query(Step* step) {
  const DecodeShape& shape = step->params.shape;
  step->params.q = step->query;
  step->params.q_dtype = Dtype::kFloat32;
  step->params.q_batch_stride = shape.query_heads * shape.head_dim;
  step->params.q_head_stride = shape.head_dim;
}

}  // namespace santa::cuda
