#pragma once

#include <optional>
#include <string>

#include "check.h"

// Checks of the stage operators "weigh", "draw" and "gather": shapes, dtypes and devices. What the tensors hold is
// looked at by the CPU backend alone: on a GPU that would wait for it.
namespace santa {

// Where a backend's tensors are.
struct Home {
  bool (*holds)(const Tensor&);
  const char* text;  // "on the CPU"
};
inline constexpr Home kCpuHome = {[](const Tensor& tensor) { return tensor.is_cpu(); }, "on the CPU"};

// Contiguous inputs.
struct WeighInputs {
  Tensor scores;  // float32 [B, Hq, L]
  Tensor maxima;  // float32 [B, Hq]
};
WeighInputs check_weigh(const Home& home, const Tensor& scores, const Tensor& maxima);

struct DrawInputs {
  Tensor weights;                  // int32 [B, Hq, L]
  std::optional<Tensor> row_mass;  // float32 [B, Hq]
  DecodeShape shape;               // its batch, heads and rows
  DrawParams params;

  bool shared() const { return params.method == Method::kShared; }
  int64_t draw_heads() const { return shared() ? shape.kv_heads : shape.query_heads; }
  int64_t capacity() const;
};
DrawInputs check_draw_inputs(const Home& home, const Tensor& weights, int64_t samples, const std::string& method,
                             int64_t kv_heads, const Tensor& seed, const Tensor& position, int64_t layer,
                             int64_t head_offset, const std::optional<Tensor>& row_mass);

struct GatherInputs {
  Tensor rows;          // int64 [B, row_heads, capacity]
  Tensor coefficients;  // float32 [B, Hq, capacity]
  Tensor num_rows;      // int32 [B, row_heads]
  CheckedValues values;
  int64_t row_heads;  // Hq or Hkv
  int64_t capacity;
};
GatherInputs check_gather(const Home& home, const Tensor& rows, const Tensor& coefficients, const Tensor& num_rows,
                          const Tensor& v);

}  // namespace santa
