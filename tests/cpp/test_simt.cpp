// The emulator does what CUDA says: each feature by a kernel of its own, in every order.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "test_simt_checks.h"
#include "test_simt_kernels.cuh"

namespace santa::simt_test {
namespace {

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

void check_live_values() {
  std::vector<Live> all(64);
  for (uint32_t t = 0; t < 64; ++t) all[t] = {t, t + 1, t * 2, t * t, 5, ~t, t << 20, 9};
  const std::vector<Live> before = all;
  launch(live_values, {.name = "live_values", .grid = 1, .block = 64}, all.data());
  for (int t = 0; t < 64; ++t) {
    Live x = before[t];
    for (int step = 0; step < 6; ++step) x = mixed(x);
    CHECK(std::memcmp(&x, &all[t], sizeof x) == 0);
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
    expect({"fresh_memory", "byte 12 of Fresh, which nobody has written", "test_simt_kernels.cuh"}, run);
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
    expect({"byte 16 of Unwaited", "before the wait for a cp.async by thread 0"}, run);
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

void check_chains() {
  const uint32_t blocks = 12, threads = 64;
  std::vector<uint32_t> counters(4), partial(blocks * threads), sums(3 * threads), out(threads);
  for (int time = 0; time < 2; ++time) {
    launch(last_of_groups, {.name = "last_of_groups", .grid = blocks, .block = threads}, counters.data(),
           partial.data(), sums.data(), out.data());
    for (uint32_t t = 0; t < threads; ++t) {
      uint32_t sum = 0;
      for (uint32_t b = 0; b < blocks; ++b) sum += b + t - (b + t) / 2;
      CHECK(out[t] == sum);
    }
  }
  int told = 0;
  launch(chain_of_lanes, {.name = "chain_of_lanes", .grid = 1, .block = 32}, &told);
  CHECK(told == 7);
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

void check_all() {
  check_indices();
  check_shuffles();
  check_votes();
  check_reductions();
  check_live_values();
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
  check_chains();
  check_overlap();
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
  std::printf("ok %d\n", checks);
}
