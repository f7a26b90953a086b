// Scores from blocks of keys that lie feature by feature; a part of kernels-inl.h, which see.
//
// Lanes of a vector are rows here, where score_rows has features. To have its bits, the features that it adds up
// in one lane are added up in one vector, and these vectors then as it adds lanes: as a binary tree. Leaves are
// visited from left to right; sums that wait for their right neighbour wait on a stack.

constexpr int kPassVectors = 2;       // of rows at once
constexpr int64_t kNearFeatures = 8;  // how many features ahead runs are asked for into the first-level cache

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
inline void add_lane(const BlockTile& tile, const T* rows, const char* ahead, int64_t head, int32_t from,
                     int32_t to, BlockSum<kHeadsHere>* sum) {
  sum->clear();
  for (int32_t i = from; i < to; ++i) {
    const int64_t d = tile.features[i];
    F k[kPassVectors];
    Isa::load_pair(rows + d * kSketchRows, k);
    if (ahead != nullptr) {
      const char* run = ahead + d * kSketchRows * static_cast<int64_t>(sizeof(T));
      for (int64_t at = 0; at < kPairBytes<T>; at += kLineBytes) prefetch_far(run + at);
    }
    const float* q = tile.q + d * tile.q_stride + head;
    for (int h = 0; h < kHeadsHere; ++h) {
      const F qd = Isa::set1(q[h]);
      for (int c = 0; c < kPassVectors; ++c) sum->of[h][c] = Isa::fma(qd, k[c], sum->of[h][c]);
    }
  }
}

template <class T, int kHeadsHere>
inline void score_block_rows(const BlockTile& tile, const T* rows, const char* ahead, int64_t head,
                             float* scores) {
  constexpr int kPairs = static_cast<int>(Isa::kLanes) / 2;
  constexpr int kLevels = kPairs == 8 ? 3 : kPairs == 4 ? 2 : 1;
  static_assert(kPairs == 1 << kLevels);
  BlockSum<kHeadsHere> waiting[kLevels];
  BlockSum<kHeadsHere> sum;
  int32_t from = 0;
  for (int pair = 0; pair < kPairs; ++pair) {
    BlockSum<kHeadsHere> right;
    const int32_t middle = tile.lane_ends[2 * pair];
    const int32_t to = tile.lane_ends[2 * pair + 1];
    add_lane<T>(tile, rows, ahead, head, from, middle, &sum);
    add_lane<T>(tile, rows, ahead, head, middle, to, &right);
    from = to;
    sum.add(right);
    int level = 0;
    for (; (pair >> level & 1) != 0; ++level) sum.add(waiting[level]);
    if (level < kLevels) waiting[level] = sum;
  }
  for (int h = 0; h < kHeadsHere; ++h) {
    for (int c = 0; c < kPassVectors; ++c) {
      Isa::store(scores + h * tile.scores_stride + c * Isa::kLanes, Isa::mul(sum.of[h][c], Isa::set1(tile.scale)));
    }
  }
}

template <class T>
void score_block(const BlockTile& tile) {
  constexpr int64_t kPassRows = kPassVectors * Isa::kLanes;
  const T* block = static_cast<const T*>(tile.block);
  const T* next = static_cast<const T*>(tile.ahead);
  for (int64_t row = 0; row < kSketchRows; row += kPassRows) {
    const T* rows = block + row;
    const char* ahead = next == nullptr ? nullptr : reinterpret_cast<const char*>(next + row);
    float* scores = tile.scores + row;
    int64_t head = 0;
    for (; head + Isa::kHeads <= tile.heads; head += Isa::kHeads) {
      score_block_rows<T, Isa::kHeads>(tile, rows, ahead, head, scores + head * tile.scores_stride);
      ahead = nullptr;
    }
    for (; head < tile.heads; ++head) {
      score_block_rows<T, 1>(tile, rows, ahead, head, scores + head * tile.scores_stride);
      ahead = nullptr;
    }
  }
}
