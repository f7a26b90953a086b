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

// The product is rounded before it is added: all levels agree to the bit.
void fold(const float* from, int64_t n, double factor, double* to) {
  for (int64_t i = 0; i < n; i += Isa::kLanes) Isa::add_scaled(to + i, Isa::load(from + i), factor);
}

#include "tiles-inl.h"

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
  constexpr int64_t kAtOnce = Isa::kSumBlocks;
  const int64_t blocks = n / kBlockRows;
  uint64_t total = 0;
  for (int64_t block = 0; block < blocks; block += kAtOnce) {
    uint64_t sums[kAtOnce];
    const int64_t here = kAtOnce < blocks - block ? kAtOnce : blocks - block;
    if (here == kAtOnce) {
      Isa::sum_blocks(weights + block * kBlockRows, sums);
    } else {
      for (int64_t b = 0; b < here; ++b) {
        sums[b] = 0;
        for (int64_t i = 0; i < kBlockRows; ++i) sums[b] += weights[(block + b) * kBlockRows + i];
      }
    }
    for (int64_t b = 0; b < here; ++b) {
      total += sums[b];
      if (block_sums != nullptr) block_sums[block + b] = sums[b];
    }
  }
  return total;
}

uint64_t weigh(const float* scores, int64_t n, float largest, uint32_t* weights, uint64_t* block_sums) {
  const F shift = Isa::set1(largest);
  const F scale = Isa::set1(kWeightScale);
  for (int64_t i = 0; i < n; i += Isa::kLanes) {
    const F p = exponential(Isa::sub(Isa::load(scores + i), shift));
    Isa::store_int(weights + i, Isa::to_int(Isa::mul(p, scale)));
  }
  return sum_blocks(weights, n, block_sums);
}

// Products and sums stay apart (no fma): every backend must round where this one does.
uint64_t include(const IncludeTile& tile) {
  const F samples = Isa::set1(tile.samples);
  const F one = Isa::set1(1.0f);
  const F scale = Isa::set1(kWeightScale);
  for (int64_t i = 0; i < tile.rows; i += Isa::kLanes) {
    F square = Isa::set1(0.0f);
    for (int64_t h = 0; h < tile.heads; ++h) {
      const F weight = Isa::to_float(Isa::load_int(tile.weights + h * tile.weights_stride + i));
      const F p = Isa::mul(weight, Isa::set1(tile.reciprocal[h]));
      square = Isa::add(square, Isa::mul(p, p));
    }
    const F share = Isa::min(Isa::mul(samples, Isa::sqrt(square)), one);
    Isa::store_int(tile.inclusion + i, Isa::to_int(Isa::mul(share, scale)));
  }
  return sum_blocks(tile.inclusion, tile.rows, tile.block_sums);
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
