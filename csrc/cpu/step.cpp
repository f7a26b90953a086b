#include "step.h"

#include "mask.h"
#include "workspace.h"

namespace santa::cpu {
namespace {

std::vector<int64_t> attended_extents(const DecodeParams& params) {
  const Mask mask(params.mask);
  std::vector<int64_t> extents(params.shape.batch);
  for (int64_t b = 0; b < params.shape.batch; ++b) {
    const int64_t rows = params.seq_lens.data == nullptr ? params.shape.rows : params.seq_lens[b];
    extents[b] = mask.attended_end(b, params.shape.query_heads, rows);
  }
  return extents;
}

}  // namespace

Step::Step(const DecodeParams& step_params, Method method)
    : params(step_params),
      shape(step_params.shape),
      kernels(active_kernels()),
      sinks(step_params.sinks, shape.query_heads),
      results(step_params, sinks, kernels),
      extents(attended_extents(step_params)),
      grid(extents, shape.kv_heads),
      plan(plan_cpu(shape, method, *std::max_element(extents.begin(), extents.end()),
                    step_params.key_blocks.present())),
      memory_(Workspace::of_this_thread().reserve(plan.bytes)) {}

void Step::begin_statistics() const {
  if (params.keys_read == nullptr) return;
  for (int64_t group = 0; group < groups(); ++group) params.keys_read[group] = {0, used_features(group), 0};
}

int64_t Step::grain(bool reads_values) const {
  constexpr int64_t kBytes = 64 << 10;  // waking a thread takes about as long as reading this
  const int64_t row_bytes = (shape.head_dim + (reads_values ? shape.value_dim : 0)) * element_size(shape.dtype);
  return (kBytes - 1) / (std::clamp<int64_t>(plan.rows, 1, kChunkRows) * row_bytes) + 1;
}

// Maxima are exact in any order.
void Step::finish_maxima(int64_t group) const {
  for (int64_t head = first_head(group); head < first_head(group + 1); ++head) {
    const int64_t h = head % shape.query_heads;
    float largest = kNegativeInfinity;
    if (sinks.undefined(h)) {
      maximum(head) = sinks[h];
      continue;
    }
    for (int64_t c = 0; c < chunks_of(group); ++c) {
      const float candidate = chunk_maxima(head)[c];
      if (candidate > largest || candidate != candidate) largest = candidate;
      if (largest != largest) break;
    }
    maximum(head) = largest;
  }
}

}  // namespace santa::cpu
