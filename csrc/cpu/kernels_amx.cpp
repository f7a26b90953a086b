// The avx512 level with bfloat16 scores and sums of V rows from the matrix unit (AMX), which takes 16 rows, 32
// features and up to 16 heads at once: with it, arithmetic hides behind memory at every group size.
//
// The unit multiplies bfloat16 exactly and adds in fp32. Subnormal numbers count as 0 in it, and where a score or
// a sum might feel that, vectors do it. That is decided for the heads of a group together, never across groups; a
// (row, head) is summed in one order wherever it lies in a tile.
#include "kernels.h"

#if SANTA_HAS_AMX
#include <immintrin.h>

#include "convert.h"

#define SANTA_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16"
#include "target_begin.h"

namespace santa::cpu {
namespace {

constexpr auto kType = static_cast<int>(Dtype::kBFloat16);
constexpr int64_t kMaxSteps = 8;  // 256 features; longer rows are left to the vectors

#include "amx-inl.h"

// ---- score -----------------------------------------------------------------------------------------------

// Up to 16 heads of the query as the unit wants them: by steps of 32 features, [pair of features][head].
class Query {
 public:
  Query(const ScoreTile& tile, int64_t head, int64_t heads, int64_t steps) {
    for (int64_t step = 0; step < pad(steps, kHeld); ++step) {
      __m512 line[kTileRows];
      for (int64_t h = 0; h < kTileLanes; ++h) {
        const bool there = h < heads && step < steps;
        line[h] = there ? narrow(tile.q + (head + h) * tile.q_stride + step * kTileFeatures) : _mm512_setzero_ps();
      }
      transpose(line);
      for (int64_t p = 0; p < kTileRows; ++p) _mm512_store_ps(steps_[step][p], line[p]);
    }
  }

  // Brings four steps into tiles 4 to 7.
  void hold(int64_t step) const {
    load<4>(steps_[step], kLineBytes);
    load<5>(steps_[step + 1], kLineBytes);
    load<6>(steps_[step + 2], kLineBytes);
    load<7>(steps_[step + 3], kLineBytes);
  }

 private:
  // The high halves of 32 widened bfloat16 numbers.
  static __m512 narrow(const float* q) {
    const __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    // word j of the result: word 2j + 1 of both
    const __m512i words =
        _mm512_add_epi32(_mm512_mullo_epi32(numbers, _mm512_set1_epi32(0x40004)), _mm512_set1_epi32(0x30001));
    return _mm512_castsi512_ps(
        _mm512_permutex2var_epi16(_mm512_loadu_si512(q), words, _mm512_loadu_si512(q + kTileLanes)));
  }

  alignas(kLineBytes) Lines steps_[kMaxSteps];
};

// Turns tiles of [row, head] into scores, as many at once as fill 16 columns.
class ScoreWriter {
 public:
  ScoreWriter(const ScoreTile& tile, int64_t head, int64_t heads, int64_t width)
      : tile_(tile), to_(tile.scores + head * tile.scores_stride), heads_(heads), width_(width) {}

  template <int kTile>
  void add() {
    store<kTile>(&lines_[0][held_], kLineBytes);
    held_ += width_;
    if (held_ == kTileLanes) flush();
  }

  void flush() {
    __m512 line[kTileRows];
    for (int64_t r = 0; r < kTileRows; ++r) line[r] = _mm512_load_ps(lines_[r]);
    transpose(line);
    for (int64_t column = 0; column < held_; column += width_, to_ += kTileRows) {
      for (int64_t h = 0; h < heads_; ++h) {
        _mm512_storeu_ps(to_ + h * tile_.scores_stride,
                         _mm512_mul_ps(line[column + h], _mm512_set1_ps(tile_.scale)));
      }
    }
    held_ = 0;
  }

 private:
  const ScoreTile& tile_;
  float* to_;
  const int64_t heads_;
  const int64_t width_;  // columns of a tile: heads and what pads them
  int64_t held_ = 0;     // columns that wait
  alignas(kLineBytes) Lines lines_ = {};
};

// Adds a step of 32 features of 16 rows, and of 16 more, to the sums in tiles 0 and 1: two chains of sums overlap.
template <int kQuery>
inline void add_features(const RowBlock* rows, bool both, const BlockAhead* ahead, int64_t step) {
  load<2>(rows[0].data + step * kLineBytes, rows[0].stride);
  multiply<0, 2, kQuery>();
  ahead[0].ask(step);
  if (!both) return;
  load<3>(rows[1].data + step * kLineBytes, rows[1].stride);
  multiply<1, 3, kQuery>();
  ahead[1].ask(step);
}

void score_heads(const ScoreTile& tile, int64_t head, int64_t heads) {
  const int64_t width = heads <= 4 ? 4 : heads <= 8 ? 8 : kTileLanes;
  const int64_t width_bytes = width * static_cast<int64_t>(sizeof(float));
  const TileShapes::Shape sums = {kTileRows, width_bytes};
  const TileShapes::Shape keys = {kTileRows, kLineBytes};
  const TileShapes shapes({sums, sums, keys, keys, sums, sums, sums, sums});
  const int64_t steps = smaller(steps_of(tile.head_dim), kMaxSteps);
  const Query query(tile, head, heads, steps);
  query.hold(0);
  RowBlocks first(tile.keys, tile.offsets, tile.rows, tile.head_dim);
  RowBlocks second(tile.keys, tile.offsets, tile.rows, tile.head_dim);
  const Upcoming upcoming(tile.keys, tile.offsets, tile.rows, tile.head_dim, tile.ahead);
  ScoreWriter writer(tile, head, heads, width);
  for (int64_t i = 0; i < tile.rows; i += 2 * kTileRows) {
    const bool both = i + kTileRows < tile.rows;
    const RowBlock rows[2] = {first.from(i), both ? second.from(i + kTileRows) : RowBlock{}};
    const BlockAhead ahead[2] = {upcoming.after(i), upcoming.after(i + kTileRows)};
    clear<0>();
    clear<1>();
    for (int64_t step = 0; step < steps; step += kHeld) {
      if (steps > kHeld) query.hold(step);
      add_features<4>(rows, both, ahead, step);
      if (step + 1 < steps) add_features<5>(rows, both, ahead, step + 1);
      if (step + 2 < steps) add_features<6>(rows, both, ahead, step + 2);
      if (step + 3 < steps) add_features<7>(rows, both, ahead, step + 3);
    }
    writer.add<0>();
    if (both) writer.add<1>();
  }
  writer.flush();
}

// Whether it could be felt that subnormal keys and products count as 0: a query or a scale so large that they are
// lifted into sight, a query that is subnormal itself or not finite.
bool felt(const ScoreTile& tile) {
  const float scale = __builtin_fabsf(tile.scale);
  const __m512 limit = _mm512_set1_ps(0x1p80f / (scale > 1.0f ? scale : 1.0f));
  const __m512 smallest = _mm512_set1_ps(0x1p-126f);
  __mmask16 found = static_cast<__mmask16>(scale < 0x1p80f ? 0 : 1);
  for (int64_t h = 0; h < tile.heads; ++h) {
    for (int64_t d = 0; d < tile.head_dim; d += kTileLanes) {
      const __m512 q = _mm512_abs_ps(_mm512_loadu_ps(tile.q + h * tile.q_stride + d));
      const __m512i bits = _mm512_castps_si512(q);
      found |= _mm512_cmp_ps_mask(q, limit, _CMP_NLT_UQ);
      found |= _mm512_mask_cmp_ps_mask(_mm512_test_epi32_mask(bits, bits), q, smallest, _CMP_LT_OQ);
    }
  }
  return found != 0;
}

void score(const ScoreTile& tile) {
  if (steps_of(tile.head_dim) > kMaxSteps || felt(tile)) return kAvx512Kernels.score[kType](tile);
  for (int64_t head = 0; head < tile.heads; head += kTileLanes) {
    score_heads(tile, head, smaller(kTileLanes, tile.heads - head));
  }
}

// ---- accumulate ------------------------------------------------------------------------------------------

// The unit wants V in pairs of rows, which would have to be shuffled together. A line of a V row is taken as 16
// pairs of features instead, and a head as two rows of weights: (w, 0) sums the even features, (0, w) the odd
// ones.
constexpr int64_t kPartHeads = 8;

// Three bfloat16 numbers hold the 24 bits of an fp32 weight.
constexpr int64_t kParts = 3;

// Weights, exponentials and so at most 1, are lifted by this factor, so that no part of one that is not 0 (they
// are above e^-87) is subnormal.
constexpr float kLift = 0x1p40f;

// What kChunkRows subnormal values of V may sum to (2^-118) is below the rounding of a sum of this size.
constexpr float kSmallSum = 0x1p-94f;

// The weights of up to 8 heads for 16 rows: a tile [even heads, odd heads][row] for each part of them.
class Weights {
 public:
  explicit Weights(const AccumulateTile& tile) : tile_(tile) {}

  // Into tiles 4 to 6. 0 past the last row.
  void hold(int64_t i) {
    const int64_t rows = smaller(kTileRows, tile_.rows - i);
    const auto mask = static_cast<__mmask16>((1u << rows) - 1);
    for (int64_t h = 0; h < tile_.heads; ++h) {
      const __m512 weights = _mm512_maskz_loadu_ps(mask, tile_.weights + h * tile_.weights_stride + i);
      __m512 rest = _mm512_mul_ps(weights, _mm512_set1_ps(kLift));
      for (Lines& part : parts_) {
        const __m512i high = _mm512_and_si512(_mm512_castps_si512(rest), _mm512_set1_epi32(-0x10000));
        _mm512_store_si512(part[h], _mm512_srli_epi32(high, 16));
        _mm512_store_si512(part[tile_.heads + h], high);
        rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(high));
      }
    }
    load<4>(parts_[0], kLineBytes);
    load<5>(parts_[1], kLineBytes);
    load<6>(parts_[2], kLineBytes);
  }

 private:
  const AccumulateTile& tile_;
  alignas(kLineBytes) Lines parts_[kParts];
};

template <int kSums>
inline void add_weighted(const RowBlock& rows, int64_t step) {
  load<7>(rows.data + step * kLineBytes, rows.stride);
  multiply<kSums, 4, 7>();
  multiply<kSums, 5, 7>();
  multiply<kSums, 6, 7>();
}

bool weighs(const AccumulateTile& tile, int64_t h) {
  const float* weights = tile.weights + h * tile.weights_stride;
  for (int64_t i = 0; i < tile.rows; ++i) {
    if (weights[i] != 0.0f) return true;
  }
  return false;
}

// Whether vectors have to do a tile of sums again. Some are not finite: lifted too far, or infinite values of V,
// to which the parts of a weight, some of them 0, do not add up. Or some are so small that what the unit takes for
// 0 shows, where V is not 0.
bool spoilt(const AccumulateTile& tile, int64_t step, const Lines& sums) {
  __mmask16 small[2] = {0, 0};  // of the even and the odd features
  for (int64_t h = 0; h < tile.heads; ++h) {
    for (int64_t odd = 0; odd < 2; ++odd) {
      const __m512 sum = _mm512_abs_ps(_mm512_load_ps(sums[odd * tile.heads + h]));
      if (_mm512_cmp_ps_mask(sum, _mm512_set1_ps(0x1.fffffep127f), _CMP_NLE_UQ) != 0) return true;
      const __mmask16 here = _mm512_cmp_ps_mask(sum, _mm512_set1_ps(kLift * kSmallSum), _CMP_LT_OQ);
      if (here != 0 && weighs(tile, h)) small[odd] |= here;
    }
  }
  if ((small[0] | small[1]) == 0) return false;
  const int64_t features = smaller(kTileFeatures, tile.value_dim - step * kTileFeatures);
  const auto present = static_cast<__mmask32>((uint64_t{1} << features) - 1);
  __m512i bits = _mm512_setzero_si512();
  for (int64_t i = 0; i < tile.rows; ++i) {
    const BFloat* row = static_cast<const BFloat*>(tile.values) + tile.offsets[i] + step * kTileFeatures;
    bits = _mm512_or_si512(bits, _mm512_maskz_loadu_epi16(present, row));
  }
  return (small[0] & _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7FFF))) != 0 ||
         (small[1] & _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x7FFF0000))) != 0;
}

// sums[h] += up to 32 features of each head, from a tile of [even heads, odd heads].
void add_sums(const Lines& lines, int64_t heads, int64_t features, float* sums, int64_t stride) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const auto add = [](float* to, __m512 x) {
    const __m512 sum = _mm512_mul_ps(x, _mm512_set1_ps(1.0f / kLift));
    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
  };
  for (int64_t h = 0; h < heads; ++h) {
    const __m512 even = _mm512_load_ps(lines[h]);
    const __m512 odd = _mm512_load_ps(lines[heads + h]);
    add(sums + h * stride, _mm512_permutex2var_ps(even, low, odd));
    if (features > kTileLanes) add(sums + h * stride + kTileLanes, _mm512_permutex2var_ps(even, high, odd));
  }
}

// Up to 8 heads by 4 steps of features. Returns false, and has added nothing, where vectors have to do it.
bool accumulate_part(const AccumulateTile& tile, int64_t row_length) {
  const int64_t steps = steps_of(tile.value_dim);
  const TileShapes::Shape by_heads = {2 * tile.heads, kLineBytes};
  const TileShapes::Shape values = {kTileRows, kLineBytes};
  const TileShapes shapes({by_heads, by_heads, by_heads, by_heads, by_heads, by_heads, by_heads, values});
  Weights weights(tile);
  RowBlocks blocks(tile.values, tile.offsets, tile.rows, tile.value_dim);
  const Upcoming upcoming(tile.values, tile.offsets, tile.rows, row_length, tile.ahead);
  clear<0>();
  clear<1>();
  clear<2>();
  clear<3>();
  for (int64_t i = 0; i < tile.rows; i += kTileRows) {
    weights.hold(i);
    const RowBlock rows = blocks.from(i);
    const BlockAhead ahead = upcoming.after(i);
    add_weighted<0>(rows, 0);
    ahead.ask(0);
    if (steps > 1) {
      add_weighted<1>(rows, 1);
      ahead.ask(1);
    }
    if (steps > 2) {
      add_weighted<2>(rows, 2);
      ahead.ask(2);
    }
    if (steps > 3) {
      add_weighted<3>(rows, 3);
      ahead.ask(3);
    }
  }
  alignas(kLineBytes) Lines lines[kHeld];
  store<0>(lines[0], kLineBytes);
  store<1>(lines[1], kLineBytes);
  store<2>(lines[2], kLineBytes);
  store<3>(lines[3], kLineBytes);
  for (int64_t step = 0; step < steps; ++step) {
    if (spoilt(tile, step, lines[step])) return false;
  }
  for (int64_t step = 0; step < steps; ++step) {
    add_sums(lines[step], tile.heads, tile.value_dim - step * kTileFeatures, tile.sums + step * kTileFeatures,
             tile.sums_stride);
  }
  return true;
}

void accumulate(const AccumulateTile& tile) {
  constexpr int64_t kPartFeatures = kHeld * kTileFeatures;
  for (int64_t head = 0; head < tile.heads; head += kPartHeads) {
    for (int64_t column = 0; column < tile.value_dim; column += kPartFeatures) {
      AccumulateTile part = tile;
      part.values = static_cast<const BFloat*>(tile.values) + column;
      part.value_dim = smaller(kPartFeatures, tile.value_dim - column);
      part.weights += head * tile.weights_stride;
      part.heads = smaller(kPartHeads, tile.heads - head);
      part.sums += head * tile.sums_stride + column;
      if (head != 0) part.ahead = {};
      if (part.ahead.data != nullptr) part.ahead.data = static_cast<const BFloat*>(part.ahead.data) + column;
      if (!accumulate_part(part, tile.value_dim)) kAvx512Kernels.accumulate[kType](part);
    }
  }
}

// ---- table -----------------------------------------------------------------------------------------------

KernelTable with_tiles(KernelTable table) noexcept {
  table.score[kType] = score;
  table.accumulate[kType] = accumulate;
  return table;
}

}  // namespace

const KernelTable& amx_kernels() {
  static const KernelTable table = with_tiles(kAvx512Kernels);
  return table;
}

}  // namespace santa::cpu

#include "target_end.h"
#endif
