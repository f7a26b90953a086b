// Orders are what they say; limits of a launch and misuse by a kernel give errors that name kernel, block and
// thread, and what follows an error is not touched by it.

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "test_simt_checks.h"
#include "test_simt_kernels.cuh"

namespace santa::simt_test {
namespace {

// --- Kernels.

__global__ void nothing(int* visited) {
  if (visited != nullptr && thread_index() == 0) atomicAdd(visited, 1);
}
__global__ void stop_at(uint32_t block) {
  if (blockIdx.x == block) __trap();
}
__global__ void throws() { throw std::domain_error("of the kernel"); }
__global__ void reads(const int* p, int* out) { *out = *p; }
__global__ void divides(int a, int b, int* out) { *out = a / b; }
__global__ void recurses(volatile int* depth) {
  volatile int block[1000];
  block[*depth % 1000] = 1;
  *depth = *depth + 1;
  if (*depth < 100000) recurses(depth);
  *depth = block[0];
}
__global__ void leaves_early(uint32_t who) {
  if (thread_index() == who) return;
  __syncthreads();
}
__global__ void stuck() {
  if (thread_index() == 0 || thread_index() >= 32) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}
__global__ void half_a_warp(uint32_t* out) {
  if (lane_id() >= 16) return;
  __syncwarp();  // lanes that have ended are not waited for
  out[thread_index()] = __ballot_sync(kAllLanes, lane_id() % 2 == 0);
}
__global__ void counts_twice(uint32_t* counter, uint32_t* seen) {  // seen [threads][2]
  seen[thread_index() * 2] = atomicAdd(counter, 1u);
  seen[thread_index() * 2 + 1] = atomicAdd(counter, 1u);
}
__global__ void touches(const unsigned char* in, float* out) {
  out[thread_index()] = static_cast<float>(load<4>(in + thread_index() * 4).word[0]);
}
__global__ void nested() { launch(nothing, {.name = "inner", .grid = 1, .block = 1}, nullptr); }
__global__ void big_shared(int* out) {
  auto& big = shared_memory<struct Big, int[12 << 8]>();  // 12 KiB
  big[thread_index()] = 1;
  out[0] = big[0];
}
__global__ void too_big_shared(int* out) { out[0] = shared_memory<struct TooBig, int[(48 << 8) + 1]>()[0]; }

// --- Orders.

// Not for the race checker, which would find that this kernel has races.
std::vector<uint32_t> arrivals_in(simt::Order order, uint64_t seed, int resident) {
  const simt::Options before = simt::options;
  simt::options.order = order;
  simt::options.seed = seed;
  simt::options.resident_blocks = resident;
  uint32_t next = 0;
  std::vector<uint32_t> out(3 * 40 * 2);
  launch(arrivals, {.name = "arrivals", .grid = 3, .block = 40}, &next, out.data());
  simt::options = before;
  return out;
}

void check_orders() {
  if (kRaces) return;
  const auto forward = arrivals_in(simt::Order::kForward, 1, 1);
  const auto reverse = arrivals_in(simt::Order::kReverse, 1, 1);
  for (uint32_t i = 0; i < forward.size(); ++i) {
    CHECK(forward[i] == i / 80 * 40 + i % 40);  // each block twice over its threads
    CHECK(reverse[i] == 119 - forward[i]);
  }
  const auto shuffled = arrivals_in(simt::Order::kShuffled, 1, 1);
  CHECK(shuffled == arrivals_in(simt::Order::kShuffled, 1, 1));
  CHECK(shuffled != arrivals_in(simt::Order::kShuffled, 2, 1));
  std::vector<uint32_t> times(120);
  for (const uint32_t t : shuffled) ++times[t];
  for (const uint32_t n : times) CHECK(n == 2);
  // Blocks one after the other, or each among the others.
  const auto changes = [](const std::vector<uint32_t>& list) {
    int n = 0;
    for (size_t i = 1; i < list.size(); ++i) n += list[i] / 40 != list[i - 1] / 40 ? 1 : 0;
    return n;
  };
  CHECK(changes(shuffled) == 2);
  CHECK(changes(arrivals_in(simt::Order::kShuffled, 1, 3)) > 50);
  // Two blocks are done, both rounds, when the last thread of the third has its first turn.
  const auto starving = arrivals_in(simt::Order::kStarving, 1, 3);
  CHECK(starving == arrivals_in(simt::Order::kStarving, 1, 3));
  CHECK(starving != arrivals_in(simt::Order::kStarving, 2, 3));
  CHECK(std::find(starving.begin(), starving.end(), starving.back()) - starving.begin() == 80 + 80 + 39);
  const auto in_order = [](std::vector<uint32_t> list) { return std::is_sorted(list.begin(), list.begin() + 40); };
  CHECK(in_order(forward) && !in_order(shuffled) && !in_order(arrivals_in(simt::Order::kStarving, 1, 1)));
  bool other_order = false, other_last = false;  // of blocks
  for (uint64_t seed = 1; seed < 9; ++seed) {
    other_order |= arrivals_in(simt::Order::kShuffled, seed, 1)[0] / 40 != shuffled[0] / 40;
    other_last |= arrivals_in(simt::Order::kStarving, seed, 3).back() / 40 != starving.back() / 40;
  }
  CHECK(other_order && other_last);

  // Atomics are where a shuffle lets others go first.
  const auto apart = [](simt::Order order) {
    simt::options.order = order;
    uint32_t counter = 0;
    int n = 0;
    std::vector<uint32_t> seen(64 * 2);
    launch(counts_twice, {.name = "counts_twice", .grid = 1, .block = 64}, &counter, seen.data());
    for (int t = 0; t < 64; ++t) n += seen[t * 2 + 1] != seen[t * 2] + 1 ? 1 : 0;
    simt::options = {};
    return n;
  };
  CHECK(apart(simt::Order::kForward) == 0 && apart(simt::Order::kShuffled) > 32);
}

// --- Launches and misuse.

void check_limits() {
  const auto refused = [](const char* part, LaunchConfig config) {
    config.name = "nothing";
    expect({"kernel 'nothing'", part}, [&] { launch(nothing, config, nullptr); });
  };
  int visited = 0;
  launch(nothing, {.name = "nothing", .grid = 2, .block = 1024}, &visited);
  launch(nothing, {.name = "nothing", .grid = dim3(1, 65535), .block = dim3(1, 1, 64)}, nullptr);
  CHECK(visited == 2);
  refused("block x is 1025", {.grid = 1, .block = 1025});
  refused("block z is 65", {.grid = 1, .block = dim3(1, 1, 65)});
  refused("1056 threads", {.grid = 1, .block = dim3(32, 33)});
  refused("grid y is 65536", {.grid = dim3(1, 65536), .block = 1});
  refused("grid z is 65536", {.grid = dim3(1, 1, 65536), .block = 1});
  refused("grid x is 2147483648", {.grid = 1u << 31, .block = 1});
  refused("grid x is 0", {.grid = 0, .block = 1});
  refused("block y is 0", {.grid = 1, .block = dim3(1, 0)});
  refused("101377 bytes of dynamic shared memory", {.grid = 1, .block = 1, .shared_bytes = 99 * 1024 + 1});

  int out = 0;
  const auto big = [&](int kib) {
    launch(big_shared, {.name = "big", .grid = 1, .block = 1, .shared_bytes = size_t(kib) << 10}, &out);
  };
  big(99 - 12);
  expect({"kernel 'big'", "of shared memory; the limit is 101376"}, [&] { big(99 - 11); });
  simt::options.shared_limit = 227 * 1024;
  big(99 - 11);
  simt::options.shared_limit = 99 * 1024;
  expect({"49156 bytes of static shared memory"},
         [&] { launch(too_big_shared, {.name = "too big", .grid = 1, .block = 1}, &out); });

  // As many blocks as there may be; from the end, where a 32-bit product would have gone wrong.
  const simt::Order before = simt::options.order;
  simt::options.order = simt::Order::kReverse;
  const uint32_t most = (1u << 31) - 1;
  expect({"kernel 'stop', block (2147483646, 0, 0), thread (0, 0, 0): __trap at ", "test_simt_misuse.cpp"},
         [&] { launch(stop_at, {.name = "stop", .grid = most, .block = 1}, most - 1); });
  simt::options.order = before;
}

void check_right_kernel() {
  const uint32_t blocks = 5, threads = 64;
  std::vector<uint32_t> counter(1), partial(blocks * threads), out(threads);
  launch(last_block, {.name = "last_block", .grid = blocks, .block = threads}, counter.data(), partial.data(),
         out.data());
  for (uint32_t t = 0; t < threads; ++t) CHECK(out[t] == 10 + blocks * t);
  std::vector<uint32_t> found(64);
  launch(half_a_warp, {.name = "half_a_warp", .grid = 1, .block = 64}, found.data());
  for (uint32_t t = 0; t < 64; ++t) CHECK(found[t] == (t % 32 < 16 ? 0x00005555u : 0u));
}

void check_misuse() {
  int out = 0;
  const LaunchConfig one = {.name = "one", .grid = 1, .block = 1};
  try {
    launch(throws, one);
    CHECK(false);
  } catch (const std::domain_error& error) {
    CHECK(std::string(error.what()) == "of the kernel");
  }
  expect({"kernel 'one', block (0, 0, 0), thread (0, 0, 0)", "null pointer"},
         [&] { launch(reads, one, nullptr, &out); });
  // Where no memory is: what an offset of 32 bits too few gives.
  const int* here = &out;
  const int* wild = here + (((int64_t{1} << 45) - reinterpret_cast<intptr_t>(here)) / 4);
  expect({"access to address 0x200000000000"}, [&] { launch(reads, one, wild, &out); });
  expect({"division"}, [&] { launch(divides, one, 1, 0, &out); });
  int depth = 0;
  expect({"stack overflow"}, [&] { launch(recurses, one, &depth); });
  // Whichever comes first.
  for (const uint32_t who : {0u, 63u}) {
    const bool first = simt::options.order == simt::Order::kForward ? who == 0 : who == 63;
    if (simt::options.order > simt::Order::kReverse) break;
    expect({"kernel 'many', block (0, 0, 0)",
            first ? "which threads that have ended will not reach" : "ends while thread"},
           [&] { launch(leaves_early, {.name = "many", .grid = 1, .block = 64}, who); });
  }
  expect({"kernel 'stuck', block (0, 0, 0): no thread can go on: 0-0 in __syncthreads at test_simt_misuse.cpp:",
          "; 1-31 in __syncwarp at test_simt_misuse.cpp:", "; 32-63 in __syncthreads at test_simt_misuse.cpp:"},
         [&] { launch(stuck, {.name = "stuck", .grid = 1, .block = 64}); });
  expect({"kernel 'one'", "launches a kernel"}, [&] { launch(nested, one); });
  // None of that stays.
  check_right_kernel();
}

void check_global_memory() {
  alignas(4) unsigned char in[65 * 4] = {};
  std::vector<float> out(65);
  const auto run = [&](int64_t in_bytes, int64_t out_bytes) {
    simt::global_memory = {{in, in_bytes, "in"}, {out.data(), out_bytes, "out"}};
    const std::string error =
        error_of([&] { launch(touches, {.name = "touches", .grid = 1, .block = 65}, in, out.data()); });
    simt::global_memory.clear();
    return error;
  };
  CHECK(run(260, 260).empty());
  CHECK(run(259, 260).find(
            "thread (64, 0, 0): access to 4 bytes outside of global memory, 1 bytes past the end of in") !=
        std::string::npos);
  // A plain store: with the checker alone.
  CHECK(kRaces ==
        (run(260, 256).find("4 bytes past the end of out, at test_simt_misuse.cpp") != std::string::npos));
}

void check_host_threads() {
  std::vector<std::thread> threads;
  std::vector<int> visits(4);
  threads.reserve(visits.size());
  for (int& visited : visits) {
    threads.emplace_back([&visited] {
      for (int i = 0; i < 20; ++i) launch(nothing, {.name = "nothing", .grid = 50, .block = 32}, &visited);
    });
  }
  // Accesses beside kernels are no kernel's.
  std::vector<int> own(100);
  for (int i = 0; i < 20000; ++i) {
    for (int& x : own) x += i;
  }
  CHECK(own[0] == own[99]);
  for (std::thread& thread : threads) thread.join();
  for (const int visited : visits) CHECK(visited == 1000);
}

}  // namespace
}  // namespace santa::simt_test

int main() {
  using namespace santa::simt_test;
  using santa::simt::Order;
  check_orders();
  check_limits();
  check_host_threads();
  for (const auto order : {Order::kForward, Order::kReverse, Order::kShuffled, Order::kStarving}) {
    for (const int resident : {1, 3}) {
      santa::simt::options = {.order = order, .resident_blocks = resident};
      check_misuse();
      check_global_memory();
    }
  }
  std::printf("ok %d\n", checks);
}
