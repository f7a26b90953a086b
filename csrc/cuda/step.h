#pragma once

#include "../params.h"
#include "../planner.h"

namespace santa::cuda {

// One step on a GPU: its parameters, its plan, and where everything lies. A plain struct that kernels take by
// value. Scratch and results are told apart only by who allocates them: the stages alone write where decode keeps
// scratch.
struct Step {
  DecodeParams params;
  LaunchPlan plan;
  int key_access = 16;    // bytes that every row of K can be read in at once
  int value_access = 16;  // the same of V
  bool whole = false;     // stage "score" alone: rows past a sequence's length have scores too

  float* query;         // [B, Hq, D]: the stochastic query, or null where q itself is scored
  float* query_maxima;  // [B, Hq]: the largest |q| of each head
  int32_t* block_rows;  // [B, Hkv, chunks * kSketchesPerChunk]: attended rows of each block, or null

  int32_t* attended;    // [B, Hkv, chunks, 2]
  float* chunk_maxima;  // [B, Hq, chunks]
  float* maxima;        // [B, Hq], or null where there are none: stages "draw" and "gather" alone

  // Scores and weights share their memory: bits of fp32 numbers, then integers.
  uint32_t* scores;       // [B, Hq, scores_stride]
  int64_t scores_stride;  // rows between heads
  int64_t scores_rows;    // rows of a head that exist: padded_rows, or L in a tensor of the user
  uint32_t* weights;      // [B, Hq, weights_stride]
  int64_t weights_stride;
  int64_t weights_rows;
  uint64_t* weight_sums;        // [B, Hq, chunks], or null: stage "weigh" alone
  uint64_t* totals;             // [B, Hq]
  float* row_mass;              // [B, Hq]
  const float* given_row_mass;  // [B, Hq] of stage "draw", or null

  uint32_t* inclusion;       // [B, Hkv, padded_rows]
  uint64_t* inclusion_sums;  // [B, Hkv, chunks]
  uint64_t* block_sums;      // [draw heads, padded_rows / kBlockRows]
  uint64_t* prefix;          // [draw heads, chunks]
  int32_t* drawn;            // [draw heads, picks, 1 or 2]
  int32_t* begins;           // [draw heads, capacity]

  int64_t* rows;           // [draw heads, capacity]
  int32_t* counts;         // [draw heads, capacity]
  int32_t* num_rows;       // [draw heads]
  int64_t heads_per_list;  // query heads that share a list of rows
  bool clear_rest;         // stage "draw" alone: places not in use are zero
  float* coefficients;     // [B, Hq, capacity], or null: stage "draw" alone
  double* slack;           // [draw heads, capacity], or null without statistics

  float* partial_sums;  // [B, Hq, chunks]
  float* partial_out;   // [B, Hq, chunks, value_stride]

  // Whether scores want more than rows of K and a query of the same dtype.
  bool sketch() const { return params.key_blocks.present() || params.q_dtype != params.shape.dtype; }
};

// Bytes that every row can be read in at once, from its address and its strides. Throws std::invalid_argument
// where an address is no multiple of its numbers' size; `name` is the argument's.
int access_bytes(const char* name, const RowAddress& address, const DecodeShape& shape);

// Throws std::invalid_argument where blocks of keys do not begin at multiples of 16 bytes, which is how they are
// read and written.
void check_block_access(const KeyBlocks& blocks, const DecodeShape& shape);

// A step whose scratch lies in `memory`, plan.bytes of it. Results of stages alone are set afterwards.
Step make_step(const DecodeParams& params, const LaunchPlan& plan, std::byte* memory);

// Scores are of the stochastic query from here on.
void use_stochastic_query(Step* step);

}  // namespace santa::cuda
