// Scores from blocks of keys that lie feature by feature; a part of kernels-inl.h, which see.
//
// Lanes of a vector are rows here, where score_rows has features. To have its bits, the features that it adds up
// in one lane are added up in one vector, and these vectors then as it adds lanes: as a binary tree. Leaves are
// visited from left to right; sums that wait for their right neighbour wait on a stack.

constexpr int kPassVectors = 2;  // of rows at once
constexpr int64_t kVisitRows = kPassVectors * Isa::kLanes;
constexpr int64_t kPasses = kSketchRows / kVisitRows;

// The rows of a pass, and the block that is asked of memory meanwhile: a share of its lines at every pair of
// lanes, in their own order. Loads of this block wait for nothing but the second-level cache, which the processor
// hides.
template <class T>
struct BlockPass {
  static constexpr int64_t kRunBytes = kSketchRows * static_cast<int64_t>(sizeof(T));
  static constexpr int64_t kShares = kPasses * (Isa::kLanes / 2);

  const T* rows;  // feature 0 of the first row
  int64_t index;

  [[gnu::always_inline]] void ask(const BlockTile& tile, int64_t pair) const {
    const int64_t share = index * (Isa::kLanes / 2) + pair;
    const T* rows_ahead = static_cast<const T*>(tile.rows_ahead.data);
    for (int64_t i = tile.rows_ahead.rows * share / kShares; i < tile.rows_ahead.rows * (share + 1) / kShares;
         ++i) {
      const char* row = reinterpret_cast<const char*>(rows_ahead + tile.rows_ahead.offsets[i]);
      for (int64_t at = 0; at < tile.row_bytes; at += kLineBytes) prefetch_far(row + at);
    }
    if (tile.ahead == nullptr) return;
    const int64_t features = tile.lane_ends[Isa::kLanes - 1];
    const char* ahead = static_cast<const char*>(tile.ahead);
    for (int64_t i = features * share / kShares; i < features * (share + 1) / kShares; ++i) {
      const char* run = ahead + tile.ascending[i] * kRunBytes;
      for (int64_t at = 0; at < kRunBytes; at += kLineBytes) prefetch_far(run + at);
    }
  }
};

template <int kHeadsHere>
struct BlockSum {
  F of[kHeadsHere][kPassVectors];

  void clear() {
    for (int h = 0; h < kHeadsHere; ++h) {
      for (int c = 0; c < kPassVectors; ++c) of[h][c] = Isa::set1(0.0f);
    }
  }
  void add(const BlockSum& other) {
    for (int h = 0; h < kHeadsHere; ++h) {
      for (int c = 0; c < kPassVectors; ++c) of[h][c] = Isa::add(of[h][c], other.of[h][c]);
    }
  }
};

// The features of one lane, list entries [from, to).
template <class T, int kHeadsHere>
inline void add_lane(const BlockTile& tile, const T* rows, int64_t head, int32_t from, int32_t to,
                     BlockSum<kHeadsHere>* sum) {
  sum->clear();
  for (int32_t i = from; i < to; ++i) {
    const int64_t d = tile.features[i];
    F k[kPassVectors];
    Isa::load_pair(rows + d * kSketchRows, k);
    const float* q = tile.q + d * tile.q_stride + head;
    for (int h = 0; h < kHeadsHere; ++h) {
      const F qd = Isa::set1(q[h]);
      for (int c = 0; c < kPassVectors; ++c) sum->of[h][c] = Isa::fma(qd, k[c], sum->of[h][c]);
    }
  }
}

template <class T, int kHeadsHere, bool kAsk>
inline void score_pass(const BlockTile& tile, const BlockPass<T>& pass, int64_t head) {
  constexpr int64_t kPairs = Isa::kLanes / 2;
  constexpr int kLevels = kPairs == 8 ? 3 : kPairs == 4 ? 2 : 1;
  static_assert(kPairs == 1 << kLevels);
  BlockSum<kHeadsHere> waiting[kLevels];
  BlockSum<kHeadsHere> sum;
  int32_t from = 0;
  for (int64_t pair = 0; pair < kPairs; ++pair) {
    if constexpr (kAsk) pass.ask(tile, pair);
    BlockSum<kHeadsHere> right;
    const int32_t middle = tile.lane_ends[2 * pair];
    const int32_t to = tile.lane_ends[2 * pair + 1];
    add_lane<T>(tile, pass.rows, head, from, middle, &sum);
    add_lane<T>(tile, pass.rows, head, middle, to, &right);
    from = to;
    sum.add(right);
    int level = 0;
    for (; (pair >> level & 1) != 0; ++level) sum.add(waiting[level]);
    if (level < kLevels) waiting[level] = sum;
  }
  float* scores = tile.scores + head * tile.scores_stride + pass.index * kVisitRows;
  for (int h = 0; h < kHeadsHere; ++h) {
    for (int c = 0; c < kPassVectors; ++c) {
      Isa::store(scores + h * tile.scores_stride + c * Isa::kLanes, Isa::mul(sum.of[h][c], Isa::set1(tile.scale)));
    }
  }
}

template <class T>
void score_block(const BlockTile& tile) {
  const T* block = static_cast<const T*>(tile.block);
  for (int64_t pass = 0; pass < kPasses; ++pass) {
    const BlockPass<T> here = {.rows = block + pass * kVisitRows, .index = pass};
    int64_t head = 0;
    if (tile.heads >= Isa::kHeads) {
      score_pass<T, Isa::kHeads, true>(tile, here, 0);
      head = Isa::kHeads;
    } else {
      score_pass<T, 1, true>(tile, here, 0);
      head = 1;
    }
    for (; head + Isa::kHeads <= tile.heads; head += Isa::kHeads) {
      score_pass<T, Isa::kHeads, false>(tile, here, head);
    }
    for (; head < tile.heads; ++head) score_pass<T, 1, false>(tile, here, head);
  }
}
