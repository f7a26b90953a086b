#pragma once

#include "cuda/device.cuh"

// Kernels that use one feature of csrc/cuda/device.cuh each; test_simt.cpp knows what they must give. nvcc
// compiles them too.
namespace santa::simt_test {

using namespace santa::cuda;

// Block and thread of each thread, by their number: what [grid][block] must hold, each once.
__global__ void indices(uint32_t* visits, uint32_t* lanes) {
  const uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
  visits[block * threads + thread_index()] += 1;
  lanes[block * threads + thread_index()] = lane_id();
}

constexpr int kShuffles = 9;

__global__ void shuffles(uint64_t* out) {  // out [threads][kShuffles]
  const int t = static_cast<int>(thread_index());
  const int lane = t % kWarpLanes;
  uint64_t* to = out + t * kShuffles;
  to[0] = static_cast<uint64_t>(__shfl_sync(kAllLanes, t * 10, 5));
  to[1] = static_cast<uint64_t>(__shfl_up_sync(kAllLanes, t, 3));
  to[2] = static_cast<uint64_t>(__shfl_down_sync(kAllLanes, t, 3, 8));
  to[3] = static_cast<uint64_t>(__shfl_xor_sync(kAllLanes, t, 9));
  to[4] = static_cast<uint64_t>(__shfl_sync(kAllLanes, t, 11, 8));
  to[5] = static_cast<uint64_t>(__shfl_xor_sync(kAllLanes, t, 9, 8));
  to[6] = static_cast<uint64_t>(__shfl_xor_sync(kAllLanes, static_cast<double>(t), 1));
  // Halves of a warp in different branches, each with its own mask.
  if (lane < 16) {
    to[7] = static_cast<uint64_t>(__shfl_xor_sync(0x0000FFFFu, t, 2));
  } else {
    to[7] = static_cast<uint64_t>(__shfl_up_sync(0xFFFF0000u, t, 1, 16));
  }
  to[8] = __shfl_sync(kAllLanes, (1ull << 40) + static_cast<unsigned long long>(t), 31);
}

constexpr int kVotes = 11;

__global__ void votes(uint32_t* out) {  // out [threads][kVotes]
  const int t = static_cast<int>(thread_index());
  const auto u = static_cast<uint32_t>(t);
  uint32_t* to = out + t * kVotes;
  to[0] = __ballot_sync(kAllLanes, t % 3 == 0);
  to[1] = static_cast<uint32_t>(__any_sync(kAllLanes, t == 7));
  to[2] = static_cast<uint32_t>(__all_sync(kAllLanes, t < 63));
  to[3] = static_cast<uint32_t>(__reduce_add_sync(kAllLanes, t - 5));
  to[4] = static_cast<uint32_t>(__reduce_min_sync(kAllLanes, t - 5));
  to[5] = static_cast<uint32_t>(__reduce_max_sync(kAllLanes, t - 5));
  to[6] = __reduce_min_sync(kAllLanes, u - 5u);
  to[7] = __reduce_max_sync(kAllLanes, u - 5u);
  to[8] = __reduce_and_sync(kAllLanes, u | 5u);
  to[9] = __reduce_or_sync(kAllLanes, 1u << u % 20);
  to[10] = __reduce_xor_sync(kAllLanes, u * u);
}

__global__ void reductions(float* sums, float* maxima, float* sums_of_8) {  // each [threads], in place
  const uint32_t t = thread_index();
  sums[t] = warp_sum(sums[t]);
  sums_of_8[t] = warp_sum<8>(sums_of_8[t]);
  maxima[t] = warp_max(maxima[t]);
}

// One step of a recurrence over as many numbers as a switch of contexts has registers to keep, and more.
struct Live {
  uint32_t a, b, c, d, e, f, g, h;
};
__device__ __forceinline__ Live mixed(const Live& x) {
  return {x.a * 5 + x.b, x.b * 5 + x.c, x.c * 5 + x.d, x.d * 5 + x.e,
          x.e * 5 + x.f, x.f * 5 + x.g, x.g * 5 + x.h, x.h * 5 + (x.a ^ 77)};
}

__global__ void live_values(Live* all) {  // all [blockDim]
  Live x = all[thread_index()];
  for (int round = 0; round < 3; ++round) {
    x = mixed(x);
    __syncthreads();
    x = mixed(x);
    __syncwarp();
  }
  all[thread_index()] = x;
}

__global__ void block_votes(int* out) {  // out [3]
  const int t = static_cast<int>(thread_index());
  const int count = __syncthreads_count(t % 5 == 0);
  const int all = __syncthreads_and(t >= 0);
  const int any = __syncthreads_or(t > 1000);
  if (t == 0) {
    out[0] = count;
    out[1] = all;
    out[2] = any;
  }
}

// Reverses [blockDim] numbers of each block through static and through dynamic memory.
__global__ void reverse(const int* in, int* out) {
  auto& fixed = shared_memory<struct Fixed, int[256]>();
  int* dynamic = dynamic_shared_memory<int>();
  const uint32_t t = thread_index(), n = blockDim.x;
  fixed[t] = in[blockIdx.x * n + t];
  __syncthreads();
  dynamic[t] = fixed[n - 1 - t] * 2;
  __syncthreads();
  out[blockIdx.x * n + t] = dynamic[t] + (t > 0 ? dynamic[t - 1] - dynamic[t - 1] : 0);
}

// What a block finds in memory that it has not written. Undefined, and poison in the emulator.
__global__ void fresh_memory(uint32_t* out) {  // out [blocks][3]
  auto& fixed = shared_memory<struct Fresh, uint32_t[4]>();
  auto* dynamic = dynamic_shared_memory<uint32_t>();
  uint32_t* to = out + blockIdx.x * 3;
  to[0] = fixed[3];
  to[1] = dynamic[0];
  to[2] = dynamic[7];
  __syncthreads();  // clang announces no read that a write to the same place follows
  fixed[3] = dynamic[0] = dynamic[7] = 1;
}

__global__ void integer_atomics(uint32_t* words, int* integers, uint64_t* longs) {
  auto& local = shared_memory<struct Local, uint32_t[2]>();
  const uint32_t t = thread_index() + blockIdx.x * blockDim.x;
  if (thread_index() < 2) local[thread_index()] = 0;
  __syncthreads();
  atomicAdd(&local[t % 2], t);
  atomicAdd(&words[0], t);
  atomicMax(&words[1], t);
  atomicMin(&words[2], t);
  atomicOr(&words[3], 1u << t % 32);
  atomicAnd(&words[4], ~(1u << t % 16));
  atomicXor(&words[5], t);
  atomicInc(&words[6], 6);
  atomicExch(&words[7], t);
  for (uint32_t seen = 0, old = 1; seen != old;) {  // an addition by compare and swap
    old = seen;
    seen = atomicCAS(&words[8], old, old + 2);
  }
  atomicMin(&integers[0], -static_cast<int>(t));
  atomicMax(&integers[1], static_cast<int>(t) - 1000);
  atomic_add(&longs[0], (uint64_t{1} << 33) + t);
  __syncthreads();
  if (thread_index() == 0) atomicAdd(&words[9], local[0] + local[1]);
}

// Copies of kBytes through shared memory, the last of them cut to `last` bytes; others read them after a barrier.
template <int kBytes>
__global__ void copies(const unsigned char* in, int last, unsigned char* out) {  // in, out [blockDim][kBytes]
  auto& staged = shared_memory<struct Staged, unsigned char[64][kBytes]>();
  const uint32_t t = thread_index(), n = blockDim.x;
  if (t + 1 < n) {
    copy_async<kBytes>(staged[t], in + t * kBytes);
  } else {
    copy_async<kBytes>(staged[t], last == 0 ? nullptr : in + t * kBytes, last);
  }
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  for (int i = 0; i < kBytes; ++i) out[(n - 1 - t) * kBytes + i] = staged[n - 1 - t][i];
}

// Three groups in flight, each read by its own thread as soon as it has waited for it.
__global__ void groups(const uint32_t* in, uint32_t* out) {  // in, out [blockDim][3][4]
  auto& staged = shared_memory<struct Groups, uint32_t[64][3][4]>();
  const uint32_t t = thread_index();
  for (int g = 0; g < 3; ++g) {
    copy_async<16>(staged[t][g], in + (t * 3 + g) * 4);
    commit_copies();
  }
  const auto take = [&](int g) {
    for (int i = 0; i < 4; ++i) out[(t * 3 + g) * 4 + i] = staged[t][g][i];
  };
  wait_copies<2>();
  take(0);
  wait_copies<1>();
  take(1);
  wait_copies<0>();
  take(2);
}

// Reads a group while it is in flight: what lands in the emulator is what the wait covers, no more.
__global__ void unwaited(const uint32_t* in, uint32_t* out) {  // in, out [2][4]
  auto& staged = shared_memory<struct Unwaited, uint32_t[2][4]>();
  for (int g = 0; g < 2; ++g) {
    copy_async<16>(staged[g], in + g * 4);
    commit_copies();
  }
  wait_copies<1>();
  for (int i = 0; i < 8; ++i) out[i] = staged[i / 4][i % 4];
  wait_copies<0>();
}

template <int kBytes>
__global__ void loads(const unsigned char* in, uint32_t* out) {  // in [blockDim][kBytes], out [blockDim]
  const Words<kBytes> words = load_once<kBytes>(in + thread_index() * kBytes);
  uint32_t sum = 0;
  for (int i = 0; i < kBytes / 4; ++i) sum += words.word[i] * static_cast<uint32_t>(i + 1);
  out[thread_index()] = sum;
}

template <class T>
__global__ void conversions(const T* in, float* wide, T* narrow, int n) {  // each [n]
  for (uint32_t i = blockIdx.x * blockDim.x + thread_index(); i < static_cast<uint32_t>(n);
       i += gridDim.x * blockDim.x) {
    wide[i] = to_float(in[i]);
    store_as(wide[i], &narrow[i]);
  }
}

// The sum over blocks of blockIdx + thread, by the block that comes last.
__global__ void last_block(uint32_t* counter, uint32_t* partial, uint32_t* out) {  // partial [blocks][threads]
  const uint32_t t = thread_index(), n = blockDim.x;
  partial[blockIdx.x * n + t] = blockIdx.x + t;
  if (!is_last_block(counter, gridDim.x)) return;
  // Another thread's column, so that the fence has to cover what others wrote.
  uint32_t sum = 0;
  for (uint32_t b = 0; b < gridDim.x; ++b) sum += partial[b * n + n - 1 - t];
  out[n - 1 - t] += sum;
}

// The same in two steps: the last block of each group of 4 sums the group, the last of those all groups. It may
// read what the blocks of other groups wrote too.
__global__ void last_of_groups(uint32_t* counters, uint32_t* partial, uint32_t* sums, uint32_t* out) {
  const uint32_t t = thread_index(), n = blockDim.x, group = blockIdx.x / 4, groups = gridDim.x / 4;
  partial[blockIdx.x * n + t] = blockIdx.x + t;
  if (!is_last_block(&counters[group], 4)) return;
  uint32_t sum = 0;
  for (uint32_t b = group * 4; b < group * 4 + 4; ++b) sum += partial[b * n + t];
  sums[group * n + t] = sum;
  if (!is_last_block(&counters[groups], groups)) return;
  sum = 0;
  for (uint32_t g = 0; g < groups; ++g) sum += sums[g * n + n - 1 - t];
  for (uint32_t b = 0; b < gridDim.x; ++b) sum -= partial[b * n + n - 1 - t] / 2;
  out[n - 1 - t] = sum;
}

// Lane 0 tells lane 2 through lane 1.
__global__ void chain_of_lanes(int* out) {
  auto& word = shared_memory<struct Word, int>();
  const uint32_t lane = lane_id();
  if (lane == 0) word = 7;
  if (lane < 2) __syncwarp(0x3);
  if (lane == 1 || lane == 2) __syncwarp(0x6);
  if (lane == 2) *out = word;
}

// Two grids of which the second may start early.
__global__ void first_grid(int* out) {
  let_next_grid_start();
  out[thread_index()] = static_cast<int>(thread_index()) * 3;
}
__global__ void second_grid(const int* in, int* out) {
  wait_for_previous_grid();
  out[thread_index()] = in[thread_index()] + 1;
}

// Order in which threads pass: out [blocks * threads] gets their numbers, `next` counts them.
__global__ void arrivals(uint32_t* next, uint32_t* out) {
  for (int round = 0; round < 2; ++round) {
    const uint32_t at = (*next)++;
    out[at] = blockIdx.x * blockDim.x + thread_index();
    __syncthreads();
  }
}

}  // namespace santa::simt_test
