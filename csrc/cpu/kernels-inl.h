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

#define SANTA_FUNCTION inline
#include "../math/functions-inl.h"
#undef SANTA_FUNCTION

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

// Needs the prefetches of the one above.
#include "blocks-inl.h"

// ---- soft cap ----------------------------------------------------------------------------------------------

void softcap(float* x, int64_t n, float cap) {
  const F half_inverse = Isa::set1(0.5f / cap);
  for (int64_t i = 0; i < n; i += Isa::kLanes) {
    Isa::store(x + i, capped(Isa::load(x + i), half_inverse, Isa::set1(cap)));
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
  for (int64_t i = 0; i < n; i += Isa::kLanes) {
    Isa::store_int(weights + i, integer_weight(Isa::sub(Isa::load(scores + i), shift)));
  }
  return sum_blocks(weights, n, block_sums);
}

uint64_t include(const IncludeTile& tile) {
  const F samples = Isa::set1(tile.samples);
  for (int64_t i = 0; i < tile.rows; i += Isa::kLanes) {
    F square = Isa::set1(0.0f);
    for (int64_t h = 0; h < tile.heads; ++h) {
      const I weight = Isa::load_int(tile.weights + h * tile.weights_stride + i);
      square = add_square(square, weight, Isa::set1(tile.reciprocal[h]));
    }
    Isa::store_int(tile.inclusion + i, integer_inclusion(square, samples));
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
    .score_rows = {score<float>, score<Half>, score<BFloat>},
    .score_block = {score_block<float>, score_block<Half>, score_block<BFloat>},
    .lanes = Isa::kLanes,
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
