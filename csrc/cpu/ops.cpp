// The torch side of the CPU backend: checks, outputs, registration.
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <tuple>

#include "../check.h"
#include "../registration.h"
#include "../text.h"
#include "decode.h"
#include "kernels.h"
#include "level.h"
#include "torch_side.h"

namespace santa::cpu {
namespace {

using torch::headeronly::ScalarType;

DecodeOutputs::Handles decode_op(const Tensor& q, const Tensor& k, const Tensor& v, int64_t samples,
                                 const Text& method, std::optional<double> scale,
                                 const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_lens,
                                 std::optional<double> softcap, const std::optional<Tensor>& sinks,
                                 const Tensor& seed, const std::optional<Tensor>& position, int64_t layer,
                                 int64_t head_offset, bool return_stats) {
  const std::string op = "santa::decode";
  DecodeParams params = check_decode(op, q, k, &v, scale, mask, seq_lens, softcap);
  check_lengths(op, params);
  const DecodeShape& shape = params.shape;
  if (sinks.has_value()) params.sinks = check_sinks(op, *sinks, shape, q);
  params.draw =
      check_draw(op, method, samples, seed, position, layer, head_offset, shape.batch, shape.query_heads, q);

  DecodeOutputs outputs(&params, q.scalar_type(), return_stats, cpu_device());
  decode(params, torch_parallel_for);
  return outputs.release();
}

std::tuple<Tensor, Tensor> score_op(const Tensor& q, const Tensor& k, std::optional<double> scale,
                                    const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_lens,
                                    std::optional<double> softcap) {
  const std::string op = "santa::score";
  const DecodeParams params = check_decode(op, q, k, nullptr, scale, mask, seq_lens, softcap);
  check_lengths(op, params);
  const DecodeShape& shape = params.shape;
  Tensor scores = empty({shape.batch, shape.query_heads, shape.rows}, ScalarType::Float);
  Tensor maxima = empty({shape.batch, shape.query_heads}, ScalarType::Float);
  score(params, scores.mutable_data_ptr<float>(), maxima.mutable_data_ptr<float>(), torch_parallel_for);
  return {scores, maxima};
}

std::string cpu_level_op() { return std::string(level_name(active_level())); }

void set_cpu_level_op(const Text& level) { set_active_level(parse_level(level, "santa::set_cpu_level")); }

}  // namespace
}  // namespace santa::cpu

SANTA_KERNELS(CPU, m) {
  m.impl("decode", TORCH_BOX(&santa::cpu::decode_op));
  m.impl("score", TORCH_BOX(&santa::cpu::score_op));
}

SANTA_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("cpu_level", TORCH_BOX(&santa::cpu::cpu_level_op));
  m.impl("set_cpu_level", TORCH_BOX(&santa::cpu::set_cpu_level_op));
}
