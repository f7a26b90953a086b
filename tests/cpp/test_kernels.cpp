// The torch-free half of the CPU backend under AddressSanitizer and UndefinedBehaviorSanitizer.
//
// K, V, masks and outputs are heap blocks of exactly the size that the shape gives, so that one element read or
// written past the last row is caught, at every level, dtype and tail. Results are compared with a plain loop in
// double. Prints "ok" and the number of steps; the first failure ends the program with 1.

#include "test_kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/convert.h"
#include "cpu/decode.h"
#include "cpu/draw.h"
#include "cpu/gather.h"
#include "cpu/kernels.h"
#include "cpu/level.h"
#include "cpu/tasks.h"
#include "math/draws.h"
#include "math/philox.h"
#include "math/softmax.h"
#include "math/weights.h"
#include "planner.h"

namespace {

template <class T>
bool equal(Block<T>& a, Block<T>& b) {
  return std::memcmp(a.data.get(), b.data.get(), a.size * sizeof(T)) == 0;
}

constexpr Method kMethods[] = {Method::kDense, Method::kMultinomial, Method::kStratified, Method::kSystematic,
                               Method::kShared};

template <class T>
void check_steps(const Sizes& sizes, const char* level) {
  Problem<T> problem(sizes);
  for (const Method method : kMethods) {
    auto first = problem.run(method, 9, serial, true);
    auto second = problem.run(method, 9, backwards, false);
    CHECK(equal(first.out, second.out) && equal(first.lse, second.lse), "%s: order of tasks changes the result",
          level);
    if (method == Method::kDense) problem.check_dense(first, level);
    // The matrix unit adds in an order of its own, blocks in that of the vectors below it.
    if (std::string(level) == "amx") continue;
    auto packed = problem.run(method, 9, backwards, true, true);
    CHECK(equal(first.out, packed.out) && equal(first.lse, packed.lse), "%s: a sketch changes the result", level);
    for (const bool shared : {false, true}) {
      const BernoulliParams bernoulli = {.draws = 2, .shared = shared};
      auto plain = problem.run(method, 9, serial, false, false, bernoulli);
      auto sparse = problem.run(method, 9, backwards, true, true, bernoulli);
      CHECK(equal(plain.out, sparse.out) && equal(plain.lse, sparse.lse), "%s: a sketch changes a draw", level);
    }
    for (int64_t i = 0; i < first.out.size; ++i)
      CHECK(to_float(first.out[i]) != 12352.0f && to_float(first.out[i]) != 12345.0f, "unwritten");
  }
}

template <class T>
void check_shapes(const char* level) {
  for (int64_t dim = 1; dim <= 70; ++dim) {
    for (const int64_t rows : {int64_t{1}, int64_t{3}, 1 + dim % 19}) {
      check_steps<T>({1, 1, 1 + dim % 6, rows, dim, 71 - dim, dim % 3 == 0, false, false}, level);
    }
  }
  for (const int64_t dim : {96, 100, 128, 200, 256, 257, 320})
    check_steps<T>({2, 1, 3, 21, dim, dim, false, false, true}, level);
  for (const int64_t rows : {0, 1, 15, 16, 17, 31, 33, 255, 256, 257, 511, 513, 770}) {
    check_steps<T>({2, 2, 3, rows, 9, 5, false, true, true}, level);
    check_steps<T>({2, 2, 5, rows, 16, 24, true, true, false}, level);
    check_steps<T>({1, 1, 2, rows, 8, 17, true, true, true}, level);
  }
  check_steps<T>({1, 2, 71, 40, 8, 8, true, false, false}, level);
}

// Sums of rows in chunks of three: fp32 within a chunk, fp64 between.
template <class T>
void check_gather(const KernelTable& kernels, Block<T>& x, Block<int64_t>& offsets, Block<float>& weights,
                  int64_t dim, int64_t heads) {
  const int64_t rows = offsets.size;
  Block<int64_t> chunks(rows + 1);
  for (int64_t i = 0; i < rows; ++i) chunks[i] = i / 3;
  chunks[rows] = -1;
  Block<double> sums(heads * pad(dim));
  for (int64_t i = 0; i < sums.size; ++i) sums[i] = 12345.0;
  kernels.gather[static_cast<int>(dtype_of<T>())]({.values = x.data.get(),
                                                   .offsets = offsets.data.get(),
                                                   .chunks = chunks.data.get(),
                                                   .rows = rows,
                                                   .value_dim = dim,
                                                   .weights = weights.data.get(),
                                                   .weights_stride = rows,
                                                   .heads = heads,
                                                   .sums = sums.data.get(),
                                                   .sums_stride = pad(dim)});
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t d = 0; d < dim; ++d) {
      Expected expected;
      for (int64_t begin = 0; begin < rows; begin += 3) {
        float chunk = 0.0f;
        for (int64_t i = begin; i < std::min(rows, begin + 3); ++i) {
          chunk = std::fma(weights[h * rows + i], to_float(x[offsets[i] + d]), chunk);
          // The generic level has no fused multiply-add: it rounds once more.
          expected.size += std::fabs(static_cast<double>(weights[h * rows + i]) * to_float(x[offsets[i] + d]));
        }
        expected.value += static_cast<double>(chunk);
      }
      CHECK(expected.near(sums[h * pad(dim) + d]), "gather");
    }
  }
}

// Conversions agree to the bit with those of convert.h, specials and tails among them.
template <class T>
void check_conversions(const KernelTable& kernels) {
  const int dtype = static_cast<int>(dtype_of<T>());
  const float specials[] = {0.0f,     -0.0f,     1.0f,      -2.5f,         65504.0f,    65519.9f, 65520.0f,
                            1e-8f,    6e-8f,     -5.96e-8f, 3.0517578e-5f, 1e30f,       -1e38f,   3.4e38f,
                            INFINITY, -INFINITY, 1e-40f,    1.00390625f,   1.01171875f, 1.001f};
  const int64_t count = static_cast<int64_t>(std::size(specials));
  for (int64_t n = 1; n <= 70; ++n) {
    Block<double> from(n);
    Block<T> narrowed(n);
    Block<float> widened(n);
    for (int64_t i = 0; i < n; ++i) {
      from[i] = i % 3 == 0 ? static_cast<double>(specials[(n + i) % count]) : static_cast<double>(normal()) * 1.1;
    }
    kernels.narrow[dtype](from.data.get(), n, 1.0, narrowed.data.get());
    for (int64_t i = 0; i < n; ++i) {
      T expected;
      store_as(static_cast<float>(from[i]), &expected);
      CHECK(std::memcmp(&expected, &narrowed[i], sizeof(T)) == 0, "narrow %g", from[i]);
    }
    kernels.widen[dtype](narrowed.data.get(), n, widened.data.get());
    for (int64_t i = 0; i < n; ++i) CHECK(widened[i] == to_float(narrowed[i]), "widen %g", from[i]);
    kernels.narrow[dtype](from.data.get(), n, -0.5, narrowed.data.get());
    for (int64_t i = 0; i < n; ++i) {
      T expected;
      store_as(static_cast<float>(from[i] * -0.5), &expected);
      CHECK(std::memcmp(&expected, &narrowed[i], sizeof(T)) == 0, "narrow -0.5 * %g", from[i]);
    }
    const double nan = std::nan("");
    kernels.narrow[dtype](&nan, 1, 1.0, narrowed.data.get());
    CHECK(to_float(narrowed[0]) != to_float(narrowed[0]), "NaN became a number");
  }
  ++steps;
}

void check_fold(const KernelTable& kernels) {
  for (int64_t n = kPadFloats; n <= 3 * kPadFloats; n += kPadFloats) {
    Block<float> from(n);
    Block<double> to(n), expected(n);
    for (int64_t i = 0; i < n; ++i) {
      from[i] = normal();
      expected[i] = to[i] = static_cast<double>(normal());
      expected[i] += static_cast<double>(from[i]) * 0.3;
    }
    kernels.fold(from.data.get(), n, 0.3, to.data.get());
    for (int64_t i = 0; i < n; ++i) CHECK(to[i] == expected[i], "fold");
  }
  ++steps;
}

// The kernels alone, on arrays of exactly the padded size that kernels.h promises them.
template <class T>
void check_tile(const KernelTable& kernels, int64_t heads, int64_t rows, int64_t dim) {
  const int dtype = static_cast<int>(dtype_of<T>());
  const int64_t stride = pad(dim, kPairFloats);
  Block<float> q(heads * stride), scores(heads * pad(rows)), weights(heads * rows), sums(heads * pad(dim));
  Block<T> x(rows * dim);
  Block<int64_t> offsets(rows);
  for (int64_t i = 0; i < x.size; ++i) rounded(normal(), &x[i]);
  for (int64_t i = 0; i < q.size; ++i) q[i] = i % stride < dim ? to_float(x[i % x.size]) : 0.0f;
  for (int64_t i = 0; i < weights.size; ++i) weights[i] = normal();
  for (int64_t i = 0; i < sums.size; ++i) sums[i] = 0.0f;
  for (int64_t i = 0; i < rows; ++i) offsets[i] = (rows - 1 - i) * dim;
  if (rows % 3 == 2) std::swap(offsets[0], offsets[rows / 2]);  // no longer at equal distances
  // Ahead are other rows, as many as a tile asks for and some more: their lines may be asked for, not read, and
  // nothing past their offsets.
  Block<int64_t> offsets_ahead((8192 - 1) / (dim * static_cast<int64_t>(sizeof(T))) + 1 + rows % 16);
  for (int64_t i = 0; i < offsets_ahead.size; ++i) offsets_ahead[i] = i % rows * dim;
  const RowsAhead ahead = {x.data.get(), offsets_ahead.data.get(), offsets_ahead.size};
  kernels.score[dtype]({.q = q.data.get(),
                        .q_stride = stride,
                        .heads = heads,
                        .keys = x.data.get(),
                        .offsets = offsets.data.get(),
                        .rows = rows,
                        .head_dim = dim,
                        .scale = 0.5f,
                        .scores = scores.data.get(),
                        .scores_stride = pad(rows),
                        .ahead = ahead});
  kernels.accumulate[dtype]({.values = x.data.get(),
                             .offsets = offsets.data.get(),
                             .rows = rows,
                             .value_dim = dim,
                             .weights = weights.data.get(),
                             .weights_stride = rows,
                             .heads = heads,
                             .sums = sums.data.get(),
                             .sums_stride = pad(dim),
                             .ahead = ahead});
  check_gather<T>(kernels, x, offsets, weights, dim, heads);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < rows; ++i) {
      Expected expected;
      for (int64_t d = 0; d < dim; ++d) expected.add(0.5 * q[h * stride + d] * to_float(x[offsets[i] + d]));
      CHECK(expected.near(scores[h * pad(rows) + i]), "score");
    }
    for (int64_t d = 0; d < dim; ++d) {
      Expected expected;
      for (int64_t i = 0; i < rows; ++i) {
        expected.add(static_cast<double>(weights[h * rows + i]) * to_float(x[offsets[i] + d]));
      }
      CHECK(expected.near(sums[h * pad(dim) + d]), "sum");
    }
  }
  ++steps;
}

template <class T>
void check_tiles(const KernelTable& kernels) {
  for (int64_t heads = 1; heads <= 9; ++heads) {
    for (int64_t rows = 1; rows <= 9; ++rows) {
      for (const int64_t dim : {1, 7, 8, 15, 16, 17, 40}) check_tile<T>(kernels, heads, rows, dim);
    }
  }
  // Whole tiles of the matrix unit, and one more of everything.
  for (const int64_t heads : {1, 4, 5, 17}) {
    for (const int64_t rows : {16, 17, 50}) {
      for (const int64_t dim : {32, 33, 160, 264}) check_tile<T>(kernels, heads, rows, dim);
    }
  }
}

void check_vectors(const KernelTable& kernels) {
  for (int64_t n = kPadFloats; n <= 20 * kPadFloats; n += kPadFloats) {
    Block<float> x(n);
    Block<uint32_t> weights(n), inclusion(n);
    Block<uint64_t> sums(n / kBlockRows), again(n / kBlockRows);
    for (int64_t i = 0; i < n; ++i) x[i] = 5 * normal();
    float largest = x[0];
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, x[i]);
    CHECK(kernels.maximum(x.data.get(), n) == largest, "maximum");
    const uint64_t total = kernels.weigh(x.data.get(), n, largest, weights.data.get(), sums.data.get());
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (i % kBlockRows == 0) again[i / kBlockRows] = 0;
      again[i / kBlockRows] += weights[i];
      sum += weights[i];
    }
    CHECK(sum == total && equal(sums, again), "weigh");
    for (int64_t i = 0; i < n / kBlockRows; ++i) again[i] = 0;
    CHECK(kernels.sum_blocks(weights.data.get(), n, again.data.get()) == total && equal(sums, again),
          "sum_blocks");
    const float reciprocal = reciprocal_total(total, 1.0f);
    kernels.include({weights.data.get(), n, &reciprocal, 1, n, 4.0f, inclusion.data.get(), sums.data.get()});
    x[n - 1] = std::nanf("");
    CHECK(std::isnan(kernels.maximum(x.data.get(), n)), "a NaN in the last lane");
    ++steps;
  }
  const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, std::nanf(""), 1e-30f, -3e38f, 1e-3f};
  for (const float cap : {0.5f, 30.0f, 1e20f}) {
    Block<float> x(256), capped(256);
    for (int64_t i = 0; i < 256; ++i) x[i] = i < 8 ? special[i] : cap * 3 * normal();
    std::memcpy(capped.data.get(), x.data.get(), 256 * sizeof(float));
    kernels.softcap(capped.data.get(), 256, cap);
    for (int64_t i = 0; i < 256; ++i) {
      const double exact = cap * std::tanh(static_cast<double>(x[i]) / cap);
      const double tiny = 3e-38 * cap;  // what underflows on the way
      const bool close = std::abs(capped[i] - exact) <= 5e-7 * std::abs(exact) + tiny;
      CHECK(std::isnan(x[i]) ? std::isnan(capped[i]) : close, "softcap");
      ++steps;
    }
  }
}

// Draws over densities that end in zeros, with every threshold at the edge of a row.
void check_draws() {
  const int64_t chunks = 3, rows = chunks * kChunkRows;
  for (int64_t last : {0, 15, 16, 255, 256, 700, 767}) {
    Block<uint32_t> values(rows);
    Block<uint64_t> blocks(rows / kBlockRows), sums(chunks);
    for (int64_t i = 0; i < rows; ++i) values[i] = i == last || (i < last && i % 5 == 0) ? 1 + i % 2 : 0;
    for (int64_t c = 0; c < chunks; ++c) {
      sums[c] =
          active_kernels().sum_blocks(&values[c * kChunkRows], kChunkRows, &blocks[c * kChunkRows / kBlockRows]);
    }
    const Density density = {values.data.get(), blocks.data.get(), sums.data.get(), chunks};
    for (const Method method : {Method::kMultinomial, Method::kStratified, Method::kSystematic}) {
      for (int64_t seed = 0; seed < 50; ++seed) {
        Sample sample;
        draw(method, 1 + seed * 7, density, {seed, 1, 2, 3}, true, &sample);
        int64_t drawn = 0;
        for (size_t i = 0; i < sample.rows.size(); ++i) {
          CHECK(values[sample.rows[i]] != 0 && sample.rows[i] <= last, "a row of no weight");
          drawn += sample.counts[i];
        }
        CHECK(drawn == 1 + seed * 7, "draws");
        ++steps;
      }
    }
  }
  CHECK(stratum_threshold((1u << 24) - 1, 1u << 24, (uint64_t{1} << 61) - 1, (uint64_t{1} << 61) - 2) ==
            (uint64_t{1} << 61) - 2,
        "threshold");
  const Philox4x32 zero = philox4x32({{0, 0, 0, 0}}, 0, 0);
  CHECK(zero.word[0] == 0x6627E8D5u && zero.word[3] == 0x9B00DBD8u, "philox");
}

// Pieces follow one another, cover everything, never grow, and shrink to the smallest only near the end.
void check_claims() {
  for (int64_t n = 0; n <= 600; n += 1 + n / 7) {
    for (const int64_t threads : {1, 2, 3, 7}) {
      for (const int64_t smallest : {1, 5, 32}) {
        Claims claims(n, smallest);
        int64_t at = 0;
        int64_t last = n;
        for (Claims::Piece piece = claims.take(threads); piece.begin < piece.end; piece = claims.take(threads)) {
          const int64_t size = piece.end - piece.begin;
          CHECK(piece.begin == at && piece.end <= n && size <= std::max(last, smallest), "piece");
          const int64_t share = (n + threads - 1) / threads;
          const bool shares = n < 4 * smallest * threads;
          CHECK(size >= std::min(shares ? share : smallest, n - at), "a piece is too small");
          CHECK(size <= share, "a piece leaves nothing for other threads");
          last = size;
          at = piece.end;
        }
        CHECK(at == n, "a part was not handed out");
        CHECK(claims.take(threads).begin == n, "more was handed out than there is");
      }
    }
  }
  ++steps;
}

// Threads that take at once get each number once.
void check_claims_of_threads() {
  constexpr int64_t kNumbers = 20000;
  for (int repeat = 0; repeat < 10; ++repeat) {
    std::vector<std::atomic<int>> taken(kNumbers);
    Claims claims(kNumbers, 1);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (Claims::Piece piece = claims.take(1000); piece.begin < piece.end; piece = claims.take(1000)) {
          for (int64_t i = piece.begin; i < piece.end; ++i) ++taken[i];
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::atomic<int>& times : taken) CHECK(times == 1, "claimed by two threads, or by none");
  }
  ++steps;
}

}  // namespace

int main() {
  check_claims_of_threads();
  check_claims();
  for (const Level level : supported_levels()) {
    set_active_level(level);
    const std::string name(level_name(level));
    check_vectors(active_kernels());
    check_fold(active_kernels());
    check_conversions<float>(active_kernels());
    check_conversions<Half>(active_kernels());
    check_conversions<BFloat>(active_kernels());
    check_tiles<float>(active_kernels());
    check_tiles<Half>(active_kernels());
    check_tiles<BFloat>(active_kernels());
    check_shapes<float>(name.c_str());
    check_shapes<Half>(name.c_str());
    check_shapes<BFloat>(name.c_str());
    check_draws();
  }
  std::printf("ok %ld\n", static_cast<long>(steps));
}
