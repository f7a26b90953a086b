#pragma once

#include "device.cuh"

namespace santa::cuda {

// Sum of what the threads before this one bring, and of what all bring. Every thread of the block calls.
template <class T>
struct Scan {
  T before;
  T total;
};

template <int kBlockThreads, class T>
__device__ Scan<T> block_scan(T x) {
  constexpr int kBlockWarps = kBlockThreads / kWarpLanes;
  auto& sums = shared_memory<struct WarpSums, T[kBlockWarps]>();
  T sum = x;  // with that of the lanes before
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, static_cast<unsigned>(distance));
    if (lane_id() >= static_cast<uint32_t>(distance)) sum += other;
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  __syncthreads();  // the memory may still be read after a scan before
  if (lane_id() == kWarpLanes - 1) sums[warp] = sum;
  __syncthreads();
  Scan<T> scan{sum - x, T{0}};
  for (int w = 0; w < kBlockWarps; ++w) {
    if (w < warp) scan.before += sums[w];
    scan.total += sums[w];
  }
  return scan;
}

}  // namespace santa::cuda
