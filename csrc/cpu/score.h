#pragma once

#include <vector>

#include "kernels.h"
#include "mask.h"
#include "step.h"

namespace santa::cpu {

// The rows of one chunk that some head of a group attends. Only they are loaded, from K and from V.
struct AttendedRows {
  int64_t begin;                      // first row of the chunk
  int64_t rows;                       // rows of the chunk within the sequence
  int64_t count;                      // attended ones
  bool all;                           // every head attends every row, nothing is added to its scores
  int64_t blocks;                     // first ones of the chunk that are scored from key_blocks
  int64_t asked;                      // entries of `key_offsets` that say where the first block begins
  int64_t unpacked;                   // attended rows before the first one that is not in those blocks
  int16_t local[kChunkRows];          // [count]: row minus `begin`, ascending; not filled where `all`
  int64_t key_offsets[kChunkRows];    // [count]: in K, from `unpacked` on; before it, see `asked`
  int64_t value_offsets[kChunkRows];  // [count]: in V; only where V is read with K

  int64_t row(int64_t i) const { return begin + (all ? i : local[i]); }
};

// What a thread needs to score one chunk after another. It lists the rows of the next chunk before it scores one,
// so that they can be asked of memory meanwhile.
class Scorer {
 public:
  // With `reads_values` the V rows of a chunk are read after its K rows.
  Scorer(const Step& step, bool reads_values);

  // Scores a chunk; `next`, if there is one, is the chunk of the next call. `scores` is [G, stride] from the chunk
  // on: Step::padded_rows are written, -inf where a head does not attend, and their maxima noted in the step.
  // Returns the rows that were read; they stay valid until the next call.
  const AttendedRows& score(const ChunkTask& task, const ChunkTask* next, float* scores, int64_t stride);

  // Rows of K that the next call reads, to be asked for by whoever works in between.
  RowsAhead keys_ahead() const;

 private:
  void list(const ChunkTask& task, AttendedRows* attended) const;
  void list_blocks(const ChunkTask& task, AttendedRows* attended) const;
  int64_t score_blocks(const ChunkTask& task, const AttendedRows& attended, float* scores, int64_t stride) const;
  int64_t score_rows(int64_t group, const AttendedRows& attended, float* scores, int64_t stride);
  void select(int64_t group, const AttendedRows& attended, int64_t padded_rows, float* scores,
              int64_t stride) const;

  const Step& step_;
  const bool reads_values_;
  const Mask mask_;
  AttendedRows lists_[2];
  int current_ = 0;            // which of the two is scored next
  bool listed_ = false;        // whether it is listed
  std::vector<float> packed_;  // [G, kChunkRows]: scores of the attended rows only
  std::vector<float> placed_;  // [G, kChunkRows]: scores of a chunk before its mask
};

}  // namespace santa::cpu
