#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <type_traits>
#include <vector>

#include "cpu/append.h"
#include "cpu/convert.h"
#include "cpu/decode.h"
#include "cpu/tasks.h"
#include "params.h"

// Decode steps in heap blocks of exactly the size that their shape gives; a part of test_kernels.cpp, which see.
namespace {

using namespace santa;
using namespace santa::cpu;

int64_t steps = 0;

#define CHECK(condition, ...)                                      \
  do {                                                             \
    if (!(condition)) {                                            \
      std::fprintf(stderr, "line %d: %s: ", __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                           \
      std::fprintf(stderr, "\n");                                  \
      std::exit(1);                                                \
    }                                                              \
  } while (false)

// A heap block of exactly n elements: unlike a vector it has no capacity to spare.
template <class T>
struct Block {
  explicit Block(int64_t n) : size(n), data(new T[n]) {}
  T& operator[](int64_t i) { return data[i]; }
  int64_t size;
  std::unique_ptr<T[]> data;
};

std::mt19937 engine(7);
float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(engine);
}

template <class T>
float rounded(float x, T* to) {
  store_as(x, to);
  return to_float(*to);
}

// A sum in fp64, and the rounding that the same sum in fp32 may have.
struct Expected {
  void add(double product) {
    value += product;
    size += std::fabs(product);
  }
  bool near(double x) const { return std::fabs(x - value) < 1e-6 * size; }

  double value = 0.0;
  double size = 1.0;
};

template <class T>
constexpr Dtype dtype_of() {
  if constexpr (std::is_same_v<T, float>) return Dtype::kFloat32;
  if constexpr (std::is_same_v<T, Half>) return Dtype::kFloat16;
  return Dtype::kBFloat16;
}

void serial(int64_t n, int64_t, const std::function<void(int64_t, int64_t)>& f) {
  if (n > 0) f(0, n);
}

// As many pieces as there are tasks, last one first: the order must not matter.
void backwards(int64_t n, int64_t, const std::function<void(int64_t, int64_t)>& f) {
  for (int64_t i = n; i > 0; --i) f(i - 1, i);
}

struct Sizes {
  int64_t batch, kv_heads, group, rows, dim, value_dim;
  bool mask, poison, lengths;
};

template <class T>
struct Problem {
  explicit Problem(const Sizes& sizes)
      : s(sizes),
        heads(s.kv_heads * s.group),
        q(s.batch * heads * s.dim),
        k(s.batch * s.kv_heads * s.rows * s.dim),
        v(s.batch * s.kv_heads * s.rows * s.value_dim),
        mask(s.mask ? s.batch * heads * s.rows : 0),
        lengths(s.batch) {
    for (int64_t i = 0; i < q.size; ++i) rounded(2.0f * normal(), &q[i]);
    for (int64_t i = 0; i < k.size; ++i) rounded(normal(), &k[i]);
    for (int64_t i = 0; i < v.size; ++i) rounded(normal(), &v[i]);
    for (int64_t i = 0; i < mask.size; ++i) mask[i] = engine() % 3 != 0;
    for (int64_t b = 0; b < s.batch; ++b)
      lengths[b] = s.lengths ? static_cast<int64_t>(engine() % (s.rows + 1)) : s.rows;
    if (s.poison) poison();
  }

  bool attends(int64_t b, int64_t h, int64_t j) {
    return j < lengths[b] && (!s.mask || mask[(b * heads + h) * s.rows + j] != 0);
  }

  // Row 0 of V is NaN and head 0 of each group does not attend it; rows past the length are NaN altogether.
  void poison() {
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t kv = 0; kv < s.kv_heads; ++kv) {
        for (int64_t j = 0; j < s.rows; ++j) {
          const bool past = j >= lengths[b];
          const int64_t row = (b * s.kv_heads + kv) * s.rows + j;
          for (int64_t d = 0; past && d < s.dim; ++d) rounded(std::nanf(""), &k[row * s.dim + d]);
          for (int64_t d = 0; (past || j == 0) && d < s.value_dim; ++d)
            rounded(std::nanf(""), &v[row * s.value_dim + d]);
        }
        if (s.mask && s.rows > 0) mask[(b * heads + kv * s.group) * s.rows] = 0;
      }
    }
  }

  // One step; with every output in a block of its own, filled with NaN before.
  struct Result {
    Block<T> out;
    Block<float> lse;
    Block<KeysRead> keys_read;
    Block<int64_t> value_rows;
    Block<float> error;
  };
  // With `packed`, rows of whole blocks lie feature by feature in a sketch.
  Result run(Method method, int64_t samples, const ParallelFor& parallel_for, bool stats, bool packed = false,
             BernoulliParams bernoulli = {}) {
    Result r{Block<T>(s.batch * heads * s.value_dim), Block<float>(s.batch * heads),
             Block<KeysRead>(s.batch * s.kv_heads), Block<int64_t>(s.batch * s.kv_heads),
             Block<float>(s.batch * heads)};
    for (int64_t i = 0; i < r.out.size; ++i) rounded(12345.0f, &r.out[i]);
    for (int64_t i = 0; i < r.lse.size; ++i) r.lse[i] = r.error[i] = 12345.0f;
    const int64_t seed = 11, position = 5;
    DecodeParams p{};
    p.shape = {s.batch, heads, s.kv_heads, s.rows, s.dim, s.value_dim, dtype_of<T>()};
    p.q = q.data.get();
    p.q_dtype = dtype_of<T>();
    p.q_batch_stride = heads * s.dim;
    p.q_head_stride = s.dim;
    p.k = {k.data.get(), s.kv_heads * s.rows * s.dim, s.rows * s.dim, s.dim, s.rows};
    p.v = {v.data.get(), s.kv_heads * s.rows * s.value_dim, s.rows * s.value_dim, s.value_dim, s.rows};
    p.scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
    if (s.mask) p.mask = {MaskParams::Kind::kBool, mask.data.get(), heads * s.rows, s.rows, 1};
    p.seq_lens = {.data = lengths.data.get(), .stride = 1, .wide = true};
    p.draw = {method, samples, {&seed, 0}, {&position, 0}, 3, 0};
    p.out = r.out.data.get();
    p.lse = r.lse.data.get();
    if (stats) {
      p.keys_read = r.keys_read.data.get();
      p.value_rows = r.value_rows.data.get();
      p.squared_error = r.error.data.get();
    }
    p.bernoulli = bernoulli;
    p.sparse_query = bernoulli.draws != 0;
    std::optional<Sketch> sketch;
    if (packed) p.key_blocks = sketch.emplace(*this, parallel_for).keys();
    decode(p, parallel_for);
    ++steps;
    return r;
  }

  // The keys of each sequence, in two appends of which the second is empty for the first sequence.
  struct Sketch {
    Sketch(Problem& from, const ParallelFor& parallel_for)
        : s(from.s),
          capacity(s.rows / kSketchRows),
          blocks(s.batch * s.kv_heads * capacity * s.dim * kSketchRows),
          open(s.batch * s.kv_heads * kSketchRows * s.dim),
          rows(s.batch) {
      Block<int64_t> counts(s.batch);
      for (int64_t b = 0; b < s.batch; ++b) {
        rows[b] = 0;
        counts[b] = b == 0 ? from.lengths[b] : from.lengths[b] / 3;
      }
      AppendParams p{};
      p.shape = {s.batch, s.kv_heads, s.kv_heads, s.rows, s.dim, 1, dtype_of<T>()};
      p.k = {from.k.data.get(), s.kv_heads * s.rows * s.dim, s.rows * s.dim, s.dim, s.rows};
      p.blocks = blocks.data.get();
      p.block_stride = s.dim * kSketchRows;
      p.head_stride = capacity * p.block_stride;
      p.batch_stride = s.kv_heads * p.head_stride;
      p.capacity = capacity;
      p.open = open.data.get();
      p.rows = rows.data.get();
      p.num_rows = {counts.data.get(), 1};
      append(p, parallel_for);
      // The rest, of which rows begin later: a copy, so that it ends where its block ends.
      int64_t most = 0;
      for (int64_t b = 0; b < s.batch; ++b) most = std::max(most, from.lengths[b] - counts[b]);
      Block<T> rest(s.batch * s.kv_heads * most * s.dim);
      for (int64_t b = 0; b < s.batch; ++b) {
        const int64_t n = from.lengths[b] - counts[b];
        for (int64_t h = 0; h < s.kv_heads; ++h) {
          const int64_t group = b * s.kv_heads + h;
          for (int64_t i = 0; i < most * s.dim; ++i) rounded(std::nanf(""), &rest[group * most * s.dim + i]);
          for (int64_t i = 0; i < n * s.dim; ++i) {
            rest[group * most * s.dim + i] = from.k[(group * s.rows + counts[b]) * s.dim + i];
          }
        }
        counts[b] = n;
      }
      p.shape.rows = most;
      p.k = {rest.data.get(), s.kv_heads * most * s.dim, most * s.dim, s.dim, most};
      append(p, parallel_for);
      for (int64_t b = 0; b < s.batch; ++b) CHECK(rows[b] == from.lengths[b], "rows of a sketch");
    }

    KeyBlocks keys() {
      if (capacity == 0) return {};
      const int64_t block = s.dim * kSketchRows;
      return {.data = blocks.data.get(),
              .batch_stride = s.kv_heads * capacity * block,
              .head_stride = capacity * block,
              .block_stride = block,
              .capacity = capacity,
              .rows = rows.data.get(),
              .rows_stride = 1};
    }

    Sizes s;
    int64_t capacity;
    Block<T> blocks, open;
    Block<int64_t> rows;
  };

  void check_dense(Result& r, const char* level) {
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t group = b * s.kv_heads + h / s.group;
        std::vector<double> score(s.rows), out(s.value_dim);
        double largest = -INFINITY, total = 0;
        for (int64_t j = 0; j < s.rows; ++j) {
          if (!attends(b, h, j)) continue;
          for (int64_t d = 0; d < s.dim; ++d) {
            score[j] += static_cast<double>(to_float(q[(b * heads + h) * s.dim + d])) *
                        to_float(k[(group * s.rows + j) * s.dim + d]);
          }
          score[j] /= std::sqrt(static_cast<double>(s.dim));
          largest = std::max(largest, score[j]);
        }
        double size = 0;
        for (int64_t j = 0; j < s.rows; ++j) {
          if (!attends(b, h, j)) continue;
          const double weight = std::exp(score[j] - largest);
          total += weight;
          for (int64_t d = 0; d < s.value_dim; ++d) {
            const double value = to_float(v[(group * s.rows + j) * s.value_dim + d]);
            out[d] += weight * value;
            size = std::max(size, std::fabs(value));
          }
        }
        const double epsilon = sizeof(T) == 4 ? 2e-5 : dtype_of<T>() == Dtype::kFloat16 ? 1e-3 : 8e-3;
        for (int64_t d = 0; d < s.value_dim; ++d) {
          const double expected = total > 0 ? out[d] / total : 0.0;
          const double got = to_float(r.out[(b * heads + h) * s.value_dim + d]);
          const bool same =
              std::isnan(expected) ? std::isnan(got) : std::fabs(got - expected) <= epsilon * (size + 1e-9);
          CHECK(same, "%s: out[%ld][%ld][%ld] = %g instead of %g; rows %ld, D %ld, Dv %ld", level, long(b),
                long(h), long(d), got, expected, long(s.rows), long(s.dim), long(s.value_dim));
        }
        const double lse = total > 0 ? largest + std::log(total) : -INFINITY;
        CHECK(lse == r.lse[b * heads + h] || std::fabs(lse - r.lse[b * heads + h]) < 1e-4,
              "%s: lse %g instead of %g", level, r.lse[b * heads + h], lse);
      }
    }
  }

  Sizes s;
  int64_t heads;
  Block<T> q, k, v;
  Block<uint8_t> mask;
  Block<int64_t> lengths;
};

}  // namespace
