#pragma once

#include "step.cuh"
#include "tile.cuh"

// The part of a block that scores: shared by stage "score" and by dense.
namespace santa::cuda {

template <class T>
constexpr int kElements = kVectorBytes / static_cast<int>(sizeof(T));

// Features of one vector of shared memory, in fp32.
template <class T>
__device__ __forceinline__ void load_features(const void* from, float* to) {
  const auto vector = load<kVectorBytes>(from);
#pragma unroll
  for (int e = 0; e < kElements<T>; ++e) {
    if constexpr (sizeof(T) == 4) {
      to[e] = __uint_as_float(vector.word[e]);
    } else {
      to[e] = to_float(T{static_cast<uint16_t>(vector.word[e / 2] >> (e % 2 * 16))});
    }
  }
}

// Scores chunks of one group for some of its heads.
//
// K streams through kStages tiles of rows in shared memory and is read from global memory once, for all heads. A
// warp scores eight rows at once, four lanes to a row: lane r + 8 p adds every fourth vector of features of row r
// from vector p on, for kHeadTile heads at a time, whose queries lie in shared memory as fp32. So a row's sum has
// one order, wherever the row lies: features in order within a part, then parts (0 + 2) + (1 + 3).
template <class T>
class Scorer {
 public:
  // Of one block; `block` counts units (groups times head blocks) and splits.
  __device__ Scorer(const Step& step, int64_t block)
      : step_(step),
        params_(step.params),
        range_(range_of(step.plan.score, block)),
        group_(range_.unit / step.plan.head_blocks),
        b_(group_ / params_.shape.kv_heads),
        kv_(group_ % params_.shape.kv_heads),
        first_(range_.unit % step.plan.head_blocks * step.plan.heads_per_block),
        heads_(static_cast<int>(min(step.plan.heads_per_block, params_.shape.group_size() - first_))),
        length_(length_of(params_, b_)),
        layout_(score_layout(step.plan.heads_per_block, step.plan.query_stride, step.plan.tile_rows,
                             step.plan.key_stride)),
        memory_(dynamic_shared_memory<unsigned char>()),
        tile_{.rows = static_cast<int>(step.plan.tile_rows),
              .row_bytes = static_cast<int>(params_.shape.head_dim * sizeof(T)),
              .padded_bytes = static_cast<int>(step.plan.query_stride * sizeof(T)),
              .row_stride = static_cast<int>(step.plan.key_stride)} {}

  __device__ int64_t group() const { return group_; }
  __device__ int64_t b() const { return b_; }
  __device__ int64_t kv_head() const { return kv_; }
  __device__ int heads() const { return heads_; }
  __device__ int64_t length() const { return length_; }
  // Of head h of the block, within its sequence and over the batch.
  __device__ int64_t local_head(int h) const { return kv_ * params_.shape.group_size() + first_ + h; }
  __device__ int64_t head(int h) const { return b_ * params_.shape.query_heads + local_head(h); }
  __device__ float* scores(int h) const {
    return reinterpret_cast<float*>(memory_ + layout_.scores) + h * kChunkRows;
  }

  // Calls done(chunk) when all threads may read the scores of a chunk, -inf where a head does not attend. They may
  // be overwritten. Every thread of the block calls.
  template <class Done>
  __device__ void run(const Done& done) const {
    const int64_t end = min(range_.end, chunks_of(step_, b_));
    if (range_.begin >= end) return;
    load_queries();
    const int tiles_per_chunk = static_cast<int>(kChunkRows) / tile_.rows;
    const int64_t first_row = range_.begin * kChunkRows;
    pipeline<kStages>((end - range_.begin) * tiles_per_chunk,
                      [&](int64_t t) {
                        if (t % tiles_per_chunk == 0) list_attended(range_.begin + t / tiles_per_chunk);
                        issue(first_row + t * tile_.rows, stage(t));
                      },
                      [&](int64_t t) {
                        const int64_t begin = first_row + t * tile_.rows;
                        score_tile(begin, stage(t));
                        if ((t + 1) % tiles_per_chunk != 0) return;
                        __syncthreads();
                        done(begin / kChunkRows);
                      });
  }

 private:
  __device__ float* query(int h) const { return reinterpret_cast<float*>(memory_) + h * step_.plan.query_stride; }
  __device__ unsigned char* stage(int64_t t) const {
    return memory_ + layout_.stages + t % kStages * tile_.rows * tile_.row_stride;
  }
  __device__ uint8_t& loaded(int64_t row) const { return memory_[layout_.loaded + row % kChunkRows]; }

  // Queries in fp32; zero past the head dim, where rows of K are zero too.
  __device__ void load_queries() const {
    const int stride = static_cast<int>(step_.plan.query_stride);
    for (int i = static_cast<int>(threadIdx.x); i < heads_ * stride; i += kThreads) {
      const int h = i / stride;
      const int d = i % stride;
      const int64_t at = b_ * params_.q_batch_stride + local_head(h) * params_.q_head_stride + d;
      query(h)[d] = d < params_.shape.head_dim ? to_float(static_cast<const T*>(params_.q)[at]) : 0.0f;
    }
  }

  __device__ bool any_attends(int64_t row) const {
    if (row >= length_) return false;
    const int64_t group = params_.shape.group_size();
    const int64_t different = params_.mask.head_stride == 0 ? 1 : group;
    float bias;
    for (int64_t g = 0; g < different; ++g) {
      if (attends(params_.mask, b_, kv_ * group + g, row, &bias)) return true;
    }
    return false;
  }

  // Which rows of a chunk some head of the group attends: only they are read. Where that depends on a mask, all
  // threads look at it together, before the first tile of the chunk is issued.
  __device__ void list_attended(int64_t chunk) const {
    const int64_t begin = chunk * kChunkRows;
    int count = static_cast<int>(max(min(kChunkRows, length_ - begin), int64_t{0}));
    int last = count;
    if (masked()) {
      count = 0;
      last = 0;
      for (int i = static_cast<int>(threadIdx.x); i < kChunkRows; i += kThreads) {
        const bool any = any_attends(begin + i);
        loaded(i) = any ? 1 : 0;
        count += any ? 1 : 0;
        if (any) last = i + 1;
      }
      count = block_sum<kThreads>(count);  // a barrier: the list is complete
      last = block_max<kThreads>(last);
    }
    if (threadIdx.x != 0 || first_ != 0) return;
    int32_t* to = step_.attended + (group_ * step_.plan.chunks + chunk) * 2;
    to[0] = count;
    to[1] = last;
  }

  __device__ bool masked() const { return params_.mask.kind != MaskParams::Kind::kNone; }

  __device__ void issue(int64_t begin, unsigned char* to) const {
    const auto* keys = static_cast<const T*>(params_.k.data);
    copy_rows<kThreads>(step_.key_access, tile_, keys, to, [&](int r) -> const unsigned char* {
      const int64_t row = begin + r;
      if (masked() ? loaded(row) == 0 : row >= length_) return nullptr;
      return reinterpret_cast<const unsigned char*>(keys + params_.k.offset(b_, kv_, row));
    });
  }

  // Warps take eight rows by one tile of heads each.
  __device__ void score_tile(int64_t begin, const unsigned char* tile) const {
    const int octets = tile_.rows / kOctet;
    const int head_tiles = (heads_ + kHeadTile - 1) / kHeadTile;
    for (int i = static_cast<int>(threadIdx.x) / kWarpLanes; i < octets * head_tiles; i += kWarps) {
      score_rows(begin, tile, i % octets * kOctet, i / octets * kHeadTile);
    }
  }

  __device__ void score_rows(int64_t begin, const unsigned char* tile, int first_row, int first_head) const {
    const int part = static_cast<int>(lane_id()) / kOctet;
    const int r = first_row + static_cast<int>(lane_id()) % kOctet;
    const unsigned char* row = tile + r * tile_.row_stride;
    const float* q[kHeadTile];
    float sum[kHeadTile];
#pragma unroll
    for (int h = 0; h < kHeadTile; ++h) {
      q[h] = query(min(first_head + h, heads_ - 1));  // past the last head its sum is made again, for nobody
      sum[h] = 0.0f;
    }
    const int vectors = tile_.padded_bytes / kVectorBytes;
#pragma unroll 2
    for (int v = part; v < vectors; v += kRowParts) {
      float k[kElements<T>];
      load_features<T>(row + v * kVectorBytes, k);
#pragma unroll
      for (int h = 0; h < kHeadTile; ++h) {
        float features[kElements<T>];
#pragma unroll
        for (int e = 0; e < kElements<T>; e += 4) {
          load_features<float>(q[h] + v * kElements<T> + e, features + e);
        }
#pragma unroll
        for (int e = 0; e < kElements<T>; ++e) sum[h] = __fmaf_rn(features[e], k[e], sum[h]);
      }
    }
    float mine = 0.0f;  // lane p of a row keeps head p of the tile
#pragma unroll
    for (int h = 0; h < kHeadTile; ++h) {
      const float whole = warp_sum<kWarpLanes, kOctet>(sum[h]);
      if (h == part) mine = whole;
    }
    const int h = first_head + part;
    if (h >= heads_) return;
    scores(h)[(begin + r) % kChunkRows] = finish(h, begin + r, mine);
  }

  // Scale, cap and mask.
  __device__ float finish(int h, int64_t row, float product) const {
    float bias;
    if (row >= length_ || !attends(params_.mask, b_, local_head(h), row, &bias)) return kNegativeInfinity;
    float score = product * params_.scale;
    if (params_.softcap != 0.0f) score = scalar::capped(score, 0.5f / params_.softcap, params_.softcap);
    return masked() ? __fadd_rn(score, bias) : score;
  }

  const Step& step_;
  const DecodeParams& params_;
  const ChunkRange range_;
  const int64_t group_;
  const int64_t b_;
  const int64_t kv_;
  const int64_t first_;  // of the block's heads, in the group
  const int heads_;
  const int64_t length_;
  const ScoreLayout layout_;
  unsigned char* const memory_;
  const TileShape tile_;

  static_assert(kHeadTile == kRowParts, "a lane of a row keeps one head of a tile");
};

// The largest score of a head in a chunk, from shared memory. A warp calls.
__device__ inline float chunk_maximum(const float* scores) {
  float largest = kNegativeInfinity;
  for (int i = static_cast<int>(lane_id()); i < kChunkRows; i += kWarpLanes) {
    const float score = scores[i];
    if (score > largest || score != score) largest = score;
    if (largest != largest) break;
  }
  return warp_max(largest);
}

}  // namespace santa::cuda
