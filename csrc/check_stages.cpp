#include "check_stages.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <initializer_list>

#include "math/draws.h"

namespace santa {
namespace {

using torch::headeronly::ScalarType;

void check_tensor(const std::string& op, const Home& home, const char* name, const Tensor& tensor, int64_t dim,
                  ScalarType dtype, const char* layout) {
  check_given(op, name, tensor);
  if (tensor.dim() != dim || tensor.scalar_type() != dtype || !home.holds(tensor)) {
    fail(op, name, " must be ", layout, " ", home.text, ", got ", dtype_text(tensor), " ", shape_text(tensor));
  }
}

bool same_sizes(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  return std::equal(sizes.begin(), sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
}

}  // namespace

WeighInputs check_weigh(const Home& home, const Tensor& scores, const Tensor& maxima) {
  const std::string op = "santa::weigh";
  check_tensor(op, home, "scores", scores, 3, ScalarType::Float, "float32 [B, Hq, L]");
  check_tensor(op, home, "maxima", maxima, 2, ScalarType::Float, "float32 [B, Hq]");
  check_device(op, "maxima", maxima, scores);
  if (!same_sizes(maxima, {scores.size(0), scores.size(1)})) {
    fail(op, "maxima must have shape [B, Hq] of scores ", shape_text(scores), ", got ", shape_text(maxima));
  }
  return {torch::stable::contiguous(scores), torch::stable::contiguous(maxima)};
}

int64_t DrawInputs::capacity() const {
  return std::min(shape.rows, draw_capacity(shared(), params.samples, shape.group_size()));
}

DrawInputs check_draw_inputs(const Home& home, const Tensor& weights, int64_t samples, const std::string& method,
                             int64_t kv_heads, const Tensor& seed, const Tensor& position, int64_t layer,
                             int64_t head_offset, const std::optional<Tensor>& row_mass) {
  const std::string op = "santa::draw";
  check_tensor(op, home, "weights", weights, 3, ScalarType::Int, "int32 [B, Hq, L]");
  const int64_t batch = weights.size(0);
  const int64_t heads = weights.size(1);
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    fail(op, "kv_heads must be at least 1 and divide the query heads of weights ", shape_text(weights), ", got ",
         kv_heads);
  }
  constexpr int64_t kMaxRows = int64_t{1} << 31;
  if (weights.size(2) >= kMaxRows) fail(op, "weights must have fewer than 2^31 rows, got ", shape_text(weights));
  DrawInputs inputs{
      .weights = torch::stable::contiguous(weights),
      .row_mass = std::nullopt,
      .shape = {.batch = batch,
                .query_heads = heads,
                .kv_heads = kv_heads,
                .rows = weights.size(2),
                .head_dim = 1,
                .value_dim = 1,
                .dtype = Dtype::kFloat32},
      .params = check_draw(op, method, samples, seed, position, layer, head_offset, batch, heads, weights)};
  if (inputs.params.method == Method::kDense) fail(op, "method must be one that draws, got 'dense'");
  if (!row_mass.has_value()) return inputs;
  check_tensor(op, home, "row_mass", *row_mass, 2, ScalarType::Float, "float32 [B, Hq]");
  check_device(op, "row_mass", *row_mass, weights);
  if (!same_sizes(*row_mass, {batch, heads})) {
    fail(op, "row_mass must have shape [B, Hq] = [", batch, ", ", heads, "], got ", shape_text(*row_mass));
  }
  inputs.row_mass = torch::stable::contiguous(*row_mass);
  return inputs;
}

GatherInputs check_gather(const Home& home, const Tensor& rows, const Tensor& coefficients, const Tensor& num_rows,
                          const Tensor& v) {
  const std::string op = "santa::gather";
  check_tensor(op, home, "rows", rows, 3, ScalarType::Long, "int64 [B, Hq or Hkv, capacity]");
  check_tensor(op, home, "coefficients", coefficients, 3, ScalarType::Float, "float32 [B, Hq, capacity]");
  check_tensor(op, home, "num_rows", num_rows, 2, ScalarType::Int, "int32 [B, Hq or Hkv]");
  const int64_t batch = coefficients.size(0);
  const int64_t heads = coefficients.size(1);
  const int64_t capacity = rows.size(2);
  const CheckedValues values = check_values(op, v, batch, heads);
  for (const auto& [name, tensor] :
       {std::pair{"coefficients", &coefficients}, {"num_rows", &num_rows}, {"v", &v}}) {
    check_device(op, name, *tensor, rows);
  }
  const int64_t row_heads = rows.size(1);
  if (rows.size(0) != batch || (row_heads != heads && row_heads != values.shape.kv_heads) ||
      coefficients.size(2) != capacity) {
    fail(op, "rows must have shape [B, Hq or Hkv, capacity] for coefficients ", shape_text(coefficients),
         " and v ", shape_text(v), ", got ", shape_text(rows));
  }
  if (!same_sizes(num_rows, {batch, row_heads})) {
    fail(op, "num_rows must have shape [", batch, ", ", row_heads, "], got ", shape_text(num_rows));
  }
  return {.rows = torch::stable::contiguous(rows),
          .coefficients = torch::stable::contiguous(coefficients),
          .num_rows = torch::stable::contiguous(num_rows),
          .values = values,
          .row_heads = row_heads,
          .capacity = capacity};
}

}  // namespace santa
