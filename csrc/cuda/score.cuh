#pragma once

#include "blocks.cuh"
#include "step.cuh"
#include "tile.cuh"

// The part of a block that scores: shared by stage "score" and by dense.
namespace santa::cuda {

// Features of one vector of shared memory, in fp32.
template <class T>
__device__ __forceinline__ void load_features(const void* from, float* to) {
  widen<T>(load<kVectorBytes>(from), to);
}

// Scores chunks of one group for some of its heads.
//
// K streams through kStages tiles of rows in shared memory and is read from global memory once, for all heads. A
// warp scores eight rows at once, four lanes to a row: lane r + 8 p adds every fourth vector of features of row r
// from vector p on, for kHeadTile heads at a time, whose queries lie in shared memory as fp32. So a row's sum has
// one order, wherever the row lies: features in order within a part, then parts (0 + 2) + (1 + 3).
//
// With kSketch rows in whole blocks of the sketch are scored from there before the others, straight from global
// memory with kVectorsAhead vectors of a lane on their way, and queries may be fp32 beside 16-bit keys.
template <class T, bool kSketch, int kVectorsAhead = 4>
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
    int64_t first_row = range_.begin * kChunkRows;
    if constexpr (kSketch) first_row = score_blocks(end, done);
    pipeline<kStages>((end * kChunkRows - first_row) / tile_.rows,
                      [&](int64_t t) {
                        const int64_t begin = first_row + t * tile_.rows;
                        if (begin % kChunkRows == 0) list_attended(begin / kChunkRows);
                        issue(begin, stage(t));
                      },
                      [&](int64_t t) {
                        const int64_t begin = first_row + t * tile_.rows;
                        score_tile(begin, stage(t));
                        if ((begin + tile_.rows) % kChunkRows != 0) return;
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
      if constexpr (kSketch) {
        query(h)[d] = d < params_.shape.head_dim ? load_as_float(params_.q_dtype, params_.q, at) : 0.0f;
      } else {
        query(h)[d] = d < params_.shape.head_dim ? to_float(static_cast<const T*>(params_.q)[at]) : 0.0f;
      }
    }
  }

  // Whether some head of the group, of another block too, needs feature d of the keys.
  __device__ bool uses(int d) const {
    if (!params_.sparse_query) return true;
    const int64_t group = params_.shape.group_size();
    for (int64_t g = 0; g < group; ++g) {
      const int64_t at = b_ * params_.q_batch_stride + (kv_ * group + g) * params_.q_head_stride + d;
      if (needs_keys(load_as_float(params_.q_dtype, params_.q, at))) return true;
    }
    return false;
  }

  // Scores the range's rows in whole blocks of the sketch, and is done with the chunks that have no others.
  // Returns the first row that is left.
  template <class Done>
  __device__ int64_t score_blocks(int64_t end, const Done& done) const {
    const int64_t begin = range_.begin * kChunkRows;
    const int64_t packed = min(params_.key_blocks.packed_rows(b_), end * kChunkRows);
    if (packed <= begin) return begin;
    // Tiles are not under way yet: their memory holds the list.
    const FeatureList list =
        list_features<T>(params_.shape.head_dim, step_.plan.query_stride,
                         reinterpret_cast<int32_t*>(memory_ + layout_.stages), [&](int d) { return uses(d); });
    const int blocks = static_cast<int>(packed / kSketchRows);
    constexpr int kOfChunk = static_cast<int>(kSketchesPerChunk);
    for (int block = static_cast<int>(begin / kSketchRows); block < blocks; block += kOfChunk) {
      list_attended(block / kOfChunk);
      __syncthreads();  // scores of the chunk before have been read
      score_blocks_of_chunk(block, min(blocks - block, kOfChunk), list);
      __syncthreads();
      if (block + kOfChunk <= blocks) done(block / kOfChunk);
    }
    return packed;
  }

  // Warps take one block by one tile of heads each; those that take the same block are at it together.
  __device__ void score_blocks_of_chunk(int first, int blocks, const FeatureList& list) const {
    const int head_tiles = (heads_ + kHeadTile - 1) / kHeadTile;
    for (int i = static_cast<int>(threadIdx.x) / kWarpLanes; i < blocks * head_tiles; i += kWarps) {
      score_block_for(first + i / head_tiles, i % head_tiles * kHeadTile, list);
    }
  }

  __device__ void score_block_for(int block, int first_head, const FeatureList& list) const {
    const int lane = static_cast<int>(lane_id());
    const int64_t begin = block * kSketchRows;
    int attended = static_cast<int>(max(min(kSketchRows, length_ - begin), int64_t{0}));
    if (masked()) attended = warp_sum(int{loaded(begin + lane)} + int{loaded(begin + kWarpLanes + lane)});
    if (step_.block_rows != nullptr && lane == 0 && first_head == 0 && first_ == 0) {
      step_.block_rows[group_ * step_.plan.chunks * kSketchesPerChunk + block] = attended;
    }
    const auto write = [&](int h, int r, float product) {
      if (first_head + h >= heads_) return;
      const int64_t row = block * kSketchRows + r;
      scores(first_head + h)[row % kChunkRows] = finish(first_head + h, row, product);
    };
    if (attended == 0) {
      for (int h = 0; h < kHeadTile; ++h) {
        write(h, lane, 0.0f);
        write(h, lane + kWarpLanes, 0.0f);
      }
      return;
    }
    int q_at[kHeadTile];
#pragma unroll
    for (int h = 0; h < kHeadTile; ++h) {
      q_at[h] = min(first_head + h, heads_ - 1) * static_cast<int>(step_.plan.query_stride);
    }
    const auto* keys = static_cast<const T*>(params_.key_blocks.data);
    score_block<T, kVectorsAhead>(keys + params_.key_blocks.offset(b_, kv_, block), list, query(0), q_at, write);
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
