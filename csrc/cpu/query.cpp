#include "query.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../math/bernoulli.h"
#include "kernels.h"
#include "step.h"

namespace santa::cpu {
namespace {

// Widens the query of one head, [D].
void widen_query(const DecodeParams& params, const KernelTable& kernels, int64_t head, float* to) {
  const DecodeShape& shape = params.shape;
  const int64_t offset =
      head / shape.query_heads * params.q_batch_stride + head % shape.query_heads * params.q_head_stride;
  kernels.widen[static_cast<int>(params.q_dtype)](
      static_cast<const char*>(params.q) + offset * element_size(params.q_dtype), shape.head_dim, to);
}

// Replaces the queries of one group, [G, stride], by stochastic ones.
class Randomizer {
 public:
  Randomizer(const DecodeParams& params, int64_t group, int64_t position, float* q, int64_t stride)
      : params_(params),
        dim_(params.shape.head_dim),
        heads_(params.shape.group_size()),
        q_(q),
        stride_(stride),
        largest_(heads_) {
    const int64_t b = group / params.shape.kv_heads;
    key_ = {.seed = params.draw.seed[b],
            .position = position,
            .layer = params.draw.layer,
            .global_head = params.draw.head_offset + group % params.shape.kv_heads * heads_};
  }

  void run() {
    for (int64_t h = 0; h < heads_; ++h) {
      largest_[h] = largest(q_ + h * stride_);
      if (!is_finite(largest_[h])) {
        std::fill_n(q_ + h * stride_, dim_, std::numeric_limits<float>::quiet_NaN());
      } else if (!params_.bernoulli.shared) {
        draw_head(h);
      }
    }
    if (params_.bernoulli.shared) draw_group();
  }

 private:
  // NaN where any feature is.
  float largest(const float* q) const {
    float largest = 0.0f;
    for (int64_t d = 0; d < dim_; ++d) {
      const float size = std::fabs(q[d]);
      if (!(size <= largest)) largest = size;
      if (largest != largest) break;
    }
    return largest;
  }

  void draw_head(int64_t h) {
    float* q = q_ + h * stride_;
    const float most = largest_[h];
    if (most == 0.0f) return;
    const int64_t draws = params_.bernoulli.draws;
    DrawKey key = key_;
    key.global_head += h;
    Philox4x32 words{};  // of four features
    for (int64_t d = 0; d < dim_; ++d) {
      if (d % 4 == 0) words = random_words(key, static_cast<uint32_t>(d / 4), Stream::kFeatures);
      const int64_t count = ternary_count(words.word[d % 4], draws, feature_chance(std::fabs(q[d]), most));
      q[d] = ternary_mean(q[d], most, count, draws);
    }
  }

  void draw_group() {
    float most = 0.0f;
    for (const float largest : largest_) {
      if (is_finite(largest)) most = std::max(most, largest);
    }
    if (most == 0.0f) return;
    std::vector<float> sizes(dim_, 0.0f);
    for (int64_t h = 0; h < heads_; ++h) {
      if (!is_finite(largest_[h])) continue;
      for (int64_t d = 0; d < dim_; ++d) sizes[d] = add_feature_square(sizes[d], q_[h * stride_ + d], most);
    }
    for (float& size : sizes) size = std::sqrt(size);
    const float largest_size = *std::max_element(sizes.begin(), sizes.end());
    const uint64_t bits = random64(key_, 0, Stream::kFeatures);
    uint64_t before = 0;
    for (int64_t d = 0; d < dim_; ++d) {
      const uint32_t inclusion =
          feature_inclusion(feature_chance(sizes[d], largest_size), params_.bernoulli.draws);
      const bool taken = takes_feature(before, inclusion, bits);
      before += inclusion;
      for (int64_t h = 0; h < heads_; ++h) {
        float& q = q_[h * stride_ + d];
        if (is_finite(largest_[h])) q = taken ? expanded_feature(q, inclusion) : 0.0f;
      }
    }
  }

  const DecodeParams& params_;
  const int64_t dim_;
  const int64_t heads_;
  float* const q_;
  const int64_t stride_;
  DrawKey key_;
  std::vector<float> largest_;  // [G]
};

// Groups that are worth a thread.
int64_t grain(const DecodeParams& params) {
  constexpr int64_t kFeatures = 4096;
  return 1 + kFeatures / (params.shape.group_size() * params.shape.head_dim);
}

// Whether the query of some head needs feature d of the keys; a head that is NaN is so whatever they hold.
bool is_used(const float* q, int64_t stride, int64_t heads, int64_t d) {
  for (int64_t h = 0; h < heads; ++h) {
    const float feature = q[h * stride + d];
    if (feature != 0.0f && feature == feature) return true;
  }
  return false;
}

// Lane that the tree of additions visits as its i-th leaf: within quarters of 4 lanes 0, 2, 1, 3, and quarters
// alike.
int64_t lane_of_leaf(int64_t i, int64_t lanes) {
  constexpr int64_t kOrder[] = {0, 2, 1, 3};
  const int64_t quarter = lanes > 8 ? kOrder[i / 4] : i / 4;
  return 4 * quarter + kOrder[i % 4];
}

// The features of a group that are read, and its queries feature by feature.
void arrange(const Step& step, int64_t group) {
  const DecodeShape& shape = step.shape;
  const int64_t heads = step.group_size();
  const float* q = step.query(step.first_head(group));
  const int64_t stride = step.plan.query_stride;
  const int64_t lanes = step.kernels.lanes;
  int64_t& used = step.used_features(group);
  used = 0;
  for (int64_t d = 0; d < shape.head_dim; ++d) {
    if (!step.params.sparse_query || is_used(q, stride, heads, d)) ++used;
  }
  const bool none = used == 0;  // then feature 0 stands in, whose products are 0 or NaN as its head is
  used = std::max<int64_t>(used, 1);
  if (!step.params.key_blocks.present()) return;
  const auto is_read = [&](int64_t d) {
    return !step.params.sparse_query || (none ? d == 0 : is_used(q, stride, heads, d));
  };
  int32_t* at = step.features(group);
  for (int64_t i = 0; i < lanes; ++i) {
    for (int64_t d = lane_of_leaf(i, lanes); d < shape.head_dim; d += lanes) {
      if (is_read(d)) *at++ = static_cast<int32_t>(d);
    }
    step.lane_ends(group)[i] = static_cast<int32_t>(at - step.features(group));
  }
  std::copy(step.features(group), at, step.ascending(group));
  std::sort(step.ascending(group), step.ascending(group) + used);
  float* to = step.block_query(group);
  for (int64_t d = 0; d < shape.head_dim; ++d) {
    for (int64_t h = 0; h < heads; ++h) to[d * step.plan.block_stride + h] = q[h * stride + d];
  }
}

}  // namespace

void prepare_queries(const Step& step, const ParallelFor& parallel_for) {
  const DecodeParams& params = step.params;
  const bool stochastic = params.bernoulli.draws != 0;
  const auto prepare = [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      for (int64_t head = step.first_head(group); head < step.first_head(group + 1); ++head) {
        float* to = step.query(head);
        widen_query(params, step.kernels, head, to);
        std::fill(to + step.shape.head_dim, to + step.plan.query_stride, 0.0f);
      }
      if (stochastic) {
        const int64_t b = step.batch_of(group);
        const int64_t position = params.draw.position.data != nullptr ? params.draw.position[b] : step.extents[b];
        Randomizer(params, group, position, step.query(step.first_head(group)), step.plan.query_stride).run();
      }
      step.used_features(group) = step.shape.head_dim;
      if (stochastic || params.key_blocks.present()) arrange(step, group);
    }
  };
  stochastic ? parallel_for(step.groups(), grain(params), prepare) : prepare(0, step.groups());
}

void bernoulli_query(const DecodeParams& params, float* to, const ParallelFor& parallel_for) {
  const DecodeShape& shape = params.shape;
  const int64_t heads = shape.group_size();
  parallel_for(shape.batch * shape.kv_heads, grain(params), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      float* q = to + group * heads * shape.head_dim;
      for (int64_t h = 0; h < heads; ++h) {
        widen_query(params, active_kernels(), group * heads + h, q + h * shape.head_dim);
      }
      Randomizer(params, group, params.draw.position[group / shape.kv_heads], q, shape.head_dim).run();
    }
  });
}

}  // namespace santa::cpu
