#include "append.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "convert.h"

namespace santa::cpu {
namespace {

// Where the rows of one sequence go.
struct Rows {
  int64_t held;  // before
  int64_t added;

  int64_t end() const { return held + added; }
  int64_t first_block() const { return held / kSketchRows; }
  int64_t end_block() const { return end() / kSketchRows; }  // past the last block that is whole afterwards
};

template <class T>
class Appender {
 public:
  explicit Appender(const AppendParams& params) : params_(params), dim_(params.shape.head_dim) {}

  // [kSketchRows, D] to [D, kSketchRows]. In squares: the writes of one reach few pages and stay in the caches.
  void pack(const Rows& rows, int64_t b, int64_t h, int64_t block) const {
    constexpr int64_t kSquare = 16;
    const T* row[kSketchRows];
    for (int64_t r = 0; r < kSketchRows; ++r) row[r] = source(rows, b, h, block * kSketchRows + r);
    T* to = static_cast<T*>(params_.blocks) + b * params_.batch_stride + h * params_.head_stride +
            block * params_.block_stride;
    for (int64_t d = 0; d < dim_; d += kSquare) {
      const int64_t end = std::min(d + kSquare, dim_);
      for (int64_t r = 0; r < kSketchRows; r += kSquare) {
        for (int64_t e = d; e < end; ++e) {
          for (int64_t i = r; i < r + kSquare; ++i) to[e * kSketchRows + i] = row[i][e];
        }
      }
    }
  }

  // What is left after the last whole block.
  void keep_open(const Rows& rows, int64_t b, int64_t h) const {
    for (int64_t j = std::max(rows.held, rows.end_block() * kSketchRows); j < rows.end(); ++j) {
      std::copy_n(source(rows, b, h, j), dim_, open(b, h, j));
    }
  }

 private:
  T* open(int64_t b, int64_t h, int64_t row) const {
    return static_cast<T*>(params_.open) +
           ((b * params_.shape.kv_heads + h) * kSketchRows + row % kSketchRows) * dim_;
  }
  const T* source(const Rows& rows, int64_t b, int64_t h, int64_t row) const {
    if (row < rows.held) return open(b, h, row);
    return static_cast<const T*>(params_.k.data) + params_.k.offset(b, h, row - rows.held);
  }

  const AppendParams& params_;
  const int64_t dim_;
};

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  text << "santa::sketch_append: ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

// All that can be wrong is found before anything is written.
std::vector<Rows> check_rows(const AppendParams& params) {
  std::vector<Rows> all(params.shape.batch);
  for (int64_t b = 0; b < params.shape.batch; ++b) {
    const int64_t n = params.shape.rows;
    Rows& rows = all[b];
    rows = {.held = params.rows[b], .added = params.num_rows.data == nullptr ? n : params.num_rows[b]};
    if (rows.added < 0 || rows.added > n) {
      refuse("num_rows[", b, "] must be between 0 and the rows of k (", n, "), got ", rows.added);
    }
    if (rows.held < 0 || rows.first_block() > params.capacity) {
      refuse("block_rows[", b, "] must be at least 0 and fit into ", params.capacity, " blocks of ", kSketchRows,
             " rows, got ", rows.held);
    }
    if (rows.end_block() > params.capacity) {
      refuse("key_blocks must have room for the ", rows.end(), " rows of sequence ", b, ", got ", params.capacity,
             " blocks of ", kSketchRows, " rows");
    }
  }
  return all;
}

template <class T>
void append_rows(const AppendParams& params, const std::vector<Rows>& all, const ParallelFor& parallel_for) {
  const Appender<T> appender(params);
  const int64_t heads = params.shape.kv_heads;
  std::vector<int64_t> first(all.size() + 1, 0);  // block of a sequence among those of all
  for (size_t b = 0; b < all.size(); ++b) {
    first[b + 1] = first[b] + heads * (all[b].end_block() - all[b].first_block());
  }
  constexpr int64_t kGrain = 4;  // blocks
  parallel_for(first.back(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t b = std::upper_bound(first.begin(), first.end(), at) - first.begin() - 1;
      const int64_t blocks = (first[b + 1] - first[b]) / heads;
      appender.pack(all[b], b, (at - first[b]) / blocks, all[b].first_block() + (at - first[b]) % blocks);
    }
  });
  for (size_t b = 0; b < all.size(); ++b) {
    for (int64_t h = 0; h < heads; ++h) appender.keep_open(all[b], static_cast<int64_t>(b), h);
    params.rows[b] = all[b].end();
  }
}

}  // namespace

void append(const AppendParams& params, const ParallelFor& parallel_for) {
  const std::vector<Rows> all = check_rows(params);
  with_dtype(params.shape.dtype, [&](auto type) { append_rows<decltype(type)>(params, all, parallel_for); });
}

}  // namespace santa::cpu
