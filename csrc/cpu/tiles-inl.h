// The kernels that read rows of K and V; a part of kernels-inl.h, which see.

#include "prefetch-inl.h"

// ---- prefetch ---------------------------------------------------------------------------------------------

constexpr int64_t kNearBytes = 4096;  // how far ahead of the reads rows are asked for into the first-level cache
constexpr int64_t kFarBytes = 16384;  // and into the second (both measured)

// The rows of a tile followed by those ahead of it. Past the end row `i` itself stands in: asking for a line that
// is in use costs a load slot, a branch for every line costs more.
template <class T>
class Upcoming {
 public:
  Upcoming(const T* data, const int64_t* offsets, int64_t rows, int64_t row_length, const RowsAhead& ahead)
      : data_(data),
        offsets_(offsets),
        rows_(rows),
        ahead_(ahead),
        near_(rows_spanning<T>(kNearBytes, row_length)),
        far_(rows_spanning<T>(kFarBytes, row_length)) {}

  const char* near(int64_t i) const { return row(i, near_); }
  const char* far(int64_t i) const { return row(i, far_); }

 private:
  const char* row(int64_t i, int64_t distance) const {
    const int64_t at = i + distance;
    const T* start = data_;
    int64_t offset;
    if (at < rows_) {
      offset = offsets_[at];
    } else if (at - rows_ < ahead_.rows) {
      start = static_cast<const T*>(ahead_.data);
      offset = ahead_.offsets[at - rows_];
    } else {
      offset = offsets_[i < rows_ ? i : rows_ - 1];
    }
    return reinterpret_cast<const char*>(start + offset);
  }

  const T* data_;
  const int64_t* offsets_;
  const int64_t rows_;
  const RowsAhead& ahead_;
  const int64_t near_;
  const int64_t far_;
};

template <class T>
constexpr int64_t kPairBytes = 2 * Isa::kLanes * static_cast<int64_t>(sizeof(T));

// ---- score -----------------------------------------------------------------------------------------------

// The last n of a row's features, fewer than two vectors; 0 beyond.
template <class T>
inline void load_pair_partial(const T* from, int64_t n, F* to) {
  to[0] = Isa::load_partial(from, n < Isa::kLanes ? n : Isa::kLanes);
  to[1] = Isa::load_partial(from + Isa::kLanes, n < Isa::kLanes ? 0 : n - Isa::kLanes);
}

template <int kHeadsHere>
inline void add_products(const float* q, int64_t q_stride, const F (*k)[2], F (*sum)[kTileRows]) {
  for (int half = 0; half < 2; ++half) {
    for (int h = 0; h < kHeadsHere; ++h) {
      const F qd = Isa::load(q + h * q_stride + half * Isa::kLanes);
      for (int r = 0; r < kTileRows; ++r) sum[h][r] = Isa::fma(qd, k[r][half], sum[h][r]);
    }
  }
}

// Four rows by kHeadsHere heads. Each (row, head) has one accumulator, filled in the order of d and reduced by one
// fixed tree: its bits do not depend on where the row lies in a tile or the head in a group.
template <class T, int kHeadsHere, bool kAsk>
inline void score_rows(const ScoreTile& tile, const T* const* row, const Upcoming<T>& upcoming, int64_t i,
                       int64_t head) {
  const float* q = tile.q + head * tile.q_stride;
  const char* near[kTileRows];
  const char* far[kTileRows];
  for (int r = 0; kAsk && r < kTileRows; ++r) {
    near[r] = upcoming.near(i + r);
    far[r] = upcoming.far(i + r);
  }
  F sum[kHeadsHere][kTileRows];
  for (int h = 0; h < kHeadsHere; ++h) {
    for (int r = 0; r < kTileRows; ++r) sum[h][r] = Isa::set1(0.0f);
  }
  const int64_t whole = tile.head_dim / (2 * Isa::kLanes) * (2 * Isa::kLanes);
  for (int64_t d = 0; d < whole; d += 2 * Isa::kLanes) {
    F k[kTileRows][2];
    for (int r = 0; r < kTileRows; ++r) {
      Isa::load_pair(row[r] + d, k[r]);
      if constexpr (kAsk) {
        const int64_t from = d * static_cast<int64_t>(sizeof(T));
        for (int64_t at = from; at < from + kPairBytes<T>; at += kLineBytes) {
          prefetch_near(near[r] + at);
          prefetch_far(far[r] + at);
        }
      }
    }
    add_products<kHeadsHere>(q + d, tile.q_stride, k, sum);
  }
  if (whole < tile.head_dim) {
    F k[kTileRows][2];
    for (int r = 0; r < kTileRows; ++r) load_pair_partial(row[r] + whole, tile.head_dim - whole, k[r]);
    add_products<kHeadsHere>(q + whole, tile.q_stride, k, sum);
  }
  Isa::template reduce<kHeadsHere>(sum, tile.scale, tile.scores + head * tile.scores_stride + i,
                                   tile.scores_stride);
}

template <class T, int kRemainder>
void score_tile(const ScoreTile& tile) {
  const T* keys = static_cast<const T*>(tile.keys);
  const Upcoming<T> upcoming(keys, tile.offsets, tile.rows, tile.head_dim, tile.ahead);
  const int64_t full_heads = tile.heads - kRemainder;
  for (int64_t i = 0; i < tile.rows; i += kTileRows) {
    const T* row[kTileRows];
    for (int r = 0; r < kTileRows; ++r) row[r] = keys + tile.offsets[i + r < tile.rows ? i + r : tile.rows - 1];
    if (full_heads != 0) {
      score_rows<T, Isa::kHeads, true>(tile, row, upcoming, i, 0);
      for (int64_t head = Isa::kHeads; head < full_heads; head += Isa::kHeads) {
        score_rows<T, Isa::kHeads, false>(tile, row, upcoming, i, head);
      }
      if constexpr (kRemainder != 0) score_rows<T, kRemainder, false>(tile, row, upcoming, i, full_heads);
    } else if constexpr (kRemainder != 0) {
      score_rows<T, kRemainder, true>(tile, row, upcoming, i, 0);
    }
  }
}

template <class T>
void score(const ScoreTile& tile) {
  static_assert(Isa::kHeads == 2 || Isa::kHeads == 4);
  const int64_t remainder = tile.heads % Isa::kHeads;
  if constexpr (Isa::kHeads == 4) {
    if (remainder == 2) return score_tile<T, 2>(tile);
    if (remainder == 3) return score_tile<T, 3>(tile);
  }
  return remainder == 1 ? score_tile<T, 1>(tile) : score_tile<T, 0>(tile);
}

// ---- accumulate ------------------------------------------------------------------------------------------

constexpr int64_t kPassRows = 32;  // rows visited by every block of heads before the next rows are read

// sum[h] += weights[h] * row for a block of heads by a few vectors of features. kWhole: the vectors lie wholly
// within the row, of which `left` features are left.
template <class T, int kHeadsHere, int kColumnsHere, bool kWhole>
inline void add_row(const T* row, int64_t left, const float* weights, int64_t weights_stride,
                    F (*sum)[kColumnsHere]) {
  F v[kColumnsHere];
  if constexpr (kColumnsHere % 2 == 0) {
    for (int c = 0; c < kColumnsHere; c += 2) Isa::load_pair(row + c * Isa::kLanes, v + c);
  } else {
    v[0] = kWhole ? Isa::load(row) : Isa::load_partial(row, left);
  }
  for (int h = 0; h < kHeadsHere; ++h) {
    const F weight = Isa::set1(weights[h * weights_stride]);
    for (int c = 0; c < kColumnsHere; ++c) sum[h][c] = Isa::fma(weight, v[c], sum[h][c]);
  }
}

// One block of heads by a few vectors of features.
template <class T, int kHeadsHere, int kColumnsHere, bool kAsk, bool kWhole = true>
inline void accumulate_block(const AccumulateTile& tile, const T* values, const Upcoming<T>& upcoming,
                             int64_t begin, int64_t end, int64_t head, int64_t column) {
  float* sums = tile.sums + head * tile.sums_stride + column;
  const float* weights = tile.weights + head * tile.weights_stride;
  F sum[kHeadsHere][kColumnsHere];
  for (int h = 0; h < kHeadsHere; ++h) {
    for (int c = 0; c < kColumnsHere; ++c) {
      sum[h][c] = Isa::load(sums + h * tile.sums_stride + c * Isa::kLanes);
    }
  }
  for (int64_t i = begin; i < end; ++i) {
    const T* row = values + tile.offsets[i] + column;
    if constexpr (kAsk) {
      const char* far = upcoming.far(i) + column * static_cast<int64_t>(sizeof(T));
      for (int64_t at = 0; at < (kColumnsHere + 1) / 2 * kPairBytes<T>; at += kLineBytes) prefetch_far(far + at);
    }
    add_row<T, kHeadsHere, kColumnsHere, kWhole>(row, tile.value_dim - column, weights + i, tile.weights_stride,
                                                 sum);
  }
  for (int h = 0; h < kHeadsHere; ++h) {
    for (int c = 0; c < kColumnsHere; ++c) {
      Isa::store(sums + h * tile.sums_stride + c * Isa::kLanes, sum[h][c]);
    }
  }
}

template <class T, int kHeadsHere, bool kAsk>
inline void accumulate_columns(const AccumulateTile& tile, const T* values, const Upcoming<T>& upcoming,
                               int64_t begin, int64_t end, int64_t head) {
  constexpr int64_t kWide = Isa::kColumns * Isa::kLanes;
  int64_t column = 0;
  for (; column + kWide <= tile.value_dim; column += kWide) {
    accumulate_block<T, kHeadsHere, Isa::kColumns, kAsk>(tile, values, upcoming, begin, end, head, column);
  }
  for (; column + Isa::kLanes <= tile.value_dim; column += Isa::kLanes) {
    accumulate_block<T, kHeadsHere, 1, kAsk>(tile, values, upcoming, begin, end, head, column);
  }
  if (column < tile.value_dim) {
    accumulate_block<T, kHeadsHere, 1, kAsk, false>(tile, values, upcoming, begin, end, head, column);
  }
}

template <class T>
void accumulate(const AccumulateTile& tile) {
  const T* values = static_cast<const T*>(tile.values);
  const Upcoming<T> upcoming(values, tile.offsets, tile.rows, tile.value_dim, tile.ahead);
  for (int64_t begin = 0; begin < tile.rows; begin += kPassRows) {
    const int64_t end = begin + kPassRows < tile.rows ? begin + kPassRows : tile.rows;
    int64_t head = 0;
    if (tile.heads >= Isa::kHeads) {
      accumulate_columns<T, Isa::kHeads, true>(tile, values, upcoming, begin, end, 0);
      head = Isa::kHeads;
    } else {
      accumulate_columns<T, 1, true>(tile, values, upcoming, begin, end, 0);
      head = 1;
    }
    for (; head + Isa::kHeads <= tile.heads; head += Isa::kHeads) {
      accumulate_columns<T, Isa::kHeads, false>(tile, values, upcoming, begin, end, head);
    }
    for (; head < tile.heads; ++head) accumulate_columns<T, 1, false>(tile, values, upcoming, begin, end, head);
  }
}

// ---- gather ----------------------------------------------------------------------------------------------

constexpr int64_t kGatherAhead = 16;  // drawn rows that are asked for before they are used

template <class T>
inline void prefetch_row(const T* row, int64_t length) {
  const char* start = reinterpret_cast<const char*>(row);
  for (int64_t at = 0; at < length * static_cast<int64_t>(sizeof(T)); at += kLineBytes) prefetch_far(start + at);
}

template <class T, int kHeadsHere, int kColumnsHere, bool kWhole = true>
inline void gather_block(const GatherTile& tile, int64_t head, int64_t column) {
  const T* values = static_cast<const T*>(tile.values);
  const float* weights = tile.weights + head * tile.weights_stride;
  double* sums = tile.sums + head * tile.sums_stride + column;
  const bool first = head == 0 && column == 0;
  F sum[kHeadsHere][kColumnsHere];
  for (int h = 0; h < kHeadsHere; ++h) {
    for (int c = 0; c < kColumnsHere; ++c) sum[h][c] = Isa::set1(0.0f);
  }
  for (int64_t i = 0; i < tile.rows; ++i) {
    if (first && i + kGatherAhead < tile.rows) {
      prefetch_row(values + tile.offsets[i + kGatherAhead], tile.value_dim);
    }
    const T* row = values + tile.offsets[i] + column;
    add_row<T, kHeadsHere, kColumnsHere, kWhole>(row, tile.value_dim - column, weights + i, tile.weights_stride,
                                                 sum);
    if (tile.chunks[i] == tile.chunks[i + 1]) continue;
    for (int h = 0; h < kHeadsHere; ++h) {
      for (int c = 0; c < kColumnsHere; ++c) {
        Isa::add_scaled(sums + h * tile.sums_stride + c * Isa::kLanes, sum[h][c], 1.0);
        sum[h][c] = Isa::set1(0.0f);
      }
    }
  }
}

template <class T, int kHeadsHere>
inline void gather_columns(const GatherTile& tile, int64_t head) {
  constexpr int64_t kWide = Isa::kColumns * Isa::kLanes;
  int64_t column = 0;
  for (; column + kWide <= tile.value_dim; column += kWide) {
    gather_block<T, kHeadsHere, Isa::kColumns>(tile, head, column);
  }
  for (; column + Isa::kLanes <= tile.value_dim; column += Isa::kLanes) {
    gather_block<T, kHeadsHere, 1>(tile, head, column);
  }
  if (column < tile.value_dim) gather_block<T, kHeadsHere, 1, false>(tile, head, column);
}

template <class T>
void gather(const GatherTile& tile) {
  const T* values = static_cast<const T*>(tile.values);
  for (int64_t i = 0; i < tile.rows && i < kGatherAhead; ++i) {
    prefetch_row(values + tile.offsets[i], tile.value_dim);
  }
  for (int64_t h = 0; h < tile.heads; ++h) {
    for (int64_t d = 0; d < tile.sums_stride; ++d) tile.sums[h * tile.sums_stride + d] = 0.0;
  }
  int64_t head = 0;
  for (; head + Isa::kHeads <= tile.heads; head += Isa::kHeads) gather_columns<T, Isa::kHeads>(tile, head);
  for (; head < tile.heads; ++head) gather_columns<T, 1>(tile, head);
}
