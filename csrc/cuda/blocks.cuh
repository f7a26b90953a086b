#pragma once

#include "geometry.h"
#include "step.cuh"

// Scores of keys that lie feature by feature, in blocks of kSketchRows rows: a run of memory is one feature of all
// rows of a block, and features that no query uses are not touched.
namespace santa::cuda {

template <class T>
constexpr int kElements = kVectorBytes / static_cast<int>(sizeof(T));

// The features that one lane of each octet adds up: those of its part of a row, ascending. A staged row is cut
// into the same parts (Scorer), so that a sum has the same bits from either layout.
struct FeatureList {
  const int32_t* features;  // [count], in shared memory
  int count;
};

// Places in the list of a part.
template <class T>
__device__ __forceinline__ int features_of_part(int64_t query_stride) {
  const int vectors = static_cast<int>(query_stride) / kElements<T>;
  return (vectors + kRowParts - 1) / kRowParts * kElements<T>;
}

// Lists the features d of a head dim for which uses(d) holds, or feature 0 where it holds for none: its products
// are 0, or NaN as the head is. `memory` has room for kRowParts lists. Every thread of the block calls, and gets
// the list of its lane's part.
template <class T, class Uses>
__device__ __forceinline__ FeatureList list_features(int64_t head_dim, int64_t query_stride, int32_t* memory,
                                                     const Uses& uses) {
  static_assert(kWarps == kRowParts, "a warp lists the features of one part");
  auto& counts = shared_memory<struct FeatureCounts, int[kRowParts]>();
  const int places = features_of_part<T>(query_stride);
  const int lane = static_cast<int>(lane_id());
  const int part = static_cast<int>(threadIdx.x) / kWarpLanes;
  int count = 0;
  for (int base = 0; base < places; base += kWarpLanes) {
    const int i = base + lane;
    const int d = (i / kElements<T> * kRowParts + part) * kElements<T> + i % kElements<T>;
    const bool used = i < places && d < head_dim && uses(d);
    const uint32_t those = __ballot_sync(kAllLanes, used);
    if (used) memory[part * places + count + __popc(those & ((1u << lane) - 1))] = d;
    count += __popc(those);
  }
  if (lane == 0) counts[part] = count;
  __syncthreads();
  if (threadIdx.x == 0) {
    int all = 0;
    for (int p = 0; p < kRowParts; ++p) all += counts[p];
    if (all == 0) {
      memory[0] = 0;
      counts[0] = 1;
    }
  }
  __syncthreads();
  const int mine = lane / kOctet;
  return {memory + mine * places, counts[mine]};
}

// Products of the queries of kHeadTile heads with all rows of a block; write(h, row, product) gets each. A warp
// calls: lane i + 8 p takes eight rows, in vectors of 16 bytes, and the features of part p. Parts are then added
// as (0 + 2) + (1 + 3), while lanes hand half of their rows to one another.
template <class T, int kVectorsAhead, class Write>
__device__ __forceinline__ void score_block(const T* block, const FeatureList& list, const float* q,
                                            const int (&q_at)[kHeadTile], const Write& write) {
  constexpr int kLaneRows = static_cast<int>(kSketchRows) / kOctet;
  constexpr int kVectors = kLaneRows / kElements<T>;
  constexpr int kAhead = (kVectorsAhead + kVectors - 1) / kVectors;  // features on their way
  const int lane = static_cast<int>(lane_id());
  const int part = lane / kOctet;
  const T* mine = block + lane % kOctet * kElements<T>;
  float sum[kHeadTile][kLaneRows];
#pragma unroll
  for (int h = 0; h < kHeadTile; ++h) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) sum[h][r] = 0.0f;
  }
  for (int first = 0; first < list.count; first += kAhead) {
    Words<kVectorBytes> keys[kAhead][kVectors];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= list.count) break;
      const int d = list.features[first + i];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        keys[i][v] = load<kVectorBytes>(mine + d * static_cast<int>(kSketchRows) + v * kOctet * kElements<T>);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= list.count) break;
      const int d = list.features[first + i];
      float feature[kHeadTile];
#pragma unroll
      for (int h = 0; h < kHeadTile; ++h) feature[h] = q[q_at[h] + d];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float k[kElements<T>];
        widen<T>(keys[i][v], k);
#pragma unroll
        for (int e = 0; e < kElements<T>; ++e) {
#pragma unroll
          for (int h = 0; h < kHeadTile; ++h) {
            float& to = sum[h][v * kElements<T> + e];
            to = __fmaf_rn(feature[h], k[e], to);
          }
        }
      }
    }
  }
  constexpr int kHalf = kLaneRows / 2;
  constexpr int kQuarter = kLaneRows / 4;
#pragma unroll
  for (int h = 0; h < kHeadTile; ++h) {
    float half[kHalf];
#pragma unroll
    for (int r = 0; r < kHalf; ++r) {
      const float keep = part / 2 == 0 ? sum[h][r] : sum[h][r + kHalf];
      const float give = part / 2 == 0 ? sum[h][r + kHalf] : sum[h][r];
      half[r] = __fadd_rn(keep, __shfl_xor_sync(kAllLanes, give, 2 * kOctet));
    }
#pragma unroll
    for (int r = 0; r < kQuarter; ++r) {
      const float keep = part % 2 == 0 ? half[r] : half[r + kQuarter];
      const float give = part % 2 == 0 ? half[r + kQuarter] : half[r];
      const float product = __fadd_rn(keep, __shfl_xor_sync(kAllLanes, give, kOctet));
      const int at = part * kQuarter + r;  // of the lane's rows
      write(h, (at / kElements<T> * kOctet + lane % kOctet) * kElements<T> + at % kElements<T>, product);
    }
  }
}

}  // namespace santa::cuda
