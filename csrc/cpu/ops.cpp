// The torch side of the CPU backend: checks, outputs, registration.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <tuple>

#include "../check.h"
#include "../text.h"
#include "decode.h"
#include "kernels.h"
#include "level.h"
#include "torch_side.h"

namespace santa::cpu {
namespace {

using torch::headeronly::ScalarType;

std::tuple<Output::Handle, Output::Handle, Output::Handle, Output::Handle, Output::Handle> decode_op(
    const Tensor& q, const Tensor& k, const Tensor& v, int64_t samples, const Text& method,
    std::optional<double> scale, const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_lens,
    std::optional<double> softcap, const std::optional<Tensor>& sinks, const Tensor& seed,
    const std::optional<Tensor>& position, int64_t layer, int64_t head_offset, bool return_stats) {
  const std::string op = "santa::decode";
  CheckedDecode checked = check_decode(op, q, k, &v, scale, mask, seq_lens, softcap);
  DecodeParams& params = checked.params;
  const DecodeShape& shape = params.shape;
  if (sinks.has_value()) params.sinks = check_sinks(op, *sinks, shape, q);
  params.draw =
      check_draw(op, method, samples, seed, position, layer, head_offset, shape.batch, shape.query_heads, q);

  Output out({shape.batch, shape.query_heads, shape.value_dim}, q.scalar_type());
  Output lse({shape.batch, shape.query_heads}, ScalarType::Float);
  const int64_t kept = return_stats ? shape.batch : 0;
  Output key_rows({kept, shape.kv_heads}, ScalarType::Long);
  Output value_rows({kept, shape.kv_heads}, ScalarType::Long);
  Output squared_error({kept, shape.query_heads}, ScalarType::Float);
  params.out = out.data<void>();
  params.lse = lse.data<float>();
  if (return_stats) {
    params.key_rows = key_rows.data<int64_t>();
    params.value_rows = value_rows.data<int64_t>();
    params.squared_error = squared_error.data<float>();
  }
  decode(params, torch_parallel_for);
  return {out.release(), lse.release(), key_rows.release(), value_rows.release(), squared_error.release()};
}

std::tuple<Tensor, Tensor> score_op(const Tensor& q, const Tensor& k, std::optional<double> scale,
                                    const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_lens,
                                    std::optional<double> softcap) {
  const CheckedDecode checked = check_decode("santa::score", q, k, nullptr, scale, mask, seq_lens, softcap);
  const DecodeShape& shape = checked.params.shape;
  Tensor scores = empty({shape.batch, shape.query_heads, shape.rows}, ScalarType::Float);
  Tensor maxima = empty({shape.batch, shape.query_heads}, ScalarType::Float);
  score(checked.params, scores.mutable_data_ptr<float>(), maxima.mutable_data_ptr<float>(), torch_parallel_for);
  return {scores, maxima};
}

std::string cpu_level_op() { return std::string(level_name(active_level())); }

void set_cpu_level_op(const Text& level) { set_active_level(parse_level(level, "santa::set_cpu_level")); }

}  // namespace
}  // namespace santa::cpu

STABLE_TORCH_LIBRARY_IMPL(santa, CPU, m) {
  m.impl("decode", TORCH_BOX(&santa::cpu::decode_op));
  m.impl("score", TORCH_BOX(&santa::cpu::score_op));
}

STABLE_TORCH_LIBRARY_IMPL(santa, CompositeExplicitAutograd, m) {
  m.impl("cpu_level", TORCH_BOX(&santa::cpu::cpu_level_op));
  m.impl("set_cpu_level", TORCH_BOX(&santa::cpu::set_cpu_level_op));
}
