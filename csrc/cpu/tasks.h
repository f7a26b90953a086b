#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <vector>

#include "../math/softmax.h"
#include "../params.h"

namespace santa::cpu {

// Runs f(begin, end) over [0, n), possibly cut among threads in pieces of at least `grain`. The pipeline takes it
// as an argument, so that nothing below the operators knows torch.
using ParallelFor = std::function<void(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& f)>;

// Hands [0, n) out to threads that need not be equally fast, in pieces of consecutive numbers: one half in equal
// pieces for all threads, then half of the rest, and so on down to pieces of `smallest`. Where that would be fewer
// than four pieces a thread, each gets its share at once.
class Claims {
 public:
  struct Piece {
    int64_t begin;
    int64_t end;  // begin when nothing is left
  };

  Claims(int64_t n, int64_t smallest) : n_(n), smallest_(smallest) {}

  // The next piece, where about `threads` threads take some.
  Piece take(int64_t threads) {
    int64_t begin = next_.load(std::memory_order_relaxed);
    int64_t end;
    do {
      end = std::min(n_, begin + size(begin, threads));
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return {begin, end};
  }

 private:
  int64_t size(int64_t begin, int64_t threads) const {
    if (n_ < 4 * smallest_ * threads) return (n_ + threads - 1) / threads;
    int64_t round = n_;  // what was left when the round began
    while (round > 1 && n_ - begin <= round / 2) round /= 2;
    return std::max(smallest_, (round + 2 * threads - 1) / (2 * threads));
  }

  const int64_t n_;
  const int64_t smallest_;
  std::atomic<int64_t> next_{0};
};

// One chunk of rows of one group: the query heads of one KV head of one sequence, counted over the batch.
struct ChunkTask {
  int64_t group;
  int64_t chunk;
};

// The chunks of a ragged batch as one flat range, so that a long sequence and a short one load threads alike.
// In the order (sequence, KV head, chunk): a thread reads one KV head's rows as one sequential stream.
class ChunkGrid {
 public:
  // rows[b]: attended extent of sequence b
  ChunkGrid(const std::vector<int64_t>& rows, int64_t kv_heads) : kv_heads_(kv_heads), first_(rows.size() + 1, 0) {
    for (size_t b = 0; b < rows.size(); ++b) first_[b + 1] = first_[b] + kv_heads * chunk_count(rows[b]);
  }

  int64_t size() const { return first_.back(); }

  ChunkTask operator[](int64_t task) const {
    const int64_t b = std::upper_bound(first_.begin(), first_.end(), task) - first_.begin() - 1;
    const int64_t chunks = (first_[b + 1] - first_[b]) / kv_heads_;
    const int64_t local = task - first_[b];
    return {b * kv_heads_ + local / chunks, local % chunks};
  }

 private:
  int64_t kv_heads_;
  std::vector<int64_t> first_;  // [B + 1]: task index at which a sequence begins
};

}  // namespace santa::cpu
