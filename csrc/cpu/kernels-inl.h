// The kernels of one instruction-set level. No include guard: each kernels_<level>.cpp opens a namespace of its
// own, defines its vector class `Isa` there and includes this file. Nothing here may call into the standard
// library: an inline function compiled for this level could be the copy that every other level then uses.
//
// Isa: F is a vector of kLanes floats, I one of as many 32-bit integers. A block of kHeads query heads by 4 rows
// (score) or by kColumns vectors (accumulate) of sums fits the level's registers.

using F = Isa::F;
using I = Isa::I;

constexpr int kTileRows = 4;               // rows scored at once: reduce4 turns their sums into one vector
constexpr int64_t kPrefetchBytes = 4096;   // how far ahead of the reads rows are asked for (measured)
constexpr int64_t kReadAheadBytes = 8192;  // the same where nothing but reading is done
constexpr int64_t kLineBytes = 64;

inline void prefetch(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(row + at);
}

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

// ---- score -----------------------------------------------------------------------------------------------

// Four rows by kHeadsHere heads. Each (row, head) has one accumulator, filled in the order of d and reduced by one
// fixed tree: its bits do not depend on where the row lies in a tile or the head in a group.
template <class T, int kHeadsHere>
inline void score_rows(const ScoreTile& tile, const T* const* row, int64_t head, float* to) {
  const float* q = tile.q + head * tile.q_stride;
  F sum[kHeadsHere][kTileRows];
  for (int h = 0; h < kHeadsHere; ++h) {
    for (int r = 0; r < kTileRows; ++r) sum[h][r] = Isa::set1(0.0f);
  }
  int64_t d = 0;
  for (; d + Isa::kLanes <= tile.head_dim; d += Isa::kLanes) {
    F k[kTileRows];
    for (int r = 0; r < kTileRows; ++r) k[r] = Isa::load(row[r] + d);
    for (int h = 0; h < kHeadsHere; ++h) {
      const F qd = Isa::load(q + h * tile.q_stride + d);
      for (int r = 0; r < kTileRows; ++r) sum[h][r] = Isa::fma(qd, k[r], sum[h][r]);
    }
  }
  if (d < tile.head_dim) {
    const int64_t left = tile.head_dim - d;
    for (int h = 0; h < kHeadsHere; ++h) {
      const F qd = Isa::load(q + h * tile.q_stride + d);
      for (int r = 0; r < kTileRows; ++r) {
        sum[h][r] = Isa::fma(qd, Isa::load_partial(row[r] + d, left), sum[h][r]);
      }
    }
  }
  for (int h = 0; h < kHeadsHere; ++h) {
    Isa::reduce4(sum[h], tile.scale, to + (head + h) * tile.scores_stride);
  }
}

template <class T, int kRemainder>
void score_tile(const ScoreTile& tile) {
  const T* keys = static_cast<const T*>(tile.keys);
  const int64_t row_bytes = tile.head_dim * static_cast<int64_t>(sizeof(T));
  const int64_t ahead = (kPrefetchBytes + row_bytes - 1) / row_bytes;
  const int64_t full_heads = tile.heads - kRemainder;
  for (int64_t i = 0; i < tile.rows; i += kTileRows) {
    const T* row[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t at = i + r;
      row[r] = keys + tile.offsets[at < tile.rows ? at : tile.rows - 1];
      if (at + ahead < tile.listed) {
        prefetch(reinterpret_cast<const char*>(keys + tile.offsets[at + ahead]), row_bytes);
      }
    }
    for (int64_t head = 0; head < full_heads; head += Isa::kHeads) {
      score_rows<T, Isa::kHeads>(tile, row, head, tile.scores + i);
    }
    if constexpr (kRemainder != 0) score_rows<T, kRemainder>(tile, row, full_heads, tile.scores + i);
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
template <class T, int kHeadsHere, int kColumnsHere, bool kWhole = true>
inline void accumulate_block(const AccumulateTile& tile, const T* values, int64_t begin, int64_t end, int64_t head,
                             int64_t column) {
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
    for (int c = 0; c < kColumnsHere; ++c) {
      v[c] = kWhole ? Isa::load(row + c * Isa::kLanes) : Isa::load_partial(row, tile.value_dim - column);
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

template <class T, int kHeadsHere>
inline void accumulate_columns(const AccumulateTile& tile, const T* values, int64_t begin, int64_t end,
                               int64_t head) {
  constexpr int64_t kWide = Isa::kColumns * Isa::kLanes;
  int64_t column = 0;
  for (; column + kWide <= tile.value_dim; column += kWide) {
    accumulate_block<T, kHeadsHere, Isa::kColumns>(tile, values, begin, end, head, column);
  }
  for (; column + Isa::kLanes <= tile.value_dim; column += Isa::kLanes) {
    accumulate_block<T, kHeadsHere, 1>(tile, values, begin, end, head, column);
  }
  if (column < tile.value_dim) {
    accumulate_block<T, kHeadsHere, 1, false>(tile, values, begin, end, head, column);
  }
}

template <class T>
void accumulate(const AccumulateTile& tile) {
  const T* values = static_cast<const T*>(tile.values);
  const int64_t row_bytes = tile.value_dim * static_cast<int64_t>(sizeof(T));
  const int64_t ahead = (kPrefetchBytes + row_bytes - 1) / row_bytes;
  for (int64_t begin = 0; begin < tile.rows; begin += kPassRows) {
    const int64_t end = begin + kPassRows < tile.rows ? begin + kPassRows : tile.rows;
    for (int64_t i = begin + ahead; i < end + ahead && i < tile.listed; ++i) {
      prefetch(reinterpret_cast<const char*>(values + tile.offsets[i]), row_bytes);
    }
    int64_t head = 0;
    for (; head + Isa::kHeads <= tile.heads; head += Isa::kHeads) {
      accumulate_columns<T, Isa::kHeads>(tile, values, begin, end, head);
    }
    for (; head < tile.heads; ++head) accumulate_columns<T, 1>(tile, values, begin, end, head);
  }
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
    __builtin_prefetch(lines + at + kReadAheadBytes, 0, 2);
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
    .score = {score<float>, score<Half>, score<BFloat>},
    .accumulate = {accumulate<float>, accumulate<Half>, accumulate<BFloat>},
    .softcap = softcap,
    .maximum = maximum,
    .exponentiate = exponentiate,
    .weigh = weigh,
    .include = include,
    .sum_blocks = sum_blocks,
    .read_through = read_through,
};
