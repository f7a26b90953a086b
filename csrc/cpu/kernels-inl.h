// The kernels of one instruction-set level. No include guard: each kernels_<level>.cpp opens a namespace of its
// own, defines its vector class `Isa` there and includes this file. Nothing here may call into the standard
// library: an inline function compiled for this level could be the copy that every other level then uses.
//
// Isa: F is a vector of kLanes floats, I one of as many 32-bit integers. A block of kHeads query heads by 4 rows
// (score) or by kColumns vectors (accumulate) of sums fits the level's registers.

using F = Isa::F;
using I = Isa::I;

constexpr int kTileRows = 4;               // rows scored at once: reduce4 turns their sums into one vector
constexpr int64_t kReadAheadBytes = 8192;  // how far ahead of its reads read_through asks (measured)
constexpr int64_t kLineBytes = 64;

// exp for arguments in [-87, 0]; below, 0. exp(x) = 2^n exp(r) with |r| <= ln(2)/2, where the Taylor polynomial
// of degree 7 is off by 5e-9 relative, a fraction of fp32's rounding.
inline F exponential(F x) {
  const F lowest = Isa::set1(-87.0f);
  const F bounded = Isa::max(x, lowest);
  const F n = Isa::round(Isa::mul(bounded, Isa::set1(1.44269504f)));
  // ln(2) in two parts: the first has 9 bits, so its product with n is exact.
  F r = Isa::fma(n, Isa::set1(-0.693359375f), bounded);
  r = Isa::fma(n, Isa::set1(2.12194440e-4f), r);
  F p = Isa::set1(1.0f / 5040);
  p = Isa::fma(p, r, Isa::set1(1.0f / 720));
  p = Isa::fma(p, r, Isa::set1(1.0f / 120));
  p = Isa::fma(p, r, Isa::set1(1.0f / 24));
  p = Isa::fma(p, r, Isa::set1(1.0f / 6));
  p = Isa::fma(p, r, Isa::set1(0.5f));
  p = Isa::fma(p, r, Isa::set1(1.0f));
  p = Isa::fma(p, r, Isa::set1(1.0f));
  return Isa::zero_below(x, lowest, Isa::scale_by_power(p, n));
}

// ---- conversion --------------------------------------------------------------------------------------------

template <class T>
void widen(const void* from, int64_t n, float* to) {
  const T* at = static_cast<const T*>(from);
  int64_t i = 0;
  for (; i + Isa::kLanes <= n; i += Isa::kLanes) Isa::store(to + i, Isa::load(at + i));
  if (i == n) return;
  float rest[Isa::kLanes];
  Isa::store(rest, Isa::load_partial(at + i, n - i));
  __builtin_memcpy(to + i, rest, static_cast<size_t>(n - i) * sizeof(float));
}

template <class T>
void narrow(const double* from, int64_t n, double factor, void* to) {
  T* at = static_cast<T*>(to);
  int64_t i = 0;
  for (; i + Isa::kLanes <= n; i += Isa::kLanes) Isa::store_as(at + i, Isa::from_doubles(from + i, factor));
  if (i == n) return;
  double rest[Isa::kLanes] = {};
  T narrowed[Isa::kLanes];
  __builtin_memcpy(rest, from + i, static_cast<size_t>(n - i) * sizeof(double));
  Isa::store_as(narrowed, Isa::from_doubles(rest, factor));
  __builtin_memcpy(at + i, narrowed, static_cast<size_t>(n - i) * sizeof(T));
}

// The product is rounded before it is added: the three levels agree to the bit.
void fold(const float* from, int64_t n, double factor, double* to) {
  for (int64_t i = 0; i < n; i += Isa::kLanes) Isa::add_scaled(to + i, Isa::load(from + i), factor);
}

// ---- prefetch ---------------------------------------------------------------------------------------------

constexpr int64_t kNearBytes = 4096;  // how far ahead of the reads rows are asked for into the first-level cache
constexpr int64_t kFarBytes = 16384;  // and into the second (both measured)

inline void prefetch_near(const char* line) { __builtin_prefetch(line, 0, 3); }
inline void prefetch_far(const char* line) { __builtin_prefetch(line, 0, 2); }

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
        near_(1 + (kNearBytes - 1) / (row_length * static_cast<int64_t>(sizeof(T)))),
        far_(1 + (kFarBytes - 1) / (row_length * static_cast<int64_t>(sizeof(T)))) {}

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
    for (int r = 0; r < kTileRows; ++r) Isa::load_pair_partial(row[r] + whole, tile.head_dim - whole, k[r]);
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

// One block of heads by a few vectors of features. kWhole: the vectors lie wholly within the row.
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
    F v[kColumnsHere];
    if constexpr (kColumnsHere % 2 == 0) {
      for (int c = 0; c < kColumnsHere; c += 2) Isa::load_pair(row + c * Isa::kLanes, v + c);
    } else {
      v[0] = kWhole ? Isa::load(row) : Isa::load_partial(row, tile.value_dim - column);
    }
    if constexpr (kAsk) {
      const char* far = upcoming.far(i) + column * static_cast<int64_t>(sizeof(T));
      for (int64_t at = 0; at < (kColumnsHere + 1) / 2 * kPairBytes<T>; at += kLineBytes) prefetch_far(far + at);
    }
    for (int h = 0; h < kHeadsHere; ++h) {
      const F weight = Isa::set1(weights[h * tile.weights_stride + i]);
      for (int c = 0; c < kColumnsHere; ++c) sum[h][c] = Isa::fma(weight, v[c], sum[h][c]);
    }
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

template <class T, int kHeadsHere, int kColumnsHere, bool kWhole = true>
inline void gather_block(const GatherTile& tile, int64_t head, int64_t column) {
  const T* values = static_cast<const T*>(tile.values);
  const float* weights = tile.weights + head * tile.weights_stride;
  double* sums = tile.sums + head * tile.sums_stride + column;
  const int64_t row_bytes = tile.value_dim * static_cast<int64_t>(sizeof(T));
  const bool first = head == 0 && column == 0;
  F sum[kHeadsHere][kColumnsHere];
  for (int h = 0; h < kHeadsHere; ++h) {
    for (int c = 0; c < kColumnsHere; ++c) sum[h][c] = Isa::set1(0.0f);
  }
  for (int64_t i = 0; i < tile.rows; ++i) {
    if (first && i + kGatherAhead < tile.rows) {
      const char* row = reinterpret_cast<const char*>(values + tile.offsets[i + kGatherAhead]);
      for (int64_t at = 0; at < row_bytes; at += kLineBytes) prefetch_far(row + at);
    }
    const T* row = values + tile.offsets[i] + column;
    F v[kColumnsHere];
    if constexpr (kColumnsHere % 2 == 0) {
      for (int c = 0; c < kColumnsHere; c += 2) Isa::load_pair(row + c * Isa::kLanes, v + c);
    } else {
      v[0] = kWhole ? Isa::load(row) : Isa::load_partial(row, tile.value_dim - column);
    }
    for (int h = 0; h < kHeadsHere; ++h) {
      const F weight = Isa::set1(weights[h * tile.weights_stride + i]);
      for (int c = 0; c < kColumnsHere; ++c) sum[h][c] = Isa::fma(weight, v[c], sum[h][c]);
    }
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
  const int64_t row_bytes = tile.value_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < tile.rows && i < kGatherAhead; ++i) {
    const char* row = reinterpret_cast<const char*>(values + tile.offsets[i]);
    for (int64_t at = 0; at < row_bytes; at += kLineBytes) prefetch_far(row + at);
  }
  for (int64_t h = 0; h < tile.heads; ++h) {
    for (int64_t d = 0; d < tile.sums_stride; ++d) tile.sums[h * tile.sums_stride + d] = 0.0;
  }
  int64_t head = 0;
  for (; head + Isa::kHeads <= tile.heads; head += Isa::kHeads) gather_columns<T, Isa::kHeads>(tile, head);
  for (; head < tile.heads; ++head) gather_columns<T, 1>(tile, head);
}

// ---- soft cap ----------------------------------------------------------------------------------------------

// tanh(x) from u = tanh(x / 2) as 2u / (1 + u^2), with u the seventh convergent of Lambert's continued fraction
// x / (1 + x^2 / (3 + x^2 / (5 + ...))): off by 2.7e-7 relative at most. Bounding first costs nothing, since
// tanh(10) is 1 in fp32, and keeps NaN, which max and min return when it is their second argument.
inline F hyperbolic_tangent_of_twice(F half) {
  const F x = Isa::min(Isa::set1(5.0f), Isa::max(Isa::set1(-5.0f), half));
  const F z = Isa::mul(x, x);
  F p = Isa::add(z, Isa::set1(378.0f));
  p = Isa::fma(p, z, Isa::set1(17325.0f));
  p = Isa::fma(p, z, Isa::set1(135135.0f));
  F q = Isa::fma(Isa::set1(28.0f), z, Isa::set1(3150.0f));
  q = Isa::fma(q, z, Isa::set1(62370.0f));
  q = Isa::fma(q, z, Isa::set1(135135.0f));
  const F u = Isa::div(Isa::mul(x, p), q);
  return Isa::div(Isa::add(u, u), Isa::fma(u, u, Isa::set1(1.0f)));
}

void softcap(float* x, int64_t n, float cap) {
  const F half_inverse = Isa::set1(0.5f / cap);
  for (int64_t i = 0; i < n; i += Isa::kLanes) {
    const F tangent = hyperbolic_tangent_of_twice(Isa::mul(Isa::load(x + i), half_inverse));
    Isa::store(x + i, Isa::mul(tangent, Isa::set1(cap)));
  }
}

// ---- softmax, weights, inclusion ---------------------------------------------------------------------------

float maximum(const float* x, int64_t n) {
  F largest = Isa::set1(kNegativeInfinity);
  bool nan = false;
  for (int64_t i = 0; i < n; i += Isa::kLanes) {
    const F value = Isa::load(x + i);
    nan |= Isa::any_nan(value);
    largest = Isa::max(largest, value);
  }
  return nan ? __builtin_nanf("") : Isa::reduce_max(largest);
}

float exponentiate(float* x, int64_t n, float largest) {
  const F shift = Isa::set1(largest);
  F sum = Isa::set1(0.0f);
  for (int64_t i = 0; i < n; i += Isa::kLanes) {
    const F p = exponential(Isa::sub(Isa::load(x + i), shift));
    Isa::store(x + i, p);
    sum = Isa::add(sum, p);
  }
  return Isa::reduce_add(sum);
}

uint64_t sum_blocks(const uint32_t* weights, int64_t n, uint64_t* block_sums) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; i += kBlockRows) {
    const uint64_t sum = Isa::sum16(weights + i);
    block_sums[i / kBlockRows] = sum;
    total += sum;
  }
  return total;
}

uint64_t weigh(const float* scores, int64_t n, float largest, uint32_t* weights, uint64_t* block_sums) {
  const F shift = Isa::set1(largest);
  const F scale = Isa::set1(kWeightScale);
  uint64_t total = 0;
  for (int64_t i = 0; i < n; i += kBlockRows) {
    for (int64_t j = i; j < i + kBlockRows; j += Isa::kLanes) {
      const F p = exponential(Isa::sub(Isa::load(scores + j), shift));
      Isa::store_int(weights + j, Isa::to_int(Isa::mul(p, scale)));
    }
    const uint64_t sum = Isa::sum16(weights + i);
    if (block_sums != nullptr) block_sums[i / kBlockRows] = sum;
    total += sum;
  }
  return total;
}

// Products and sums stay apart (no fma): every backend must round where this one does.
uint64_t include(const IncludeTile& tile) {
  const F samples = Isa::set1(tile.samples);
  const F one = Isa::set1(1.0f);
  const F scale = Isa::set1(kWeightScale);
  uint64_t total = 0;
  for (int64_t i = 0; i < tile.rows; i += kBlockRows) {
    for (int64_t j = i; j < i + kBlockRows; j += Isa::kLanes) {
      F square = Isa::set1(0.0f);
      for (int64_t h = 0; h < tile.heads; ++h) {
        const F weight = Isa::to_float(Isa::load_int(tile.weights + h * tile.weights_stride + j));
        const F p = Isa::mul(weight, Isa::set1(tile.reciprocal[h]));
        square = Isa::add(square, Isa::mul(p, p));
      }
      const F share = Isa::min(Isa::mul(samples, Isa::sqrt(square)), one);
      Isa::store_int(tile.inclusion + j, Isa::to_int(Isa::mul(share, scale)));
    }
    const uint64_t sum = Isa::sum16(tile.inclusion + i);
    tile.block_sums[i / kBlockRows] = sum;
    total += sum;
  }
  return total;
}

// ---- read --------------------------------------------------------------------------------------------------

uint64_t read_through(const char* lines, int64_t bytes) {
  constexpr int64_t kVectors = kLineBytes / static_cast<int64_t>(sizeof(I));
  I bits[kVectors];
  for (int v = 0; v < kVectors; ++v) bits[v] = Isa::zero_int();
  for (int64_t at = 0; at < bytes; at += kLineBytes) {
    prefetch_far(lines + at + kReadAheadBytes);
    for (int v = 0; v < kVectors; ++v) {
      const char* from = lines + at + v * static_cast<int64_t>(sizeof(I));
      bits[v] = Isa::bit_xor(bits[v], Isa::load_int(reinterpret_cast<const uint32_t*>(from)));
    }
  }
  uint64_t words[kVectors * sizeof(I) / 8];
  for (int v = 0; v < kVectors; ++v) {
    Isa::store_int(reinterpret_cast<uint32_t*>(words) + v * Isa::kLanes, bits[v]);
  }
  uint64_t all = 0;
  for (const uint64_t word : words) all ^= word;
  return all;
}

constexpr KernelTable kTable = {
    .widen = {widen<float>, widen<Half>, widen<BFloat>},
    .narrow = {narrow<float>, narrow<Half>, narrow<BFloat>},
    .fold = fold,
    .score = {score<float>, score<Half>, score<BFloat>},
    .accumulate = {accumulate<float>, accumulate<Half>, accumulate<BFloat>},
    .gather = {gather<float>, gather<Half>, gather<BFloat>},
    .softcap = softcap,
    .maximum = maximum,
    .exponentiate = exponentiate,
    .weigh = weigh,
    .include = include,
    .sum_blocks = sum_blocks,
    .read_through = read_through,
};
