#include "planner.h"

#include <initializer_list>
#include <sstream>
#include <stdexcept>

#include "math/layout.h"

namespace santa {
namespace {

constexpr Method kMethods[] = {Method::kDense, Method::kMultinomial, Method::kStratified, Method::kSystematic,
                               Method::kShared};

// Hands out consecutive pieces, each on a cache line of its own: threads write neighbouring pieces.
class Carver {
 public:
  // A piece of as many bytes as the product of the factors. Throws std::invalid_argument past 63 bits: shapes with
  // broadcast (stride 0) dimensions can ask for that without holding any memory.
  int64_t take(std::initializer_list<int64_t> factors) {
    int64_t bytes = 1;
    bool overflow = false;
    for (const int64_t factor : factors) overflow |= __builtin_mul_overflow(bytes, factor, &bytes);
    const int64_t at = end_;
    overflow |= __builtin_add_overflow(bytes, kAlignment - 1, &bytes);
    overflow |= __builtin_add_overflow(end_, bytes / kAlignment * kAlignment, &end_);
    if (overflow || end_ > kMaxBytes) {
      throw std::invalid_argument("santa: q and k are too large together: scratch memory would pass 2^62 bytes");
    }
    return at;
  }
  int64_t end() const { return end_; }

 private:
  static constexpr int64_t kAlignment = 64;
  static constexpr int64_t kMaxBytes = int64_t{1} << 62;  // whoever allocates may round up
  int64_t end_ = 0;
};

}  // namespace

CpuPlan plan_cpu(const DecodeShape& shape, Method method, int64_t rows) {
  const bool sampled = method != Method::kDense;
  const bool shared = method == Method::kShared;
  const int64_t heads = shape.batch * shape.query_heads;
  const int64_t groups = shape.batch * shape.kv_heads;

  CpuPlan plan{};
  plan.rows = rows;
  plan.chunks = chunk_count(rows);
  plan.query_stride = pad(shape.head_dim, kPairFloats);
  plan.value_stride = pad(shape.value_dim);

  const int64_t padded_rows = plan.chunks * kChunkRows;
  const int64_t blocks = padded_rows / kBlockRows;
  Carver carver;
  plan.query = carver.take({heads, plan.query_stride, 4});
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
