// The torch side of the CUDA backend: checks, outputs, scratch memory, launches, registration.
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <tuple>

#include "../check_sketch.h"
#include "../check_stages.h"
#include "../registration.h"
#include "../text.h"
#include "geometry.h"
#include "kernels.h"
#include "torch_side.h"

namespace santa::cuda {
namespace {

using torch::headeronly::ScalarType;

// Scratch memory of one step, given back to torch's allocator when the step is launched: whoever gets it next on
// this stream comes after.
class Scratch {
 public:
  Scratch(const OnDevice& on, int64_t bytes) : tensor_(on.empty({bytes}, ScalarType::Byte)) {}

  std::byte* data() const { return static_cast<std::byte*>(tensor_.mutable_data_ptr()); }

 private:
  Tensor tensor_;
};

bool is_empty(const DecodeShape& shape) { return shape.batch * shape.query_heads == 0; }

DecodeOutputs::Handles decode_op(const Tensor& q, const Tensor& k, const Tensor& v, int64_t samples,
                                 const Text& method, std::optional<double> scale,
                                 const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_lens,
                                 std::optional<double> softcap, const std::optional<Tensor>& sinks,
                                 const Tensor& seed, const std::optional<Tensor>& position, int64_t layer,
                                 int64_t head_offset, bool return_stats, const std::optional<Tensor>& key_blocks,
                                 const std::optional<Tensor>& block_rows, int64_t bernoulli_draws,
                                 bool bernoulli_shared) {
  const std::string op = "santa::decode";
  const OnDevice on(op, "q", q);
  DecodeParams params = check_decode(op, q, k, &v, scale, mask, seq_lens, softcap);
  const DecodeShape& shape = params.shape;
  params.key_blocks = check_key_blocks(op, key_blocks, block_rows, shape, k);
  params.bernoulli = check_bernoulli(op, "bernoulli_draws", bernoulli_draws, bernoulli_shared);
  params.sparse_query = bernoulli_draws != 0;
  if (sinks.has_value()) params.sinks = check_sinks(op, *sinks, shape, q);
  params.draw =
      check_draw(op, method, samples, seed, position, layer, head_offset, shape.batch, shape.query_heads, q);
  DecodeOutputs outputs(&params, q.scalar_type(), return_stats, on.device());
  if (is_empty(shape)) return outputs.release();
  const KeyReading reading = {.sketch = params.key_blocks.present(), .bernoulli = bernoulli_draws != 0};
  const LaunchPlan plan = plan_launch(shape, params.draw.method, samples, return_stats, on.info(), reading);
  const Scratch scratch(on, plan.bytes);
  Step step = make_step(params, plan, scratch.data());
  if (reading.bernoulli) {
    bernoulli(step, on.stream());
    use_stochastic_query(&step);
  }
  if (params.draw.method == Method::kDense) {
    dense(step, on.stream());
    merge(step, on.stream());
  } else {
    score(step, on.stream());
    weigh(step, Source::kScores, on.stream());
    if (params.draw.method == Method::kShared) include(step, on.stream());
    draw(step, on.stream());
    gather(step, false, on.stream());
  }
  return outputs.release();
}

std::tuple<Tensor, Tensor> score_op(const Tensor& q, const Tensor& k, std::optional<double> scale,
                                    const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_lens,
                                    std::optional<double> softcap, const std::optional<Tensor>& key_blocks,
                                    const std::optional<Tensor>& block_rows, bool sparse_query) {
  const std::string op = "santa::score";
  const OnDevice on(op, "q", q);
  DecodeParams params = check_decode(op, q, k, nullptr, scale, mask, seq_lens, softcap);
  params.key_blocks = check_key_blocks(op, key_blocks, block_rows, params.shape, k);
  params.sparse_query = sparse_query;
  const DecodeShape& shape = params.shape;
  Tensor scores = on.empty({shape.batch, shape.query_heads, shape.rows}, ScalarType::Float);
  Tensor maxima = on.empty({shape.batch, shape.query_heads}, ScalarType::Float);
  if (is_empty(shape)) return {scores, maxima};
  // A step without V: what its plan says of samples is not used.
  const LaunchPlan plan = plan_launch(shape, Method::kDense, 1, false, on.info());
  const Scratch scratch(on, plan.bytes);
  Step step = make_step(params, plan, scratch.data());
  step.whole = true;
  step.scores = static_cast<uint32_t*>(scores.mutable_data_ptr());
  step.scores_stride = step.scores_rows = shape.rows;
  step.maxima = maxima.mutable_data_ptr<float>();
  score(step, on.stream());
  finish_maxima(step, on.stream());
  return {scores, maxima};
}

Tensor bernoulli_query_op(const Tensor& q, int64_t draws, bool shared, int64_t kv_heads, const Tensor& seed,
                          const Tensor& position, int64_t layer, int64_t head_offset) {
  const OnDevice on("santa::bernoulli_query", "q", q);
  const DecodeParams params =
      check_bernoulli_query(q, draws, shared, kv_heads, seed, position, layer, head_offset);
  const DecodeShape& shape = params.shape;
  Tensor out = on.empty({shape.batch, shape.query_heads, shape.head_dim}, ScalarType::Float);
  if (is_empty(shape)) return out;
  const Tensor maxima = on.empty({shape.batch, shape.query_heads}, ScalarType::Float);
  Step step{};
  step.params = params;
  step.query = out.mutable_data_ptr<float>();
  step.query_maxima = maxima.mutable_data_ptr<float>();
  bernoulli(step, on.stream());
  return out;
}

void sketch_append_op(const Tensor& key_blocks, const Tensor& open_rows, const Tensor& block_rows, const Tensor& k,
                      const std::optional<Tensor>& num_rows) {
  const OnDevice on("santa::sketch_append", "k", k);
  const AppendParams params = check_sketch_append(key_blocks, open_rows, block_rows, k, num_rows);
  const DecodeShape& shape = params.shape;
  if (shape.batch * shape.kv_heads * shape.rows == 0) return;
  const KeyBlocks blocks = {.data = params.blocks,
                            .batch_stride = params.batch_stride,
                            .head_stride = params.head_stride,
                            .block_stride = params.block_stride,
                            .capacity = params.capacity};
  check_block_access(blocks, shape);
  const RowAddress open = {.data = params.open,
                           .page_stride = shape.kv_heads * kSketchRows * shape.head_dim,
                           .head_stride = kSketchRows * shape.head_dim,
                           .row_stride = shape.head_dim,
                           .page_rows = kSketchRows};
  DecodeShape open_shape = shape;
  open_shape.rows = kSketchRows;
  const int access = std::min(access_bytes("k", params.k, shape), access_bytes("open_rows", open, open_shape));
  sketch_append(params, access, on.info().compute_capability >= kOverlapCapability, on.stream());
}

Tensor weigh_op(const Tensor& scores_in, const Tensor& maxima_in) {
  const OnDevice on("santa::weigh", "scores", scores_in);
  const auto [scores, maxima] = check_weigh(kHome, scores_in, maxima_in);
  const DecodeShape shape = {.batch = scores.size(0),
                             .query_heads = scores.size(1),
                             .kv_heads = scores.size(1),
                             .rows = scores.size(2),
                             .head_dim = 1,
                             .value_dim = 1,
                             .dtype = Dtype::kFloat32};
  Tensor weights = on.empty({shape.batch, shape.query_heads, shape.rows}, ScalarType::Int);
  if (is_empty(shape)) return weights;
  Step step{};
  step.params.shape = shape;
  step.plan = plan_launch(shape, Method::kMultinomial, 1, false, on.info());
  step.scores = static_cast<uint32_t*>(const_cast<void*>(scores.const_data_ptr()));
  step.maxima = static_cast<float*>(const_cast<void*>(maxima.const_data_ptr()));
  step.weights = static_cast<uint32_t*>(weights.mutable_data_ptr());
  step.scores_stride = step.scores_rows = step.weights_stride = step.weights_rows = shape.rows;
  weigh(step, Source::kScoresAndMaxima, on.stream());
  return weights;
}

std::tuple<Tensor, Tensor, Tensor> draw_op(const Tensor& weights_in, int64_t samples, const Text& method,
                                           int64_t kv_heads, const Tensor& seed, const Tensor& position,
                                           int64_t layer, int64_t head_offset,
                                           const std::optional<Tensor>& row_mass) {
  const OnDevice on("santa::draw", "weights", weights_in);
  const DrawInputs inputs = check_draw_inputs(kHome, weights_in, samples, method, kv_heads, seed, position, layer,
                                              head_offset, row_mass);
  const DecodeShape& shape = inputs.shape;
  const int64_t capacity = inputs.capacity();
  Tensor rows = on.empty({shape.batch, inputs.draw_heads(), capacity}, ScalarType::Long);
  Tensor counts = on.empty({shape.batch, inputs.draw_heads(), capacity}, ScalarType::Int);
  Tensor num_rows = on.empty({shape.batch, inputs.draw_heads()}, ScalarType::Int);
  if (is_empty(shape)) return {rows, counts, num_rows};
  const LaunchPlan plan = plan_launch(shape, inputs.params.method, samples, false, on.info());
  const Scratch scratch(on, plan.bytes);
  DecodeParams params{};
  params.shape = shape;
  params.draw = inputs.params;
  Step step = make_step(params, plan, scratch.data());
  // Weights are cut to their range on the way into scratch memory, where every chunk is whole.
  step.scores = static_cast<uint32_t*>(const_cast<void*>(inputs.weights.const_data_ptr()));
  step.scores_stride = step.scores_rows = shape.rows;
  step.given_row_mass = inputs.row_mass.has_value() ? inputs.row_mass->const_data_ptr<float>() : nullptr;
  step.maxima = nullptr;
  step.coefficients = nullptr;
  step.clear_rest = true;
  step.rows = rows.mutable_data_ptr<int64_t>();
  step.counts = counts.mutable_data_ptr<int32_t>();
  step.num_rows = num_rows.mutable_data_ptr<int32_t>();
  weigh(step, Source::kWeights, on.stream());
  if (inputs.shared()) include(step, on.stream());
  draw(step, on.stream());
  return {rows, counts, num_rows};
}

Tensor gather_op(const Tensor& rows_in, const Tensor& coefficients_in, const Tensor& num_rows_in,
                 const Tensor& v) {
  const OnDevice on("santa::gather", "rows", rows_in);
  const GatherInputs inputs = check_gather(kHome, rows_in, coefficients_in, num_rows_in, v);
  DecodeShape shape = inputs.values.shape;
  Tensor out = on.empty({shape.batch, shape.query_heads, shape.value_dim}, ScalarType::Float);
  if (is_empty(shape)) return out;
  shape.head_dim = 1;
  const bool per_head = inputs.row_heads == shape.query_heads;
  const Method method = per_head ? Method::kSystematic : Method::kShared;
  Step step{};
  step.params.shape = shape;
  step.params.v = inputs.values.address;
  step.params.out = out.mutable_data_ptr();
  step.plan = plan_launch(shape, method, 1, false, on.info());
  step.plan.capacity = inputs.capacity;
  step.value_access = access_bytes("v", inputs.values.address, shape);
  step.heads_per_list = shape.query_heads / inputs.row_heads;
  step.rows = const_cast<int64_t*>(inputs.rows.const_data_ptr<int64_t>());
  step.num_rows = const_cast<int32_t*>(inputs.num_rows.const_data_ptr<int32_t>());
  step.coefficients = const_cast<float*>(inputs.coefficients.const_data_ptr<float>());
  gather(step, true, on.stream());
  return out;
}

}  // namespace
}  // namespace santa::cuda

#if SANTA_SIMT
SANTA_KERNELS(CPU, m) {
#else
SANTA_KERNELS(CUDA, m) {
#endif
  m.impl("decode", TORCH_BOX(&santa::cuda::decode_op));
  m.impl("score", TORCH_BOX(&santa::cuda::score_op));
  m.impl("bernoulli_query", TORCH_BOX(&santa::cuda::bernoulli_query_op));
  m.impl("sketch_append", TORCH_BOX(&santa::cuda::sketch_append_op));
  m.impl("weigh", TORCH_BOX(&santa::cuda::weigh_op));
  m.impl("draw", TORCH_BOX(&santa::cuda::draw_op));
  m.impl("gather", TORCH_BOX(&santa::cuda::gather_op));
}
