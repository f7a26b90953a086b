#include "check.h"

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>

#include "math/draws.h"
#include "planner.h"

namespace santa {
namespace {

using torch::headeronly::ScalarType;

// Comparisons of torch's own codes: turning each into an enumerator, to compare those, takes a chain of calls.
bool same_device(const Tensor& a, const Tensor& b) {
  int32_t types[2];
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(a.get(), &types[0]));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(b.get(), &types[1]));
  return types[0] == types[1] && a.get_device_index() == b.get_device_index();
}

bool same_dtype(const Tensor& a, const Tensor& b) {
  int32_t codes[2];
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(a.get(), &codes[0]));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(b.get(), &codes[1]));
  return codes[0] == codes[1];
}

// [B, Hkv, L, D] as one page per sequence that holds all of its rows.
RowAddress address_of(const Tensor& kv) {
  return {.data = kv.const_data_ptr(),
          .page_stride = kv.stride(0),
          .head_stride = kv.stride(1),
          .row_stride = kv.stride(2),
          .page_rows = kv.size(2)};
}

MaskParams check_mask(const std::string& op, const Tensor& mask, const DecodeShape& shape, const Tensor& q) {
  check_device(op, "mask", mask, q);
  MaskParams params;
  switch (mask.scalar_type()) {
    case ScalarType::Bool:
      params.kind = MaskParams::Kind::kBool;
      break;
    case ScalarType::Float:
      params.kind = MaskParams::Kind::kFloat32;
      break;
    case ScalarType::Half:
      params.kind = MaskParams::Kind::kFloat16;
      break;
    case ScalarType::BFloat16:
      params.kind = MaskParams::Kind::kBFloat16;
      break;
    default:
      fail(op, "mask must be bool (true = attend) or additive float32, float16 or bfloat16, got ",
           dtype_text(mask));
  }
  const int64_t target[3] = {shape.batch, shape.query_heads, shape.rows};
  int64_t strides[3] = {0, 0, 0};
  const int64_t missing = 3 - mask.dim();
  bool fits = missing >= 0;
  for (int64_t d = 0; fits && d < mask.dim(); ++d) {
    const int64_t size = mask.size(d);
    fits = size == 1 || size == target[d + missing];
    strides[d + missing] = size == 1 ? 0 : mask.stride(d);
  }
  if (!fits) {
    fail(op, "mask must broadcast to [B, Hq, L] = [", target[0], ", ", target[1], ", ", target[2], "], got ",
         shape_text(mask));
  }
  params.data = mask.const_data_ptr();
  params.batch_stride = strides[0];
  params.head_stride = strides[1];
  params.row_stride = strides[2];
  return params;
}

Lengths check_seq_lens(const std::string& op, const Tensor& seq_lens, const DecodeShape& shape, const Tensor& q) {
  check_device(op, "seq_lens", seq_lens, q);
  const bool wide = seq_lens.scalar_type() == ScalarType::Long;
  if (!wide && seq_lens.scalar_type() != ScalarType::Int) {
    fail(op, "seq_lens must be int32 or int64, got ", dtype_text(seq_lens));
  }
  if (seq_lens.dim() != 1 || seq_lens.size(0) != shape.batch) {
    fail(op, "seq_lens must have shape [B] = [", shape.batch, "], got ", shape_text(seq_lens));
  }
  return {.data = seq_lens.const_data_ptr(), .stride = seq_lens.stride(0), .wide = wide};
}

}  // namespace

void check_dim(const std::string& op, const char* name, const Tensor& tensor, int64_t dim, const char* layout) {
  check_given(op, name, tensor);
  if (tensor.dim() != dim) fail(op, name, " must have shape ", layout, ", got ", shape_text(tensor));
}

void check_last_stride(const std::string& op, const char* name, const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    fail(op, name, " must have a last dimension of stride 1, got stride ", tensor.stride(last), " for shape ",
         shape_text(tensor));
  }
}

Dtype check_dtype(const std::string& op, const char* name, const Tensor& tensor) {
  check_given(op, name, tensor);
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      fail(op, name, " must be float32, float16 or bfloat16, got ", dtype_text(tensor));
  }
}

void check_same_dtype(const std::string& op, const char* name, const Tensor& tensor, const char* other,
                      const Tensor& like) {
  if (!same_dtype(tensor, like)) {
    fail(op, name, " must have the dtype of ", other, " (", dtype_text(like), "), got ", dtype_text(tensor));
  }
}

PerSequence check_per_sequence(const std::string& op, const char* name, const Tensor& tensor, int64_t batch,
                               const Tensor& like) {
  check_device(op, name, tensor, like);
  if (tensor.scalar_type() != ScalarType::Long) fail(op, name, " must be int64, got ", dtype_text(tensor));
  if (tensor.dim() != 1 || (tensor.size(0) != 1 && tensor.size(0) != batch)) {
    fail(op, name, " must have shape [1] or [B] = [", batch, "], got ", shape_text(tensor));
  }
  return {.data = tensor.const_data_ptr<int64_t>(), .stride = tensor.size(0) == 1 ? 0 : tensor.stride(0)};
}

void check_given(const std::string& op, const char* name, const Tensor& tensor) {
  if (!tensor.defined()) fail(op, name, " must be a tensor, got None");
}

void check_device(const std::string& op, const char* name, const Tensor& tensor, const Tensor& like) {
  check_given(op, name, tensor);
  if (!same_device(tensor, like)) {
    const auto text = [](const Tensor& t) {
      return t.is_cpu()    ? std::string("cpu")
             : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index())
                           : "other";
    };
    fail(op, name, " must be on the device of the other tensors (", text(like), "), got ", text(tensor));
  }
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) text += (d == 0 ? "" : ", ") + std::to_string(tensor.size(d));
  return text + "]";
}

std::string dtype_text(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(tensor.scalar_type());
  }
}

DecodeParams check_decode(const std::string& op, const Tensor& q, const Tensor& k, const Tensor* v,
                          std::optional<double> scale, const std::optional<Tensor>& mask,
                          const std::optional<Tensor>& seq_lens, std::optional<double> softcap) {
  const Dtype q_dtype = check_dtype(op, "q", q);
  check_dim(op, "q", q, 3, "[B, Hq, D]");
  check_dim(op, "k", k, 4, "[B, Hkv, L, D]");
  check_device(op, "k", k, q);
  const Dtype dtype = check_dtype(op, "k", k);
  if (v != nullptr || q_dtype != Dtype::kFloat32) check_same_dtype(op, "k", k, "q", q);
  if (k.size(0) != q.size(0)) fail(op, "k must have the batch of q (", q.size(0), "), got ", shape_text(k));
  if (k.size(3) != q.size(2)) fail(op, "k must have the head dim of q (", q.size(2), "), got ", shape_text(k));
  if (q.size(2) < 1) fail(op, "q must have a head dim of at least 1, got ", shape_text(q));
  if (k.size(1) < 1 || q.size(1) < 1 || q.size(1) % k.size(1) != 0) {
    fail(op, "the query heads of q must be a multiple of the KV heads of k, got q ", shape_text(q), " and k ",
         shape_text(k));
  }
  constexpr int64_t kMaxRows = int64_t{1} << 31;
  if (k.size(2) >= kMaxRows) fail(op, "k must have fewer than 2^31 rows, got ", shape_text(k));
  check_last_stride(op, "q", q);
  check_last_stride(op, "k", k);

  DecodeParams params{};
  params.shape = {.batch = q.size(0),
                  .query_heads = q.size(1),
                  .kv_heads = k.size(1),
                  .rows = k.size(2),
                  .head_dim = q.size(2),
                  .value_dim = 0,
                  .dtype = dtype};
  params.q = q.const_data_ptr();
  params.q_dtype = q_dtype;
  params.q_batch_stride = q.stride(0);
  params.q_head_stride = q.stride(1);
  params.k = address_of(k);
  if (v != nullptr) {
    check_dim(op, "v", *v, 4, "[B, Hkv, L, Dv]");
    check_device(op, "v", *v, q);
    check_same_dtype(op, "v", *v, "q", q);
    for (int64_t d = 0; d < 3; ++d) {
      if (v->size(d) != k.size(d)) {
        fail(op, "v must have the batch, KV heads and rows of k, got k ", shape_text(k), " and v ",
             shape_text(*v));
      }
    }
    if (v->size(3) < 1) fail(op, "v must have a head dim of at least 1, got ", shape_text(*v));
    check_last_stride(op, "v", *v);
    params.shape.value_dim = v->size(3);
    params.v = address_of(*v);
  }
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(2))));
  params.scale = static_cast<float>(factor);
  if (!std::isfinite(params.scale)) fail(op, "scale must be finite in float32, got ", factor);
  if (softcap.has_value()) {
    params.softcap = static_cast<float>(*softcap);
    if (params.softcap <= 0.0f || !std::isfinite(params.softcap)) {
      fail(op, "softcap must be positive and finite in float32, got ", *softcap);
    }
  }
  if (mask.has_value()) params.mask = check_mask(op, *mask, params.shape, q);
  if (seq_lens.has_value()) params.seq_lens = check_seq_lens(op, *seq_lens, params.shape, q);
  return params;
}

void check_lengths(const std::string& op, const DecodeParams& params) {
  const KeyBlocks& blocks = params.key_blocks;
  for (int64_t b = 0; blocks.present() && b < params.shape.batch; ++b) {
    const int64_t held = blocks.rows[b * blocks.rows_stride];
    const int64_t most = std::min(params.shape.rows, (blocks.capacity + 1) * kSketchRows - 1);
    if (held < 0 || held > most) {
      fail(op, "block_rows[", b, "] must be between 0 and ", most, ", for ", params.shape.rows, " rows of k and ",
           blocks.capacity, " blocks, got ", held);
    }
  }
  for (int64_t b = 0; params.seq_lens.data != nullptr && b < params.shape.batch; ++b) {
    const int64_t length = params.seq_lens[b];
    if (length < 0 || length > params.shape.rows) {
      fail(op, "seq_lens[", b, "] must be between 0 and the rows of k (", params.shape.rows, "), got ", length);
    }
  }
}

SinkParams check_sinks(const std::string& op, const Tensor& sinks, const DecodeShape& shape, const Tensor& q) {
  check_device(op, "sinks", sinks, q);
  const Dtype dtype = check_dtype(op, "sinks", sinks);
  if (sinks.dim() != 1 || sinks.size(0) != shape.query_heads) {
    fail(op, "sinks must have shape [Hq] = [", shape.query_heads, "], got ", shape_text(sinks));
  }
  return {.data = sinks.const_data_ptr(), .stride = sinks.stride(0), .dtype = dtype};
}

CheckedValues check_values(const std::string& op, const Tensor& v, int64_t batch, int64_t query_heads) {
  const Dtype dtype = check_dtype(op, "v", v);
  check_dim(op, "v", v, 4, "[B, Hkv, L, Dv]");
  check_last_stride(op, "v", v);
  if (query_heads < 1) fail(op, "coefficients must have at least one query head, got ", query_heads);
  if (v.size(0) != batch || v.size(1) < 1 || query_heads % v.size(1) != 0 || v.size(3) < 1) {
    fail(op, "v must have shape [B, Hkv, L, Dv] with B = ", batch, " and Hkv a divisor of ", query_heads, ", got ",
         shape_text(v));
  }
  return {.shape = {.batch = batch,
                    .query_heads = query_heads,
                    .kv_heads = v.size(1),
                    .rows = v.size(2),
                    .head_dim = 0,
                    .value_dim = v.size(3),
                    .dtype = dtype},
          .address = address_of(v)};
}

DrawParams check_draw(const std::string& op, const std::string& method, int64_t samples, const Tensor& seed,
                      const std::optional<Tensor>& position, int64_t layer, int64_t head_offset, int64_t batch,
                      int64_t query_heads, const Tensor& like) {
  DrawParams draw{};
  draw.method = parse_method(method, op);
  if (samples < 1 || samples > kMaxSamples) {
    fail(op, "samples must be between 1 and 2^24 = ", kMaxSamples, ", got ", samples);
  }
  if (layer < 0 || layer >= int64_t{1} << 24) fail(op, "layer must be between 0 and 2^24 - 1, got ", layer);
  if (head_offset < 0 || head_offset > (int64_t{1} << 32) - query_heads) {
    fail(op, "head_offset must be at least 0 and leave head indices below 2^32, got ", head_offset);
  }
  draw.samples = samples;
  draw.seed = check_per_sequence(op, "seed", seed, batch, like);
  if (position.has_value()) draw.position = check_per_sequence(op, "position", *position, batch, like);
  draw.layer = layer;
  draw.head_offset = head_offset;
  return draw;
}

}  // namespace santa
