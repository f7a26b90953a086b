#include "planner.h"

#include <sstream>
#include <stdexcept>

#include "carver.h"
#include "math/layout.h"

namespace santa {
namespace {

constexpr Method kMethods[] = {Method::kDense, Method::kMultinomial, Method::kStratified, Method::kSystematic,
                               Method::kShared};

constexpr int64_t kLineBytes = 64;  // threads write neighbouring pieces

}  // namespace

CpuPlan plan_cpu(const DecodeShape& shape, Method method, int64_t rows, bool blocks_of_keys) {
  const bool sampled = method != Method::kDense;
  const bool shared = method == Method::kShared;
  const int64_t heads = shape.batch * shape.query_heads;
  const int64_t groups = shape.batch * shape.kv_heads;

  CpuPlan plan{};
  plan.rows = rows;
  plan.chunks = chunk_count(rows);
  plan.query_stride = pad(shape.head_dim, kPairFloats);
  plan.block_stride = pad(shape.group_size(), kHeadPad);
  plan.value_stride = pad(shape.value_dim);

  const int64_t padded_rows = plan.chunks * kChunkRows;
  const int64_t blocks = padded_rows / kBlockRows;
  Carver carver(kLineBytes);
  plan.query = carver.take({heads, plan.query_stride, 4});
  plan.used_features = carver.take({groups, 8});
  plan.chunk_maxima = carver.take({heads, plan.chunks, 4});
  plan.maxima = carver.take({heads, 4});
  if (sampled) {
    plan.totals = carver.take({heads, 8});
    plan.row_mass = carver.take({heads, 4});
    plan.scores = carver.take({heads, padded_rows, 4});
    plan.weight_sums = carver.take({heads, plan.chunks, 8});
    plan.block_sums = carver.take({shared ? groups : heads, blocks, 8});
  }
  if (shared) {
    plan.inclusion = carver.take({groups, padded_rows, 4});
    plan.inclusion_sums = carver.take({groups, plan.chunks, 8});
  }
  if (!sampled) {
    plan.partial_sums = carver.take({heads, plan.chunks, 4});
    plan.partial_out = carver.take({heads, plan.chunks, plan.value_stride, 4});
  }
  if (blocks_of_keys) {
    plan.block_query = carver.take({groups, shape.head_dim, plan.block_stride, 4});
    plan.features = carver.take({groups, shape.head_dim, 4});
    plan.ascending = carver.take({groups, shape.head_dim, 4});
    plan.lane_ends = carver.take({groups, kMaxLanes, 4});
  }
  plan.bytes = carver.end();
  return plan;
}

std::string CpuPlan::to_string() const {
  std::ostringstream text;
  text << "CpuPlan(rows=" << rows << ", chunks=" << chunks << ", chunk_rows=" << kChunkRows
       << ", scratch_bytes=" << bytes << ")";
  return text.str();
}

const char* method_name(Method method) {
  switch (method) {
    case Method::kDense:
      return "dense";
    case Method::kMultinomial:
      return "multinomial";
    case Method::kStratified:
      return "stratified";
    case Method::kSystematic:
      return "systematic";
    case Method::kShared:
      return "shared";
  }
  return "unknown";
}

Method parse_method(const std::string& name, const std::string& op) {
  for (const Method method : kMethods) {
    if (name == method_name(method)) return method;
  }
  std::string known;
  for (const Method method : kMethods) known += (known.empty() ? "" : ", ") + std::string(method_name(method));
  throw std::invalid_argument(op + ": method must be one of " + known + "; got '" + name + "'");
}

}  // namespace santa
