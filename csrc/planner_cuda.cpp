#include <algorithm>
#include <iomanip>
#include <sstream>
#include <stdexcept>

#include "carver.h"
#include "cuda/geometry.h"
#include "math/draws.h"
#include "math/layout.h"
#include "planner.h"

namespace santa {
namespace {

using namespace cuda;

constexpr int64_t kAlignment = 256;             // as torch's allocator aligns
constexpr int64_t kReservedSharedBytes = 1024;  // that a block takes beside its own
constexpr int64_t kStageBytes = 28 << 10;       // so that several blocks fit on a multiprocessor
constexpr int64_t kLightBlocks = 8;             // per multiprocessor, of kernels that need little more than memory

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As many splits as fill the machine once, with at least `least` chunks each.
Splits cut(int64_t units, int64_t chunks, int64_t blocks, int64_t least) {
  Splits result{.units = units, .splits = 1, .chunks_per_split = std::max<int64_t>(chunks, 1)};
  if (units == 0 || chunks == 0) return result;
  const int64_t wanted = std::max<int64_t>(blocks / units, 1);
  result.chunks_per_split = std::max(ceil_div(chunks, wanted), std::min(least, chunks));
  result.splits = ceil_div(chunks, result.chunks_per_split);
  return result;
}

// Rows of K per tile and heads per block, from what fits into shared memory.
void plan_score(const DecodeShape& shape, const DeviceInfo& device, LaunchPlan* plan) {
  const int64_t elements = kVectorBytes / element_size(shape.dtype);
  const int64_t group = shape.group_size();
  plan->query_stride = pad(shape.head_dim, elements);
  // An odd number of vectors between rows: eight lanes that read one vector each of eight rows meet no bank twice.
  const int64_t vectors = plan->query_stride / elements;
  plan->key_stride = (vectors | 1) * kVectorBytes;
  plan->tile_rows = 64;
  while (plan->tile_rows > kOctet && kStages * plan->tile_rows * plan->key_stride > kStageBytes) {
    plan->tile_rows /= 2;
  }
  const auto bytes = [&](int64_t heads) {
    return score_layout(heads, plan->query_stride, plan->tile_rows, plan->key_stride).bytes;
  };
  const int64_t room = device.shared_bytes - kStaticBytes;
  while (plan->tile_rows > kOctet && bytes(1) > room) plan->tile_rows /= 2;
  if (bytes(1) > room) {
    throw std::invalid_argument("santa: k has a head dim of " + std::to_string(shape.head_dim) +
                                ", too large for the " + std::to_string(device.shared_bytes) +
                                " bytes of shared memory of a block");
  }
  const int64_t per_head = bytes(1) - bytes(0);
  const int64_t fits = (room - bytes(0)) / per_head;
  plan->head_blocks = ceil_div(group, std::min(group, fits));
  plan->heads_per_block = ceil_div(group, plan->head_blocks);
  plan->head_blocks = ceil_div(group, plan->heads_per_block);
  plan->score_shared = bytes(plan->heads_per_block);
  plan->score_resident = std::clamp<int64_t>(
      device.shared_bytes_per_multiprocessor / (plan->score_shared + kStaticBytes + kReservedSharedBytes), 1,
      kScoreBlocks);
}

void plan_memory(const DecodeShape& shape, bool statistics, const KeyReading& reading, LaunchPlan* plan) {
  const bool sampled = plan->method != Method::kDense;
  const bool shared = plan->method == Method::kShared;
  const int64_t heads = shape.batch * shape.query_heads;
  const int64_t groups = shape.batch * shape.kv_heads;
  Carver carver(kAlignment);
  if (reading.bernoulli) {
    plan->query = carver.take({heads, shape.head_dim, 4});
    plan->query_maxima = carver.take({heads, 4});
  }
  if (reading.sketch && statistics) {
    plan->block_rows = carver.take({groups, plan->chunks, kSketchesPerChunk, 4});
  }
  plan->attended = carver.take({groups, plan->chunks, 2, 4});
  plan->chunk_maxima = carver.take({heads, plan->chunks, 4});
  if (sampled) {
    plan->maxima = carver.take({heads, 4});
    plan->scores = carver.take({heads, plan->padded_rows, 4});
    plan->weight_sums = carver.take({heads, plan->chunks, 8});
    plan->totals = carver.take({heads, 8});
    plan->row_mass = carver.take({heads, 4});
    plan->block_sums = carver.take({plan->draw_heads, plan->padded_rows / kBlockRows, 8});
    plan->prefix = carver.take({plan->draw_heads, plan->chunks, 8});
    plan->drawn = carver.take({plan->draw_heads, plan->picks, plan->method == Method::kMultinomial ? 2 : 1, 4});
    plan->begins = carver.take({plan->draw_heads, plan->capacity, 4});
    plan->rows = carver.take({plan->draw_heads, plan->capacity, 8});
    plan->counts = carver.take({plan->draw_heads, plan->capacity, 4});
    plan->num_rows = carver.take({plan->draw_heads, 4});
    plan->coefficients = carver.take({heads, plan->capacity, 4});
    if (statistics) plan->slack = carver.take({plan->draw_heads, plan->capacity, 8});
  } else {
    plan->partial_sums = carver.take({heads, plan->chunks, 4});
    plan->partial_out = carver.take({heads, plan->chunks, plan->value_stride, 4});
  }
  if (shared) {
    plan->inclusion = carver.take({groups, plan->padded_rows, 4});
    plan->inclusion_sums = carver.take({groups, plan->chunks, 8});
  }
  plan->bytes = carver.end();
}

// A stochastic query is taken to use all features of the keys: how many it does is not known before it is drawn.
void predict(const DecodeShape& shape, int64_t samples, const DeviceInfo& device, const KeyReading& reading,
             LaunchPlan* plan) {
  const int64_t heads = shape.batch * shape.query_heads;
  const int64_t groups = shape.batch * shape.kv_heads;
  const int64_t size = element_size(shape.dtype);
  const bool dense = plan->method == Method::kDense;
  const bool shared = plan->method == Method::kShared;
  const int64_t value_rows = dense ? shape.rows : std::min(shape.rows, samples * shape.group_size());
  plan->predicted_kv_bytes =
      groups * size * (shape.rows * shape.head_dim * plan->head_blocks + value_rows * shape.value_dim);
  int64_t scratch = 0;
  if (dense) {
    scratch = 2 * heads * plan->chunks * (plan->value_stride + 2) * 4;  // written once, read once
  } else {
    const int64_t weights = heads * plan->padded_rows * 4;  // scores out and in, weights out; in again with shared
    scratch = (shared ? 4 : 3) * weights + (shared ? groups * plan->padded_rows * 4 : 0);
  }
  if (reading.bernoulli) scratch += 2 * heads * shape.head_dim * 4;
  plan->predicted_bytes = plan->predicted_kv_bytes + scratch;
  plan->predicted_microseconds = device.bytes_per_second > 0.0
                                     ? 1e6 * static_cast<double>(plan->predicted_bytes) / device.bytes_per_second
                                     : 0;
}

void check_grids(const LaunchPlan& plan) {
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  const int64_t merged = plan.method == Method::kDense ? plan.value_slices : 1;
  const int64_t gathered = plan.value_slices * plan.gather_head_blocks;
  for (const int64_t blocks : {plan.score.blocks(), plan.weigh.blocks(), plan.weigh.units * merged,
                               plan.include.blocks(), plan.draw_heads * gathered}) {
    if (blocks > kMaxBlocks) {
      throw std::invalid_argument("santa: q has too many heads in all: " + std::to_string(blocks) +
                                  " blocks, a launch has at most 2^31 - 1");
    }
  }
}

}  // namespace

LaunchPlan plan_launch(const DecodeShape& shape, Method method, int64_t samples, bool statistics,
                       const DeviceInfo& device, const KeyReading& reading) {
  const bool dense = method == Method::kDense;
  const bool shared = method == Method::kShared;
  const int64_t group = shape.group_size();
  const int64_t heads = shape.batch * shape.query_heads;
  const int64_t groups = shape.batch * shape.kv_heads;

  LaunchPlan plan{};
  plan.method = method;
  plan.chunks = chunk_count(shape.rows);
  plan.padded_rows = plan.chunks * kChunkRows;
  plan.draw_heads = shared ? groups : heads;
  plan.capacity = dense ? 0 : std::min(shape.rows, draw_capacity(shared, samples, group));
  plan.picks = shared ? plan.capacity : (dense ? 0 : samples);
  plan.value_stride = pad(shape.value_dim);
  plan_score(shape, device, &plan);
  const int64_t light = device.multiprocessors * kLightBlocks;
  plan.score = cut(groups * plan.head_blocks, plan.chunks, device.multiprocessors * plan.score_resident, 1);
  plan.weigh = cut(heads, plan.chunks, light, kWarps);
  plan.include = cut(groups, plan.chunks, light, kWarps);
  plan.gather_head_blocks = ceil_div(shared ? group : 1, kGatherHeads);
  plan.slice_features = dense ? kMergeFeatures : kSliceFeatures;
  const auto slices = [&] { return std::max<int64_t>(ceil_div(shape.value_dim, plan.slice_features), 1); };
  while (!dense && plan.draw_heads * plan.gather_head_blocks * slices() < device.multiprocessors &&
         plan.slice_features / 2 * element_size(shape.dtype) >= kSliceBytes) {
    plan.slice_features /= 2;
  }
  plan.value_slices = slices();
  plan.launches = (dense ? 2 : (shared ? 5 : 4)) + (reading.bernoulli ? 1 : 0);
  plan.overlap = device.compute_capability >= kOverlapCapability;
  check_grids(plan);
  plan_memory(shape, statistics, reading, &plan);
  predict(shape, samples, device, reading, &plan);
  return plan;
}

std::string LaunchPlan::to_string() const {
  std::ostringstream text;
  const auto splits = [&](const char* name, const Splits& cut) {
    text << "  " << name << ": " << cut.blocks() << " blocks (" << cut.units << " x " << cut.splits
         << " splits of " << cut.chunks_per_split << " chunks)";
  };
  text << "LaunchPlan(" << method_name(method) << ", " << launches << " launches, overlap "
       << (overlap ? "on" : "off") << ")\n";
  splits("score", score);
  text << ", tiles of " << tile_rows << " rows, " << heads_per_block << " heads a block, " << score_shared
       << " bytes of shared memory, " << score_resident << " resident\n";
  if (method == Method::kDense) {
    text << "  merge: " << weigh.units * value_slices << " blocks\n";
  } else {
    splits("weigh", weigh);
    text << "\n";
    if (method == Method::kShared) {
      splits("include", include);
      text << "\n";
    }
    text << "  draw: " << draw_heads << " blocks, at most " << capacity << " rows of " << picks << " draws\n";
    text << "  gather: " << draw_heads * gather_head_blocks * value_slices << " blocks (" << value_slices
         << " slices of " << slice_features << " features)\n";
  }
  text << std::fixed << std::setprecision(1) << "  scratch: " << bytes << " bytes\n";
  text << "  predicted: " << predicted_kv_bytes << " bytes of K and V, " << predicted_bytes << " in all";
  if (predicted_microseconds > 0.0) text << ", " << predicted_microseconds << " us at full bandwidth";
  return text.str();
}

}  // namespace santa
