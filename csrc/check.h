#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "params.h"

// Argument checks, shared by every backend and called inside the operators, where the dispatcher cannot bypass
// them. Errors are std::invalid_argument (ValueError in Python) and say "<op>: <argument> must ..., got <value>".
namespace santa {

using torch::stable::Tensor;

// Every argument of a decode step that does not concern drawing, sinks or a sketch. Without `v` (stage "score") q
// may be float32 whatever the keys are: a stochastic query is.
DecodeParams check_decode(const std::string& op, const Tensor& q, const Tensor& k, const Tensor* v,
                          std::optional<double> scale, const std::optional<Tensor>& mask,
                          const std::optional<Tensor>& seq_lens, std::optional<double> softcap);

// Lengths and rows of a sketch themselves, of a backend that can read them here and now.
void check_lengths(const std::string& op, const DecodeParams& params);

// One logit per query head.
SinkParams check_sinks(const std::string& op, const Tensor& sinks, const DecodeShape& shape, const Tensor& q);

// Arguments of a draw for `batch` sequences and `query_heads` local heads.
DrawParams check_draw(const std::string& op, const std::string& method, int64_t samples, const Tensor& seed,
                      const std::optional<Tensor>& position, int64_t layer, int64_t head_offset, int64_t batch,
                      int64_t query_heads, const Tensor& like);

// The values of stage "gather" for `batch` sequences and `query_heads` heads.
struct CheckedValues {
  DecodeShape shape;
  RowAddress address;
};
CheckedValues check_values(const std::string& op, const Tensor& v, int64_t batch, int64_t query_heads);

// The dtype of a tensor of floating-point numbers that kernels know.
Dtype check_dtype(const std::string& op, const char* name, const Tensor& tensor);
void check_dim(const std::string& op, const char* name, const Tensor& tensor, int64_t dim, const char* layout);
void check_last_stride(const std::string& op, const char* name, const Tensor& tensor);
void check_same_dtype(const std::string& op, const char* name, const Tensor& tensor, const char* other,
                      const Tensor& like);

// An int64 for each sequence.
PerSequence check_per_sequence(const std::string& op, const char* name, const Tensor& tensor, int64_t batch,
                               const Tensor& like);

// A tensor at all: the dispatcher lets None pass for one.
void check_given(const std::string& op, const char* name, const Tensor& tensor);

// On the device of another.
void check_device(const std::string& op, const char* name, const Tensor& tensor, const Tensor& like);

// "[2, 3, 64]"
std::string shape_text(const Tensor& tensor);
// "float32", "int64", ...
std::string dtype_text(const Tensor& tensor);

// Throws std::invalid_argument with the parts of the message joined.
template <class... Parts>
[[noreturn]] void fail(const std::string& op, const Parts&... parts) {
  std::ostringstream text;
  text << op << ": ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

}  // namespace santa
