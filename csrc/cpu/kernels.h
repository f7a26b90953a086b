#pragma once

#include <cstdint>

#include "../math/layout.h"
#include "../params.h"
#include "level.h"

// The inner loops of the CPU backend: written once in kernels-inl.h, compiled once per instruction-set level.
// Every array of scores, weights or sums that a kernel touches is padded to a multiple of kPadFloats; rows of K
// and V are read to their last element and not beyond.
namespace santa::cpu {

// What is read after a tile: its first rows are asked of memory while the tile is computed. None by default.
struct RowsAhead {
  const void* data = nullptr;
  const int64_t* offsets = nullptr;  // [rows]: in elements
  int64_t rows = 0;
};

// scores[h][i] = scale * <q_h, k_i>
struct ScoreTile {
  const float* q;  // [heads, q_stride], widened from the keys' dtype; zero past head_dim
  int64_t q_stride;
  int64_t heads;
  const void* keys;
  const int64_t* offsets;  // [rows]: element offset of each row in `keys`
  int64_t rows;
  int64_t head_dim;
  float scale;
  float* scores;  // [heads, scores_stride]
  int64_t scores_stride;
  RowsAhead ahead;
};

// scores[h][i] = scale * <q_h, k_i> for the kSketchRows rows of a block that lies feature by feature. A row's sum
// has the order of additions that ScoreTile gives it: over the lanes of a vector, lane by lane.
struct BlockTile {
  const float* q;  // [head_dim, q_stride]: the heads of a feature side by side
  int64_t q_stride;
  int64_t heads;
  const int32_t* features;   // those that are read, lane after lane in the order of the tree that adds lanes
  const int32_t* lane_ends;  // [lanes]: where the features of each lane end
  const int32_t* ascending;  // the same features, ascending: memory likes to be asked in its own order
  const void* block;         // [head_dim, kSketchRows]
  const void* ahead;         // a block that is read later, asked of memory meanwhile; null: none
  RowsAhead rows_ahead;      // or rows of so many bytes
  int64_t row_bytes;
  float scale;
  float* scores;  // [heads, scores_stride]
  int64_t scores_stride;
};

// sums[h] += sum_i weights[h][i] * v_i, added in the order of i
struct AccumulateTile {
  const void* values;
  const int64_t* offsets;  // [rows]
  int64_t rows;
  int64_t value_dim;
  const float* weights;  // [heads, weights_stride], of the order of 1 at most
  int64_t weights_stride;
  int64_t heads;
  float* sums;  // [heads, sums_stride]
  int64_t sums_stride;
  RowsAhead ahead;
};

// sums[h] = sum_i weights[h][i] * v_i over scattered rows: fp32 in the order of i within a chunk, fp64 between
// chunks.
struct GatherTile {
  const void* values;
  const int64_t* offsets;  // [rows]: element offset of each row in `values`
  const int64_t* chunks;   // [rows + 1]: the chunk that each row lies in, ascending; -1 past the last
  int64_t rows;
  int64_t value_dim;
  const float* weights;  // [heads, weights_stride]
  int64_t weights_stride;
  int64_t heads;
  double* sums;  // [heads, sums_stride]
  int64_t sums_stride;
};

// Inclusion probabilities of the shared sample over n rows (a multiple of kBlockRows).
struct IncludeTile {
  const uint32_t* weights;  // [heads, weights_stride]
  int64_t weights_stride;
  const float* reciprocal;  // [heads]: 1 / total, or 0 to leave the head out
  int64_t heads;
  int64_t rows;
  float samples;
  uint32_t* inclusion;   // [rows]
  uint64_t* block_sums;  // [rows / kBlockRows]
};

struct KernelTable {
  // to = from in fp32: n numbers, from and to their last element.
  void (*widen[kDtypes])(const void* from, int64_t n, float* to);
  // to = factor * from, rounded to nearest: n numbers.
  void (*narrow[kDtypes])(const double* from, int64_t n, double factor, void* to);
  // to += factor * from; n is a multiple of kPadFloats.
  void (*fold)(const float* from, int64_t n, double factor, double* to);
  // With queries of the keys' dtype.
  void (*score[kDtypes])(const ScoreTile&);
  // With any queries, and the order of additions of score_block.
  void (*score_rows[kDtypes])(const ScoreTile&);
  void (*score_block[kDtypes])(const BlockTile&);
  // Features of a row of keys, `lanes` of them at once: feature d is added to lane d % lanes.
  int64_t lanes;
  void (*accumulate[kDtypes])(const AccumulateTile&);
  void (*gather[kDtypes])(const GatherTile&);
  // x = cap * tanh(x / cap) in place, n a multiple of kPadFloats.
  void (*softcap)(float* x, int64_t n, float cap);
  // Largest of n numbers (a multiple of kPadFloats): NaN if any is.
  float (*maximum)(const float* x, int64_t n);
  // x = exp(x - maximum) in place; returns the fp32 sum.
  float (*exponentiate)(float* x, int64_t n, float maximum);
  // weights = rint(2^30 exp(scores - maximum)); may work in place. Returns the sum; block_sums may be null.
  uint64_t (*weigh)(const float* scores, int64_t n, float maximum, uint32_t* weights, uint64_t* block_sums);
  // Returns the sum of the inclusions.
  uint64_t (*include)(const IncludeTile&);
  // Sums of kBlockRows weights each; returns the sum of all.
  uint64_t (*sum_blocks)(const uint32_t* weights, int64_t n, uint64_t* block_sums);
  // Xor of the 64-bit words of whole cache lines.
  uint64_t (*read_through)(const char* lines, int64_t bytes);
};

// Constants, initialised without code: code of a level must not run where the processor may lack it.
extern const KernelTable kGenericKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif
#if SANTA_HAS_AMX
const KernelTable& amx_kernels();
#endif

// The level in use: SANTA_CPU_LEVEL when set, the highest supported otherwise, or what set_active_level chose.
Level active_level();
void set_active_level(Level level);
const KernelTable& active_kernels();

}  // namespace santa::cpu
