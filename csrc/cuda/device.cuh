#pragma once

// All of CUDA that kernels use beyond the language: PTX, intrinsics and launches are here and nowhere else, each
// beside what stands for it on the CPU (csrc/simt, SANTA_SIMT). A kernel includes this and no header of CUDA's.

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#ifndef SANTA_SIMT
#define SANTA_SIMT 0
#endif

#if SANTA_SIMT
#include "../cpu/convert.h"
#include "../simt/simt.h"
#else
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#endif

namespace santa::cuda {

constexpr int kWarpLanes = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Storage of 16-bit numbers.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

// What one access moves at most; loads and stores of a whole one are single instructions.
template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t word[kBytes / 4];
};

#if SANTA_SIMT
using Stream = void*;
#else
using Stream = cudaStream_t;
#endif

struct LaunchConfig {
  const char* name = "kernel";  // for errors
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;  // dynamic shared memory
  Stream stream = nullptr;
  // Programmatic dependent launch, for sm_90 and later: blocks may start before the launch before has ended. Each
  // must call wait_for_previous_grid() before it touches memory that others write, or that others still read.
  bool overlap = false;
};

// --- Where a thread is.

__device__ __forceinline__ uint32_t thread_index() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

__device__ __forceinline__ uint32_t lane_id() { return thread_index() % kWarpLanes; }

// --- Shared memory: auto& scores = shared_memory<struct Scores, float[4][64]>(). The tag tells objects of one
// type apart and names them in errors.

template <class Tag, class T>
__device__ __forceinline__ T& shared_memory() {
#if SANTA_SIMT
  static_assert(alignof(T) <= 16 && std::is_trivially_default_constructible_v<T>);
  static const char key = 0;
  return *static_cast<T*>(simt::shared_object(&key, __PRETTY_FUNCTION__, sizeof(T)));
#else
  alignas(16) __shared__ T memory;
  return memory;
#endif
}

// The memory that LaunchConfig::shared_bytes asks for; aligned to 128 bytes.
template <class T>
__device__ __forceinline__ T* dynamic_shared_memory() {
#if SANTA_SIMT
  return static_cast<T*>(simt::dynamic_shared_object());
#else
  extern __shared__ __align__(128) unsigned char santa_dynamic_shared_memory[];
  return reinterpret_cast<T*>(santa_dynamic_shared_memory);
#endif
}

// --- Reductions over aligned runs of kWidth lanes, all of which take part; with kStep, over those of the run
// whose numbers are equal modulo kStep. Partners are exchanged crosswise, so that every lane adds the same numbers
// in the same pairs: each ends with the same bits, whatever the scheduling.

template <int kWidth = kWarpLanes, int kStep = 1, class T, class F>
__device__ __forceinline__ T warp_reduce(T x, const F& f) {
  static_assert(kWidth >= 1 && kWidth <= kWarpLanes && (kWidth & (kWidth - 1)) == 0);
  static_assert(kStep >= 1 && kStep <= kWidth && (kStep & (kStep - 1)) == 0);
#pragma unroll
  for (int distance = kWidth / 2; distance >= kStep; distance /= 2) {
    x = f(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

template <int kWidth = kWarpLanes, int kStep = 1, class T>
__device__ __forceinline__ T warp_sum(T x) {
  return warp_reduce<kWidth, kStep>(x, [](T a, T b) { return a + b; });
}

// NaN where any lane has NaN, unlike fmaxf.
template <int kWidth = kWarpLanes, class T>
__device__ __forceinline__ T warp_max(T x) {
  return warp_reduce<kWidth>(x, [](T a, T b) { return a > b || a != a ? a : b; });
}

// --- Copies from global to shared memory that go on while the thread does (cp.async). A copy belongs to the
// group that its thread commits next, and has landed once the thread has waited for that group: for the thread
// itself. Others need a barrier after the wait.

// Past `bytes` the destination becomes zero; with 0 nothing is read. Both addresses are multiples of kBytes.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#if SANTA_SIMT
  simt::copy_async(shared, global, kBytes, bytes);
#else
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {  // the only size that can pass by L1
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
#endif
}

__device__ __forceinline__ void commit_copies() {
#if SANTA_SIMT
  simt::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread but the newest kGroups.
template <int kGroups>
__device__ __forceinline__ void wait_copies() {
#if SANTA_SIMT
  simt::wait_copies(kGroups);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

// --- Accesses to kBytes by one instruction. The address is a multiple of kBytes.

template <int kBytes>
__device__ __forceinline__ Words<kBytes> load(const void* p) {
#if SANTA_SIMT
  Words<kBytes> x;
  simt::load(&x, p, kBytes, false);
  return x;
#else
  return *static_cast<const Words<kBytes>*>(p);
#endif
}

template <int kBytes>
__device__ __forceinline__ void store(void* p, const Words<kBytes>& x) {
#if SANTA_SIMT
  simt::store(p, &x, kBytes);
#else
  *static_cast<Words<kBytes>*>(p) = x;
#endif
}

// For what is read once, such as rows of K and V: such loads leave L1 to what is read again. No kernel in flight
// writes there, an earlier one that this one overlaps included. Volatile, so that none moves before the wait for
// it.
template <int kBytes>
__device__ __forceinline__ Words<kBytes> load_once(const void* p) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  Words<kBytes> x;
#if SANTA_SIMT
  simt::load(&x, p, kBytes, true);
#else
  if constexpr (kBytes == 16) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "l"(p));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x.word[0]), "=r"(x.word[1])
                 : "l"(p));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x.word[0]) : "l"(p));
  }
#endif
  return x;
}

// --- Conversions. Those to 16 bits round to nearest, ties to even.

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(BFloat x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

__device__ __forceinline__ float to_float(Half x) {
#if SANTA_SIMT
  return cpu::to_float(cpu::Half{x.bits});
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#endif
}

__device__ __forceinline__ void store_as(float x, float* to) { *to = x; }

__device__ __forceinline__ void store_as(float x, BFloat* to) {
#if SANTA_SIMT
  cpu::BFloat y;
  cpu::store_as(x, &y);
  to->bits = y.bits;
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
#endif
}

__device__ __forceinline__ void store_as(float x, Half* to) {
#if SANTA_SIMT
  cpu::Half y;
  cpu::store_as(x, &y);
  to->bits = y.bits;
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
#endif
}

// --- Between blocks and between kernels.

__device__ __forceinline__ uint64_t atomic_add(uint64_t* p, uint64_t x) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  return atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(x));
}

// Whether this block is the last of `blocks` to come here; every thread of it must call. Then what those blocks
// wrote before can be read, though not by load_once. The counter starts at 0 and is 0 again afterwards.
__device__ __forceinline__ bool is_last_block(uint32_t* counter, uint32_t blocks) {
  __syncthreads();
  bool last = false;
  if (thread_index() == 0) {
    // The fence is thread 0's own, behind the barrier: that is what covers the writes of all threads.
    __threadfence();
    last = atomicInc(counter, blocks - 1) == blocks - 1;
    __threadfence();
  }
  return __syncthreads_or(last) != 0;
}

// Waits until the launch before, which this one may overlap, has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_grid() {
#if SANTA_SIMT
  simt::wait_for_previous_grid();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the launch behind, if it may overlap, start once every block has said so or has ended. A hint: what this
// one still writes is not visible there before wait_for_previous_grid().
__device__ __forceinline__ void let_next_grid_start() {
#if !SANTA_SIMT && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- Launches. Throw std::runtime_error that names the kernel.

template <class... P, class... A>
void launch(void (*kernel)(P...), const LaunchConfig& config, A&&... arguments) {
#if SANTA_SIMT
  simt::launch({.name = config.name,
                .grid = config.grid,
                .block = config.block,
                .shared_bytes = static_cast<int64_t>(config.shared_bytes),
                .overlap = config.overlap},
               kernel, std::forward<A>(arguments)...);
#else
  const auto check = [&](cudaError_t error) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // or the next to ask is told of this error too
    throw std::runtime_error(std::string("kernel '") + config.name + "': " + cudaGetErrorString(error));
  };
  constexpr size_t kSharedWithoutAsking = 47 << 10;  // 48 KiB, less what a kernel has beside its dynamic memory
  if (config.shared_bytes > kSharedWithoutAsking) {
    // All that the device has, not what this launch wants: the limit is the function's, and another thread, or the
    // launch before in a graph, may have asked for more.
    int device = 0;
    int most = 0;
    cudaFuncAttributes of_kernel{};
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    check(cudaFuncGetAttributes(&of_kernel, kernel));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               most - static_cast<int>(of_kernel.sharedSizeBytes)));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t what{};
  what.gridDim = config.grid;
  what.blockDim = config.block;
  what.dynamicSmemBytes = config.shared_bytes;
  what.stream = config.stream;
  what.attrs = &attribute;
  what.numAttrs = config.overlap ? 1 : 0;
  check(cudaLaunchKernelEx(&what, kernel, P(std::forward<A>(arguments))...));
#endif
}

}  // namespace santa::cuda
