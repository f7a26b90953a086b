#pragma once

#include "../math/softmax.h"
#include "../math/weights.h"
#include "device.cuh"
#include "geometry.h"
#include "step.h"

// How kernels read a Step.
namespace santa::cuda {

// One fp32 number as math/functions-inl.h wants it. Nothing is fused that is not asked for.
namespace scalar {

using F = float;
using I = uint32_t;

struct Isa {
  static __device__ F set1(float x) { return x; }
  static __device__ F add(F a, F b) { return __fadd_rn(a, b); }
  static __device__ F mul(F a, F b) { return __fmul_rn(a, b); }
  static __device__ F div(F a, F b) { return __fdiv_rn(a, b); }
  static __device__ F fma(F a, F b, F c) { return __fmaf_rn(a, b, c); }
  static __device__ F sqrt(F x) { return __fsqrt_rn(x); }
  static __device__ F min(F a, F b) { return a < b ? a : b; }
  static __device__ F max(F a, F b) { return a > b ? a : b; }
  static __device__ F round(F x) { return rintf(x); }
  static __device__ I to_int(F x) { return static_cast<I>(rintf(x)); }
  static __device__ F to_float(I x) { return static_cast<F>(static_cast<int32_t>(x)); }
  static __device__ F scale_by_power(F x, F n) {
    return __fmul_rn(x, __int_as_float((static_cast<int32_t>(n) + 127) << 23));
  }
  static __device__ F zero_below(F x, F limit, F value) { return x < limit ? 0.0f : value; }
};

#define SANTA_FUNCTION __device__ inline
#include "../math/functions-inl.h"
#undef SANTA_FUNCTION

}  // namespace scalar

// A number of any type that inputs come in.
__device__ inline float load_as_float(Dtype dtype, const void* data, int64_t at) {
  switch (dtype) {
    case Dtype::kFloat16:
      return to_float(static_cast<const Half*>(data)[at]);
    case Dtype::kBFloat16:
      return to_float(static_cast<const BFloat*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

// The numbers of one vector, in fp32.
template <class T>
__device__ __forceinline__ void widen(const Words<kVectorBytes>& vector, float* to) {
#pragma unroll
  for (int e = 0; e < kVectorBytes / static_cast<int>(sizeof(T)); ++e) {
    if constexpr (sizeof(T) == 4) {
      to[e] = __uint_as_float(vector.word[e]);
    } else {
      to[e] = to_float(T{static_cast<uint16_t>(vector.word[e / 2] >> (e % 2 * 16))});
    }
  }
}

// Whether a feature of a query needs that of the keys: its product with them is neither 0 nor, since its head is,
// NaN anyway.
__device__ inline bool needs_keys(float feature) { return feature != 0.0f && feature == feature; }

// Whether head h of sequence b attends row j, and the number to add to its score. A row is selected or it is not:
// what an additive mask holds for a row that it does not select is never added to anything.
__device__ inline bool attends(const MaskParams& mask, int64_t b, int64_t h, int64_t j, float* bias) {
  const int64_t at = b * mask.batch_stride + h * mask.head_stride + j * mask.row_stride;
  *bias = 0.0f;
  switch (mask.kind) {
    case MaskParams::Kind::kNone:
      return true;
    case MaskParams::Kind::kBool:
      return static_cast<const uint8_t*>(mask.data)[at] != 0;
    case MaskParams::Kind::kFloat32:
      *bias = load_as_float(Dtype::kFloat32, mask.data, at);
      break;
    case MaskParams::Kind::kFloat16:
      *bias = load_as_float(Dtype::kFloat16, mask.data, at);
      break;
    case MaskParams::Kind::kBFloat16:
      *bias = load_as_float(Dtype::kBFloat16, mask.data, at);
      break;
  }
  return !(*bias <= mask.lowest());  // NaN is attended, and surfaces
}

// Rows of a sequence. A length that its cache does not have is cut to one that it has: nothing on the host may
// look.
__device__ inline int64_t length_of(const DecodeParams& params, int64_t b) {
  if (params.seq_lens.data == nullptr) return params.shape.rows;
  const int64_t length = params.seq_lens[b];
  return length < 0 ? 0 : length < params.shape.rows ? length : params.shape.rows;
}

__device__ inline int64_t chunks_of(const Step& step, int64_t b) {
  return step.whole ? step.plan.chunks : chunk_count(length_of(step.params, b));
}

// The chunks of one block.
struct ChunkRange {
  int64_t unit;
  int64_t split;
  int64_t begin;
  int64_t end;
};

__device__ inline ChunkRange range_of(const Splits& splits, int64_t block) {
  const int64_t split = block % splits.splits;
  const int64_t begin = split * splits.chunks_per_split;
  return {block / splits.splits, split, begin, begin + splits.chunks_per_split};
}

// Calls launch(T{}) with the storage type of a dtype.
template <class F>
void launch_for_dtype(Dtype dtype, const F& launch) {
  switch (dtype) {
    case Dtype::kFloat32:
      return launch(float{});
    case Dtype::kFloat16:
      return launch(Half{});
    case Dtype::kBFloat16:
      return launch(BFloat{});
  }
}

// --- Sinks.

__device__ inline float sink_of(const SinkParams& sinks, int64_t head) {
  return load_as_float(sinks.dtype, sinks.data, head * sinks.stride);
}

// The largest logit that says whether the softmax of a head is defined: a sink of NaN or +inf makes it NaN.
__device__ inline float with_sink(const DecodeParams& params, int64_t h, float maximum) {
  if (params.sinks.data == nullptr) return maximum;
  const float sink = sink_of(params.sinks, h);
  return sink < -kNegativeInfinity ? maximum : sink;
}

// Share of the softmax that lies on rows, for a live head.
__device__ inline double row_share(const DecodeParams& params, int64_t h, double lse) {
  return params.sinks.data == nullptr ? 1.0 : share_of_rows(lse, static_cast<double>(sink_of(params.sinks, h)));
}

// The log-sum-exp that a head returns; `lse` is that of its rows, and looked at only where the head is live.
__device__ inline float final_lse(const DecodeParams& params, int64_t h, float maximum, double lse) {
  const bool sinks = params.sinks.data != nullptr;
  if (is_live(maximum)) {
    return static_cast<float>(sinks ? add_sink(lse, static_cast<double>(sink_of(params.sinks, h))) : lse);
  }
  if (maximum != kNegativeInfinity) return maximum;
  return sinks ? sink_of(params.sinks, h) : kNegativeInfinity;
}

// Output of a head that is not live: 0 where nothing is attended, NaN as softmax gives otherwise.
__device__ inline double degenerate_value(float maximum) {
  return maximum == kNegativeInfinity ? 0.0 : static_cast<double>(__int_as_float(0x7FC00000));
}

// --- Sums and maxima over a block. Every thread calls, and gets the result.

template <int kBlockThreads, class T, class F>
__device__ T block_reduce(T x, const F& f) {
  auto& of_warps = shared_memory<struct OfWarps, T[kBlockThreads / kWarpLanes]>();
  x = warp_reduce(x, f);
  __syncthreads();  // the memory may still be read after a reduction before
  if (lane_id() == 0) of_warps[threadIdx.x / kWarpLanes] = x;
  __syncthreads();
  x = of_warps[0];
  for (int warp = 1; warp < kBlockThreads / kWarpLanes; ++warp) x = f(x, of_warps[warp]);
  return x;
}

template <int kBlockThreads, class T>
__device__ T block_sum(T x) {
  return block_reduce<kBlockThreads>(x, [](T a, T b) { return a + b; });
}

// NaN where any number is NaN.
template <int kBlockThreads, class T>
__device__ T block_max(T x) {
  return block_reduce<kBlockThreads>(x, [](T a, T b) { return a > b || a != a ? a : b; });
}

// The largest score of a head, from those of its chunks; what with_sink makes of it.
template <int kBlockThreads>
__device__ float head_maximum(const Step& step, int64_t head) {
  const int64_t b = head / step.params.shape.query_heads;
  const int64_t chunks = chunks_of(step, b);
  float largest = kNegativeInfinity;
  for (int64_t c = threadIdx.x; c < chunks; c += kBlockThreads) {
    const float candidate = step.chunk_maxima[head * step.plan.chunks + c];
    if (candidate > largest || candidate != candidate) largest = candidate;
    if (largest != largest) break;
  }
  return with_sink(step.params, head % step.params.shape.query_heads, block_max<kBlockThreads>(largest));
}

// Notes what a group has read of K. Every thread calls, and gets the rows.
template <int kBlockThreads>
__device__ int64_t count_keys(const Step& step, int64_t group) {
  const DecodeShape& shape = step.params.shape;
  const int64_t b = group / shape.kv_heads;
  const int64_t chunks = chunks_of(step, b);
  int64_t rows = 0;
  for (int64_t c = threadIdx.x; c < chunks; c += kBlockThreads) {
    rows += step.attended[(group * step.plan.chunks + c) * 2];
  }
  rows = block_sum<kBlockThreads>(rows);
  int64_t packed = 0;  // of these rows
  int64_t blocks = 0;
  if (step.block_rows != nullptr) {
    const int64_t whole = min(step.params.key_blocks.packed_rows(b) / kSketchRows, chunks * kSketchesPerChunk);
    for (int64_t i = threadIdx.x; i < whole; i += kBlockThreads) {
      const int64_t attended = step.block_rows[group * step.plan.chunks * kSketchesPerChunk + i];
      packed += attended;
      blocks += attended != 0 ? 1 : 0;
    }
    packed = block_sum<kBlockThreads>(packed);
    blocks = block_sum<kBlockThreads>(blocks);
  }
  if (threadIdx.x == 0) {
    KeysRead& read = step.params.keys_read[group];
    read.rows = rows;
    if (step.params.bernoulli.draws == 0) read.features = shape.head_dim;  // or stage "bernoulli_query" did
    const int64_t numbers = blocks * kSketchRows * read.features + (rows - packed) * shape.head_dim;
    read.bytes = numbers * element_size(shape.dtype);
  }
  return rows;
}

}  // namespace santa::cuda
