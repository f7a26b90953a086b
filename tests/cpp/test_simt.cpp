// The emulator does what CUDA says: each feature by a kernel of its own, in every order; limits and misuse give
// errors that name kernel, block and thread; what follows an error is not touched by it.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "test_simt_kernels.cuh"

namespace santa::simt_test {
namespace {

int checks = 0;

#define CHECK(...)                                                                     \
  do {                                                                                 \
    ++checks;                                                                          \
    if (!(__VA_ARGS__)) {                                                              \
      std::fprintf(stderr, "%s:%d: %s (order %d)\n", __FILE__, __LINE__, #__VA_ARGS__, \
                   static_cast<int>(simt::options.order));                             \
      std::exit(1);                                                                    \
    }                                                                                  \
  } while (0)

constexpr bool kRaces =
#if defined(SANTA_SIMT_RACES) && SANTA_SIMT_RACES
    true;
#else
    false;
#endif

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const simt::Error& error) {
    return error.what();
  }
  return "";
}

// The launch fails with an error that has every one of these in it.
void expect(std::initializer_list<const char*> parts, const std::function<void()>& f, int line) {
  const std::string error = error_of(f);
  for (const char* part : parts) {
    ++checks;
    if (error.find(part) != std::string::npos) continue;
    std::fprintf(stderr, "line %d: '%s' is not in the error: %s\n", line, part, error.c_str());
    std::exit(1);
  }
}

void check_indices() {
  const dim3 grid(3, 2, 4), block(5, 3, 7);
  const int blocks = 24, threads = 105;
  std::vector<uint32_t> visits(blocks * threads), lanes(blocks * threads);
  launch(indices, {.name = "indices", .grid = grid, .block = block}, visits.data(), lanes.data());
  for (int i = 0; i < blocks * threads; ++i) {
    CHECK(visits[i] == 1);
    CHECK(lanes[i] == static_cast<uint32_t>(i % threads % 32));
  }
}

void check_shuffles() {
  std::vector<uint64_t> out(64 * kShuffles);
  launch(shuffles, {.name = "shuffles", .grid = 1, .block = 64}, out.data());
  for (int t = 0; t < 64; ++t) {
    const int lane = t % 32, warp = t - lane, segment = t - t % 8;
    const uint64_t* got = &out[t * kShuffles];
    CHECK(got[0] == static_cast<uint64_t>((warp + 5) * 10));
    CHECK(got[1] == static_cast<uint64_t>(lane < 3 ? t : t - 3));
    CHECK(got[2] == static_cast<uint64_t>(t % 8 + 3 > 7 ? t : t + 3));
    CHECK(got[3] == static_cast<uint64_t>(t ^ 9));
    CHECK(got[4] == static_cast<uint64_t>(segment + 3));
    // An exclusive or may reach an earlier segment, not a later one.
    CHECK(got[5] == static_cast<uint64_t>((t ^ 9) > segment + 7 ? t : t ^ 9));
    CHECK(got[6] == static_cast<uint64_t>(t ^ 1));
    CHECK(got[7] == static_cast<uint64_t>(lane < 16 ? t ^ 2 : lane == 16 ? t : t - 1));
    CHECK(got[8] == (uint64_t{1} << 40) + warp + 31);
  }
}

void check_votes() {
  std::vector<uint32_t> out(64 * kVotes);
  launch(votes, {.name = "votes", .grid = 1, .block = 64}, out.data());
  for (int t = 0; t < 64; ++t) {
    const int warp = t / 32 * 32;
    uint32_t ballot = 0, conjunction = ~0u, disjunction = 0, exclusive = 0, sum = 0;
    for (int lane = 0; lane < 32; ++lane) {
      const auto u = static_cast<uint32_t>(warp + lane);
      ballot |= static_cast<uint32_t>(u % 3 == 0) << lane;
      conjunction &= u | 5u;
      disjunction |= 1u << u % 20;
      exclusive ^= u * u;
      sum += u - 5;
    }
    const bool first = warp == 0;
    const uint32_t expected[kVotes] = {ballot,
                                       first,
                                       first,
                                       sum,
                                       static_cast<uint32_t>(warp - 5),
                                       static_cast<uint32_t>(warp + 26),
                                       first ? 0u : 27u,  // 0 - 5 and its like are large as unsigned numbers
                                       first ? ~0u : 58u,
                                       conjunction,
                                       disjunction,
                                       exclusive};
    for (int i = 0; i < kVotes; ++i) CHECK(out[t * kVotes + i] == expected[i]);
  }
}

void check_reductions() {
  std::vector<float> sums(64), maxima(64), of_8(64);
  for (int t = 0; t < 64; ++t) {
    sums[t] = of_8[t] = std::sin(static_cast<float>(t)) * 1e3f;
    maxima[t] = t == 40 ? NAN : std::cos(static_cast<float>(t));
  }
  const std::vector<float> in = sums;
  launch(reductions, {.name = "reductions", .grid = 1, .block = 64}, sums.data(), maxima.data(), of_8.data());
  const auto crosswise = [&](int first, int n) {
    std::vector<float> x(in.begin() + first, in.begin() + first + n);
    for (int distance = n / 2; distance > 0; distance /= 2) {
      for (int i = 0; i < distance; ++i) x[i] += x[i + distance];
    }
    return x[0];
  };
  for (int t = 0; t < 64; ++t) {
    CHECK(sums[t] == crosswise(t / 32 * 32, 32));
    CHECK(of_8[t] == crosswise(t / 8 * 8, 8));
    CHECK(t < 32 ? maxima[t] == 1.0f : std::isnan(maxima[t]));
  }
}

void check_block_votes() {
  std::vector<int> out(3);
  launch(block_votes, {.name = "block_votes", .grid = 1, .block = dim3(25, 8)}, out.data());
  CHECK(out[0] == 40 && out[1] == 1 && out[2] == 0);
}

void check_shared_memory() {
  std::vector<int> in(5 * 200), out(in.size());
  std::iota(in.begin(), in.end(), 7);
  launch(reverse, {.name = "reverse", .grid = 5, .block = 200, .shared_bytes = 800}, in.data(), out.data());
  for (int i = 0; i < 1000; ++i) CHECK(out[i] == 2 * in[i / 200 * 200 + 199 - i % 200]);

  std::vector<uint32_t> found(3 * 3);
  const auto run = [&] {
    launch(fresh_memory, {.name = "fresh_memory", .grid = 3, .block = 1, .shared_bytes = 32}, found.data());
  };
  if (kRaces) {
    expect({"fresh_memory", "byte 12 of Fresh, which nobody has written", "test_simt_kernels.cuh"}, run, __LINE__);
    return;
  }
  run();
  for (const uint32_t bits : found) {  // in each block, also after one that wrote there
    float single;
    double pair;
    const uint64_t twice = static_cast<uint64_t>(bits) << 32 | bits;
    std::memcpy(&single, &bits, sizeof single);
    std::memcpy(&pair, &twice, sizeof pair);
    const auto half = static_cast<uint16_t>(bits);
    CHECK(std::isnan(single) && std::isnan(pair) && std::isnan(to_float(Half{half})));
    CHECK(std::isnan(to_float(BFloat{half})) && static_cast<int>(bits) > 1 << 30);
  }
}

void check_atomics() {
  std::vector<uint32_t> words(10);
  std::vector<int> integers(2);
  std::vector<uint64_t> longs(1);
  words[2] = 1000;
  words[4] = ~0u;
  launch(integer_atomics, {.name = "integer_atomics", .grid = 3, .block = 50}, words.data(), integers.data(),
         longs.data());
  const uint32_t sum = 149 * 150 / 2;
  uint32_t exclusive = 0;
  for (uint32_t t = 0; t < 150; ++t) exclusive ^= t;
  CHECK(words[0] == sum && words[1] == 149 && words[2] == 0 && words[3] == ~0u && words[4] == 0xFFFF0000u);
  CHECK(words[5] == exclusive && words[6] == 150 % 7 && words[7] < 150 && words[8] == 300 && words[9] == sum);
  CHECK(integers[0] == -149 && integers[1] == 0 && longs[0] == (uint64_t{150} << 33) + sum);
}

template <int kBytes>
void check_copies() {
  alignas(16) unsigned char in[64 * kBytes];
  for (int last : {kBytes, kBytes - 1, 3, 0}) {
    std::vector<unsigned char> out(sizeof in);
    for (size_t i = 0; i < sizeof in; ++i) in[i] = static_cast<unsigned char>(1 + i % 250);
    launch(copies<kBytes>, {.name = "copies", .grid = 1, .block = 64}, in, last, out.data());
    for (int i = 0; i < 64 * kBytes; ++i) CHECK(out[i] == (i < 63 * kBytes + last ? in[i] : 0));
  }
  std::vector<uint32_t> sums(64);
  launch(loads<kBytes>, {.name = "loads", .grid = 1, .block = 64}, in, sums.data());
  for (int t = 0; t < 64; ++t) {
    uint32_t sum = 0, word;
    for (int i = 0; i < kBytes / 4; ++i) {
      std::memcpy(&word, &in[t * kBytes + i * 4], 4);
      sum += word * static_cast<uint32_t>(i + 1);
    }
    CHECK(sums[t] == sum);
  }
}

void check_groups() {
  alignas(16) uint32_t in[64 * 12];
  std::iota(in, in + 64 * 12, 5u);
  std::vector<uint32_t> out(64 * 12);
  launch(groups, {.name = "groups", .grid = 1, .block = 64}, in, out.data());
  CHECK(std::memcmp(in, out.data(), sizeof in) == 0);
  const auto run = [&] { launch(unwaited, {.name = "unwaited", .grid = 1, .block = 1}, in, out.data()); };
  if (kRaces) {
    expect({"byte 16 of Unwaited", "before the wait for a cp.async by thread 0"}, run, __LINE__);
  } else {
    run();
    for (int i = 0; i < 8; ++i) CHECK(i < 4 ? out[i] == in[i] : out[i] == 0x7FFF7FFFu);
  }
}

template <class T>
void check_conversions() {
  constexpr int kAll = 1 << 16;
  std::vector<T> in(kAll), narrow(kAll);
  std::vector<float> wide(kAll);
  for (int i = 0; i < kAll; ++i) in[i] = {static_cast<uint16_t>(i)};
  launch(conversions<T>, {.name = "conversions", .grid = 4, .block = 128}, in.data(), wide.data(), narrow.data(),
         kAll);
  for (int i = 0; i < kAll; ++i) CHECK(std::isnan(wide[i]) || narrow[i].bits == i);
  CHECK(wide[std::is_same_v<T, Half> ? 0x3E00 : 0x3FC0] == 1.5f);
}

void check_last_block() {
  const uint32_t blocks = 37, threads = 64;
  std::vector<uint32_t> counter(1), partial(blocks * threads, ~0u), out(threads);
  for (uint32_t launches = 1; launches <= 3; ++launches) {
    launch(last_block, {.name = "last_block", .grid = blocks, .block = threads}, counter.data(), partial.data(),
           out.data());
    CHECK(counter[0] == 0);
    for (uint32_t t = 0; t < threads; ++t) CHECK(out[t] == launches * (blocks * (blocks - 1) / 2 + blocks * t));
  }
}

void check_overlap() {
  std::vector<int> between(64), out(64);
  launch(first_grid, {.name = "first", .grid = 1, .block = 64}, between.data());
  launch(second_grid, {.name = "second", .grid = 1, .block = 64, .overlap = true}, between.data(), out.data());
  for (int t = 0; t < 64; ++t) CHECK(out[t] == 3 * t + 1);
  std::vector<int> elsewhere(64);
  expect(
      {"kernel 'first', block (0, 0, 0)", "without having waited for the previous grid"},
      [&] { launch(first_grid, {.name = "first", .grid = 1, .block = 64, .overlap = true}, elsewhere.data()); },
      __LINE__);
}

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
}

// --- Launches and misuse.

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
__global__ void nested() { launch(nothing, {.name = "inner", .grid = 1, .block = 1}, nullptr); }
__global__ void big_shared(int* out) {
  auto& big = shared_memory<struct Big, int[12 << 8]>();  // 12 KiB
  big[thread_index()] = 1;
  out[0] = big[0];
}
__global__ void too_big_shared(int* out) { out[0] = shared_memory<struct TooBig, int[(48 << 8) + 1]>()[0]; }

void check_limits() {
  const auto refused = [](const char* part, LaunchConfig config) {
    config.name = "nothing";
    expect({"kernel 'nothing'", part}, [&] { launch(nothing, config, nullptr); }, __LINE__);
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
  expect({"kernel 'big'", "of shared memory; the limit is 101376"}, [&] { big(99 - 11); }, __LINE__);
  simt::options.shared_limit = 227 * 1024;
  big(99 - 11);
  simt::options.shared_limit = 99 * 1024;
  expect(
      {"49156 bytes of static shared memory"},
      [&] { launch(too_big_shared, {.name = "too big", .grid = 1, .block = 1}, &out); }, __LINE__);

  // As many blocks as there may be; from the end, where a 32-bit product would have gone wrong.
  const simt::Order before = simt::options.order;
  simt::options.order = simt::Order::kReverse;
  const uint32_t most = (1u << 31) - 1;
  expect(
      {"kernel 'stop', block (2147483646, 0, 0), thread (0, 0, 0): __trap at ", "test_simt.cpp"},
      [&] { launch(stop_at, {.name = "stop", .grid = most, .block = 1}, most - 1); }, __LINE__);
  simt::options.order = before;
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
  expect(
      {"kernel 'one', block (0, 0, 0), thread (0, 0, 0)", "null pointer"},
      [&] { launch(reads, one, nullptr, &out); }, __LINE__);
  // Where no memory is: what an offset of 32 bits too few gives.
  const int* here = &out;
  const int* wild = here + (((int64_t{1} << 45) - reinterpret_cast<intptr_t>(here)) / 4);
  expect({"access to address 0x200000000000"}, [&] { launch(reads, one, wild, &out); }, __LINE__);
  expect({"division"}, [&] { launch(divides, one, 1, 0, &out); }, __LINE__);
  int depth = 0;
  expect({"stack overflow"}, [&] { launch(recurses, one, &depth); }, __LINE__);
  // Whichever comes first.
  for (const uint32_t who : {0u, 63u}) {
    const bool first = simt::options.order == simt::Order::kForward ? who == 0 : who == 63;
    if (simt::options.order > simt::Order::kReverse) break;
    expect(
        {"kernel 'many', block (0, 0, 0)",
         first ? "which threads that have ended will not reach" : "ends while thread"},
        [&] { launch(leaves_early, {.name = "many", .grid = 1, .block = 64}, who); }, __LINE__);
  }
  expect({"kernel 'one'", "launches a kernel"}, [&] { launch(nested, one); }, __LINE__);
  // None of that stays.
  check_shared_memory();
  check_last_block();
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
  for (std::thread& thread : threads) thread.join();
  for (const int visited : visits) CHECK(visited == 1000);
}

void check_all() {
  check_indices();
  check_shuffles();
  check_votes();
  check_reductions();
  check_block_votes();
  check_shared_memory();
  check_atomics();
  check_copies<4>();
  check_copies<8>();
  check_copies<16>();
  check_groups();
  check_conversions<Half>();
  check_conversions<BFloat>();
  check_last_block();
  check_overlap();
  check_misuse();
}

}  // namespace
}  // namespace santa::simt_test

int main() {
  using namespace santa::simt_test;
  using santa::simt::Order;
  for (const auto order : {Order::kForward, Order::kReverse, Order::kShuffled, Order::kStarving}) {
    for (const int resident : {1, 3}) {
      santa::simt::options = {.order = order, .resident_blocks = resident};
      check_all();
    }
  }
  santa::simt::options = {};
  check_orders();
  check_limits();
  check_host_threads();
  std::printf("ok %d\n", checks);
}
