#pragma once

// CUDA C++ on the CPU, for tests: the kernels of csrc/cuda compiled by g++ or clang++ as plain C++, with
// -DSANTA_SIMT=1 and csrc/simt linked in. They come here through csrc/cuda/device.cuh and stay as nvcc reads
// them. Each thread of a block is a context of its own that runs until it waits: at a barrier, in a warp
// operation. Everything else happens one thread at a time, so what a test wants to know is whether a kernel
// depends on luck. Against that there are orders (Options), poison (fresh shared memory, and the destination of
// a copy under way, hold NaN as float32, float64, float16 and bfloat16, and huge integers), redzones around
// shared objects, rules that hardware leaves undefined and that are errors here, and the race checker.
//
// The race checker (races.h) is a second build of the same sources: -DSANTA_SIMT_RACES=1 for all of them, and
// -fsanitize=thread for those with kernels, linked without it: the compiler then announces each access to
// memory by a call, and hooks.cpp is who answers. Kernels need no wrapped pointers and no macros for that, and
// no access can be forgotten, as it could with proxies.
//
// Flags: -std=c++20 -DSANTA_SIMT=1, -fno-strict-aliasing (kernels read memory as vectors), -ffp-contract=off,
// -Wno-unknown-pragmas (unroll), -g1 -fno-optimize-sibling-calls for lines in errors, and in a library
// -fvisibility=hidden, or two builds that one process loads share their state.
//
// Not modelled: time, caches and registers; spinning on what another thread will write; the order in which
// plain writes become visible, except that the race checker asks for the fences; __launch_bounds__, named
// barriers, tensor cores, streams, textures, cooperative groups. Threads change only where they wait (and at
// atomics in a shuffle), so that a race shows in results where that matters, and always to the checker. Which it
// does not see: memcpy as GCC compiles it, and what an optimiser has merged. Global memory outside of its
// allocations is seen where the page is missing, or where a test says what there is (global_memory).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "engine.h"

// NOLINTBEGIN(bugprone-reserved-identifier): the names are CUDA's.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

inline constexpr const uint3& threadIdx = santa::simt::position.thread;
inline constexpr const uint3& blockIdx = santa::simt::position.block;
inline constexpr const dim3& blockDim = santa::simt::position.block_size;
inline constexpr const dim3& gridDim = santa::simt::position.grid_size;
constexpr int warpSize = 32;
using std::max;
using std::min;

namespace santa::simt {

template <class T>
__attribute__((always_inline)) inline T warp_value(WarpOp op, uint32_t mask, T value, int argument, int width,
                                                   Location at) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "not a type of CUDA's");
  WarpOperands operands = {.argument = argument, .width = width};
  std::memcpy(&operands.value, &value, sizeof value);
  const uint64_t result = warp_operation(op, mask, operands, at);
  std::memcpy(&value, &result, sizeof value);
  return value;
}

// Out of line and without the checker's calls: it is told of the access as an atomic one.
template <class T, class Change>
__attribute__((noinline, no_sanitize("thread"))) T atomic(T* p, const Change& change) {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "sums of floats depend on their order");
  before_atomic(p, sizeof(T), __builtin_return_address(0));
  const T old = *p;
  *p = change(old);
  return old;
}

template <class... P, class... A>
void launch(const Launch& config, void (*kernel)(P...), A&&... arguments) {
  static_assert((sizeof(P) + ... + 0) <= 4096, "parameters of a kernel are limited to 4 KiB");
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> parameters;
  };
  const Call call = {kernel, std::tuple<P...>(std::forward<A>(arguments)...)};
  const auto body = [](const void* argument) {
    std::apply(static_cast<const Call*>(argument)->kernel, static_cast<const Call*>(argument)->parameters);
  };
  run(config, body, &call, sizeof call);
}

}  // namespace santa::simt

#define SANTA_AT santa::simt::Location at = santa::simt::Location::here()

__forceinline__ void __syncthreads(SANTA_AT) { santa::simt::sync_threads(santa::simt::Vote::kCount, false, at); }
__forceinline__ int __syncthreads_count(int p, SANTA_AT) {
  return santa::simt::sync_threads(santa::simt::Vote::kCount, p != 0, at);
}
__forceinline__ int __syncthreads_and(int p, SANTA_AT) {
  return santa::simt::sync_threads(santa::simt::Vote::kAll, p != 0, at);
}
__forceinline__ int __syncthreads_or(int p, SANTA_AT) {
  return santa::simt::sync_threads(santa::simt::Vote::kAny, p != 0, at);
}

__forceinline__ void __syncwarp(unsigned mask = ~0u, SANTA_AT) {
  santa::simt::warp_operation(santa::simt::WarpOp::kSync, mask, {}, at);
}
template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32, SANTA_AT) {
  return santa::simt::warp_value(santa::simt::WarpOp::kShuffle, mask, value, lane, width, at);
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SANTA_AT) {
  return santa::simt::warp_value(santa::simt::WarpOp::kShuffleUp, mask, value, static_cast<int>(delta), width, at);
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SANTA_AT) {
  return santa::simt::warp_value(santa::simt::WarpOp::kShuffleDown, mask, value, static_cast<int>(delta), width,
                                 at);
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SANTA_AT) {
  return santa::simt::warp_value(santa::simt::WarpOp::kShuffleXor, mask, value, lanes, width, at);
}

// NOLINTBEGIN(bugprone-macro-parentheses): types in parentheses are casts.
#define SANTA_WARP_REDUCTION(Result, name, Value, op)                                                     \
  __forceinline__ Result name(unsigned mask, Value value, SANTA_AT) {                                     \
    return static_cast<Result>(                                                                           \
        santa::simt::warp_value(santa::simt::WarpOp::op, mask, static_cast<unsigned>(value), 0, 32, at)); \
  }
SANTA_WARP_REDUCTION(unsigned, __ballot_sync, int, kBallot)
SANTA_WARP_REDUCTION(int, __all_sync, int, kAll)
SANTA_WARP_REDUCTION(int, __any_sync, int, kAny)
SANTA_WARP_REDUCTION(unsigned, __reduce_add_sync, unsigned, kAdd)
SANTA_WARP_REDUCTION(unsigned, __reduce_min_sync, unsigned, kMin)
SANTA_WARP_REDUCTION(unsigned, __reduce_max_sync, unsigned, kMax)
SANTA_WARP_REDUCTION(int, __reduce_add_sync, int, kAdd)
SANTA_WARP_REDUCTION(int, __reduce_min_sync, int, kMinSigned)
SANTA_WARP_REDUCTION(int, __reduce_max_sync, int, kMaxSigned)
SANTA_WARP_REDUCTION(unsigned, __reduce_and_sync, unsigned, kAnd)
SANTA_WARP_REDUCTION(unsigned, __reduce_or_sync, unsigned, kOr)
SANTA_WARP_REDUCTION(unsigned, __reduce_xor_sync, unsigned, kXor)
#undef SANTA_WARP_REDUCTION

#define SANTA_ATOMIC(name, T, changed)                                      \
  __forceinline__ T name(T* p, T value) {                                   \
    return santa::simt::atomic(p, [value](T old) -> T { return changed; }); \
  }
#define SANTA_ATOMICS(T)                                                                      \
  SANTA_ATOMIC(atomicAdd, T, old + value)                                                     \
  SANTA_ATOMIC(atomicExch, T, (static_cast<void>(old), value))                                \
  SANTA_ATOMIC(atomicMin, T, value < old ? value : old)                                       \
  SANTA_ATOMIC(atomicMax, T, value > old ? value : old)                                       \
  SANTA_ATOMIC(atomicAnd, T, old& value)                                                      \
  SANTA_ATOMIC(atomicOr, T, old | value)                                                      \
  SANTA_ATOMIC(atomicXor, T, old ^ value)                                                     \
  __forceinline__ T atomicCAS(T* p, T expected, T value) {                                    \
    return santa::simt::atomic(p, [=](T old) -> T { return old == expected ? value : old; }); \
  }
SANTA_ATOMICS(int)
SANTA_ATOMICS(unsigned)
SANTA_ATOMICS(unsigned long long)
// Wraps to 0 past `value`: a counter of arrivals that resets itself.
SANTA_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
#undef SANTA_ATOMICS
#undef SANTA_ATOMIC
// NOLINTEND(bugprone-macro-parentheses)

inline void __threadfence() { santa::simt::fence(); }
[[noreturn]] __forceinline__ void __trap() { santa::simt::trap(); }

template <class To, class From>
To santa_simt_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline int __float_as_int(float x) { return santa_simt_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return santa_simt_bits<unsigned>(x); }
inline float __int_as_float(int x) { return santa_simt_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return santa_simt_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
// IEEE operations that nvcc must not fuse or approximate; a compiler with -ffp-contract=off does neither.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

#undef SANTA_AT
// NOLINTEND(bugprone-reserved-identifier)
