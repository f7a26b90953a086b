#pragma once

#include "cuda/device.cuh"

// Kernels with planted faults: right with Fault::kNone, and otherwise wrong in one way that compiles. What finds
// each is the table in test_simt_faults.cpp.
namespace santa::simt_test {

using namespace santa::cuda;

enum class Fault {
  kNone,
  // of copies
  kNoWait,
  kWaitCount,
  kNoCommit,
  kNoBarrierAfterWait,
  kRefillWithoutBarrier,
  kRefillInUse,
  kRowsPastTheEnd,
  kMisalignedCopy,
  kMemoryTooSmall,
  kCopyLeftOver,
  kSourceOverwritten,
  // of barriers, warps and shared memory
  kNoSyncwarp,
  kShuffleForSyncwarp,
  kNoBarrier,
  kScratchReused,
  kDivergentBarrier,
  kTwoBarriers,
  kEarlyExit,
  kShuffleInBranch,
  kShuffleAfterExit,
  kCallerNotInMask,
  kSourceNotInMask,
  kTwoShuffles,
  kStaleMemory,
  kWritePastObject,
  kWriteBeforeObject,
  kReadPastObject,
  kFarPastDynamic,
  kOneThreadWrites,
  kWrittenWhileRead,
  kMisalignedVector,
  kLocalMemory,
  kMixedAtomic,
  // between blocks
  kNoRelease,
  kNoAcquire,
  kNoBarrierBeforeTicket,
  kPlainCounter,
  kCounterKept,
  kReadOnlyPath,
  kOrderOfArrival,
  kOtherBlock,
  // between grids
  kNoGridWait,
  kReadBeforeGridWait,
  kWriteBeforeGridWait,
};

constexpr int kColumns = 64;
constexpr int kTileRows = 4;

// Sums of columns, one thread each, through a pipeline of two tiles: 16 threads copy a row for all.
// in [blocks][rows][kColumns] -> out [blocks][kColumns]; dynamic shared memory [2][kTileRows][kColumns]
template <Fault kFault>
__global__ void __launch_bounds__(kColumns) sum_rows(float* in, int rows, float* out) {
  auto* tiles = dynamic_shared_memory<float>();
  const int t = static_cast<int>(thread_index());
  float* from = in + static_cast<int64_t>(blockIdx.x) * rows * kColumns;
  const int count = (rows + kTileRows - 1) / kTileRows;
  const auto fetch = [&](int tile) {
    const int buffer = kFault == Fault::kRefillInUse ? 0 : tile % 2;
    const int row = tile * kTileRows + t / 16, column = t % 16 * 4;
    const bool inside = row < rows || kFault == Fault::kRowsPastTheEnd;
    float* to = tiles + (buffer * kTileRows + t / 16) * kColumns + column;
    copy_async<16>(to + (kFault == Fault::kMisalignedCopy ? 1 : 0), from + row * kColumns + column,
                   inside ? 16 : 0);
    if (kFault != Fault::kNoCommit) commit_copies();
  };
  fetch(0);
  if (kFault == Fault::kSourceOverwritten && t < 16) from[t * 4] = 0;  // what this thread copies
  float sum = 0;
  for (int tile = 0; tile < count; ++tile) {
    if (tile + 1 < count || kFault == Fault::kCopyLeftOver) {
      fetch(tile + 1);
    } else {
      commit_copies();  // an empty group, so that the count of groups behind this tile stays
    }
    if (kFault != Fault::kNoWait) wait_copies<kFault == Fault::kWaitCount ? 2 : 1>();
    if (kFault != Fault::kNoBarrierAfterWait) __syncthreads();
    const int buffer = kFault == Fault::kRefillInUse ? 0 : tile % 2;
    for (int row = 0; row < kTileRows; ++row) sum += tiles[(buffer * kTileRows + row) * kColumns + t];
    if (kFault != Fault::kRefillWithoutBarrier) __syncthreads();
  }
  if (kFault == Fault::kNoWait || kFault == Fault::kWaitCount) wait_copies<0>();  // seen by what was read before
  out[blockIdx.x * kColumns + t] = sum;
}

constexpr int kReduceThreads = 128;
constexpr int kReduceWarps = kReduceThreads / kWarpLanes;

// The sum and the largest of neighbours' numbers, and how many numbers of each quarter are positive.
// in [kReduceThreads] -> out [2 + kReduceWarps]; dynamic shared memory [kReduceThreads]
template <Fault kFault>
__global__ void __launch_bounds__(kReduceThreads) reduce(const float* in, float* out) {
  auto& scratch = shared_memory<struct Scratch, float[kReduceWarps]>();
  auto& positive = shared_memory<struct Positive, uint32_t[kReduceWarps]>();
  auto& first = shared_memory<struct First, float>();
  auto& borrowed = shared_memory<struct Borrowed, const float*>();
  auto* staged = dynamic_shared_memory<float>();
  const auto t = static_cast<int>(thread_index());
  const int warp = t / kWarpLanes, lane = t % kWarpLanes;

  if (lane == 0 && kFault != Fault::kStaleMemory) positive[warp] = 0;
  staged[t] = in[t];
  if (kFault != Fault::kNoSyncwarp) __syncwarp();
  float x = staged[t ^ 1];
  if (kFault == Fault::kLocalMemory) {
    float mine = x;
    if (t == 0) borrowed = &mine;
    __syncthreads();
    x += *borrowed - *borrowed;
    __syncthreads();
  }
  if (kFault == Fault::kMisalignedVector) x += static_cast<float>(load<16>(&staged[t & 1]).word[0] & 0u);

  if (kFault == Fault::kMixedAtomic && t == kWarpLanes) positive[0] = 0;
  if (x > 0) atomicAdd(&positive[warp], 1u);
  // A second exchange through the same memory: neither lane may be ahead of what the other still reads.
  if (kFault == Fault::kShuffleForSyncwarp) {
    x += 0 * __shfl_xor_sync(kAllLanes, x, 1);
  } else {
    __syncwarp();
  }
  staged[t] = x;
  __syncwarp();
  x = staged[t ^ 1];

  if (kFault == Fault::kShuffleInBranch) {
    if (lane < 16) x += 0 * __shfl_xor_sync(kAllLanes, x, 1);
  }
  if (kFault == Fault::kCallerNotInMask) x += 0 * __shfl_xor_sync(0x0000FFFFu, x, 1);
  if (kFault == Fault::kSourceNotInMask && lane < 16) x += 0 * __shfl_xor_sync(0x0000FFFFu, x, 16);
  if (kFault == Fault::kTwoShuffles) {
    if (lane < 16) {
      x += 0 * __shfl_xor_sync(kAllLanes, x, 1);
    } else {
      x += 0 * __shfl_xor_sync(kAllLanes, x, 2);
    }
  }
  if (kFault == Fault::kShuffleAfterExit) {
    if (lane >= 16) return;
    x += 0 * __shfl_xor_sync(kAllLanes, x, 16);
  }

  const float sum = warp_sum(x);
  if (lane == 0) scratch[warp + (kFault == Fault::kWritePastObject ? 1 : 0)] = sum;
  if (kFault == Fault::kWriteBeforeObject && t == 5) scratch[t - 6] = sum;
  if (kFault == Fault::kFarPastDynamic && t == 7) staged[1 << 12] = sum;
  if (kFault == Fault::kEarlyExit && t >= 120) return;
  if (kFault == Fault::kDivergentBarrier) {
    if (warp != 3) __syncthreads();
  } else if (kFault == Fault::kTwoBarriers) {
    if (warp != 3) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  } else if (kFault != Fault::kNoBarrier) {
    __syncthreads();
  }
  float total = 0;
  for (int i = 0; i < kReduceWarps; ++i) total += scratch[i + (kFault == Fault::kReadPastObject ? 1 : 0)];
  if (kFault != Fault::kScratchReused) __syncthreads();
  const float largest = warp_max(x);
  if (lane == 0) scratch[warp] = largest;
  __syncthreads();
  float most = scratch[0];
  for (int i = 1; i < kReduceWarps; ++i) most = scratch[i] > most ? scratch[i] : most;
  if (kFault == Fault::kWrittenWhileRead && warp == 0) {
    __syncwarp();  // which orders the readers of this warp, and no others
    if (lane == 0) scratch[0] = 1e9f;
  }
  if (kFault == Fault::kOneThreadWrites) {
    if (t == 0) first = total;
    total = first;
  }
  if (t == kReduceThreads - 1) {
    out[0] = total;
    out[1] = most;
    for (int i = 0; i < kReduceWarps; ++i) out[2 + i] = static_cast<float>(positive[i]);
  }
}

constexpr int kMergeThreads = 64;

// The sum over blocks, in their order, by the block that comes last.
// in [blocks][kMergeThreads] -> partial, the same -> out [kMergeThreads]; counter: 0 before and after
template <Fault kFault>
__global__ void __launch_bounds__(kMergeThreads)
    merge(const float* in, float* partial, uint32_t* counter, float* out) {
  const auto t = static_cast<int>(thread_index());
  const auto at = static_cast<int>(blockIdx.x) * kMergeThreads;
  partial[at + t] = in[at + t] * 2;
  if (kFault == Fault::kOtherBlock) {
    __threadfence();
    out[t] = partial[(at == 0 ? 1 : 0) * kMergeThreads + t];
    return;
  }
  if (kFault == Fault::kOrderOfArrival) {
    auto* word = reinterpret_cast<uint32_t*>(&out[t]);
    for (uint32_t old = atomicAdd(word, 0), seen = old + 1; seen != old;) {
      seen = old;
      old = atomicCAS(word, seen, __float_as_uint(__uint_as_float(seen) + partial[at + t]));
    }
    return;
  }
  bool last = false;
  if (kFault == Fault::kNone || kFault == Fault::kReadOnlyPath) {
    last = is_last_block(counter, gridDim.x);
  } else {
    if (kFault != Fault::kNoBarrierBeforeTicket) __syncthreads();
    if (t == 0) {
      if (kFault != Fault::kNoRelease) __threadfence();
      if (kFault == Fault::kPlainCounter) {
        last = *counter == gridDim.x - 1;
        *counter = last ? 0 : *counter + 1;
      } else {
        last = atomicAdd(counter, 1u) == gridDim.x - 1;
        if (last && kFault != Fault::kCounterKept) atomicExch(counter, 0u);
      }
      if (kFault != Fault::kNoAcquire) __threadfence();
    }
    last = __syncthreads_or(last) != 0;
  }
  if (!last) return;
  // A column that another thread has written.
  const int column = kMergeThreads - 1 - t;
  float sum = 0;
  for (uint32_t b = 0; b < gridDim.x; ++b) {
    const float* p = &partial[b * kMergeThreads + static_cast<uint32_t>(column)];
    sum += kFault == Fault::kReadOnlyPath ? __uint_as_float(load_once<4>(p).word[0]) : *p;
  }
  out[column] = sum;
}

// Two grids, the second of which may start before the first has ended: x -> between -> out, and 0 -> x.
template <Fault kFault>
__global__ void produce(const float* x, float* between) {
  let_next_grid_start();
  between[thread_index()] = x[thread_index()] + 1;
}
template <Fault kFault>
__global__ void consume(float* x, const float* between, float* out) {
  const uint32_t t = thread_index();
  float y = 0;
  if (kFault == Fault::kReadBeforeGridWait) y = between[t];
  if (kFault == Fault::kWriteBeforeGridWait) x[t] = 0;
  if (kFault != Fault::kNoGridWait) wait_for_previous_grid();
  if (kFault != Fault::kReadBeforeGridWait) y = between[t];
  out[t] = y * 2;
  x[t] = 0;
}

}  // namespace santa::simt_test
