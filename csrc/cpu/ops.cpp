// The torch side of the CPU backend: checks, outputs, registration.
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <tuple>

#include "../check_sketch.h"
#include "../registration.h"
#include "../text.h"
#include "append.h"
#include "decode.h"
#include "kernels.h"
#include "level.h"
#include "query.h"
#include "torch_side.h"

namespace santa::cpu {
namespace {

using torch::headeronly::ScalarType;

DecodeOutputs::Handles decode_op(const Tensor& q, const Tensor& k, const Tensor& v, int64_t samples,
                                 const Text& method, std::optional<double> scale,
                                 const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_lens,
                                 std::optional<double> softcap, const std::optional<Tensor>& sinks,
                                 const Tensor& seed, const std::optional<Tensor>& position, int64_t layer,
                                 int64_t head_offset, bool return_stats, const std::optional<Tensor>& key_blocks,
                                 const std::optional<Tensor>& block_rows, int64_t bernoulli_draws,
                                 bool bernoulli_shared) {
  const std::string op = "santa::decode";
  DecodeParams params = check_decode(op, q, k, &v, scale, mask, seq_lens, softcap);
  const DecodeShape& shape = params.shape;
  params.key_blocks = check_key_blocks(op, key_blocks, block_rows, shape, k);
  params.bernoulli = check_bernoulli(op, "bernoulli_draws", bernoulli_draws, bernoulli_shared);
  params.sparse_query = bernoulli_draws != 0;
  check_lengths(op, params);
  if (sinks.has_value()) params.sinks = check_sinks(op, *sinks, shape, q);
  params.draw =
      check_draw(op, method, samples, seed, position, layer, head_offset, shape.batch, shape.query_heads, q);

  DecodeOutputs outputs(&params, q.scalar_type(), return_stats, cpu_device());
  decode(params, torch_parallel_for);
  return outputs.release();
}

void sketch_append_op(const Tensor& key_blocks, const Tensor& open_rows, const Tensor& block_rows, const Tensor& k,
                      const std::optional<Tensor>& num_rows) {
  append(check_sketch_append(key_blocks, open_rows, block_rows, k, num_rows), torch_parallel_for);
}

std::tuple<Tensor, Tensor> score_op(const Tensor& q, const Tensor& k, std::optional<double> scale,
                                    const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_lens,
                                    std::optional<double> softcap, const std::optional<Tensor>& key_blocks,
                                    const std::optional<Tensor>& block_rows, bool sparse_query) {
  const std::string op = "santa::score";
  DecodeParams params = check_decode(op, q, k, nullptr, scale, mask, seq_lens, softcap);
  params.key_blocks = check_key_blocks(op, key_blocks, block_rows, params.shape, k);
  params.sparse_query = sparse_query;
  check_lengths(op, params);
  const DecodeShape& shape = params.shape;
  Tensor scores = empty({shape.batch, shape.query_heads, shape.rows}, ScalarType::Float);
  Tensor maxima = empty({shape.batch, shape.query_heads}, ScalarType::Float);
  score(params, scores.mutable_data_ptr<float>(), maxima.mutable_data_ptr<float>(), torch_parallel_for);
  return {scores, maxima};
}

Tensor bernoulli_query_op(const Tensor& q, int64_t draws, bool shared, int64_t kv_heads, const Tensor& seed,
                          const Tensor& position, int64_t layer, int64_t head_offset) {
  const DecodeParams params =
      check_bernoulli_query(q, draws, shared, kv_heads, seed, position, layer, head_offset);
  Tensor query = empty({q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  bernoulli_query(params, query.mutable_data_ptr<float>(), torch_parallel_for);
  return query;
}

std::string cpu_level_op() { return std::string(level_name(active_level())); }

void set_cpu_level_op(const Text& level) { set_active_level(parse_level(level, "santa::set_cpu_level")); }

}  // namespace
}  // namespace santa::cpu

SANTA_KERNELS(CPU, m) {
  m.impl("decode", TORCH_BOX(&santa::cpu::decode_op));
  m.impl("bernoulli_query", TORCH_BOX(&santa::cpu::bernoulli_query_op));
  m.impl("sketch_append", TORCH_BOX(&santa::cpu::sketch_append_op));
  m.impl("score", TORCH_BOX(&santa::cpu::score_op));
}

SANTA_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("cpu_level", TORCH_BOX(&santa::cpu::cpu_level_op));
  m.impl("set_cpu_level", TORCH_BOX(&santa::cpu::set_cpu_level_op));
}
