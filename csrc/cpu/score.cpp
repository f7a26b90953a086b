#include "score.h"

#include <algorithm>
#include <atomic>

#include "stage_timer.h"

namespace santa::cpu {
namespace {

constexpr int64_t kAskedBytes = 16384;  // that are asked of memory before they are turned to (measured)

}  // namespace

Scorer::Scorer(const Step& step, bool reads_values)
    : step_(step), reads_values_(reads_values), mask_(step.params.mask) {
  if (!mask_.present()) return;
  packed_.resize(step.group_size() * kChunkRows);
  placed_.resize(step.group_size() * kChunkRows);
}

void Scorer::list(const ChunkTask& task, AttendedRows* attended) const {
  const DecodeParams& params = step_.params;
  const int64_t b = step_.batch_of(task.group);
  const int64_t kv = task.group % step_.shape.kv_heads;
  attended->begin = task.chunk * kChunkRows;
  attended->rows = std::min(kChunkRows, step_.extents[b] - attended->begin);
  attended->all = mask_.selects_all(b, attended->begin, attended->begin + attended->rows);
  const int64_t packed = std::min(params.key_blocks.packed_rows(b) - attended->begin, kChunkRows);
  const int64_t needed = std::min(packed, pad(attended->rows, kSketchRows));
  attended->blocks = std::max<int64_t>(needed, 0) / kSketchRows;
  const int64_t first = attended->blocks * kSketchRows;  // row that is in no block
  if (attended->all) {
    attended->count = attended->rows;
    attended->unpacked = std::min(first, attended->rows);
    list_blocks(task, attended);
    params.k.offsets(b, kv, attended->begin + attended->unpacked, attended->rows - attended->unpacked,
                     attended->key_offsets + attended->unpacked);
    if (reads_values_) params.v.offsets(b, kv, attended->begin, attended->rows, attended->value_offsets);
    return;
  }
  attended->count = 0;
  attended->asked = 0;
  attended->unpacked = 0;
  const int64_t heads = mask_.same_for_all_heads() ? 1 : step_.group_size();
  for (int64_t j = 0; j < attended->rows; ++j) {
    const int64_t row = attended->begin + j;
    bool any = false;
    for (int64_t g = 0; g < heads && !any; ++g) any = mask_.attends(b, kv * step_.group_size() + g, row);
    if (!any) continue;
    attended->local[attended->count] = static_cast<int16_t>(j);
    if (j < first) ++attended->unpacked;
    attended->key_offsets[attended->count] = params.k.offset(b, kv, row);
    if (reads_values_) attended->value_offsets[attended->count] = params.v.offset(b, kv, row);
    ++attended->count;
  }
}

// The beginning of the first block, in pieces as long as rows of V: whoever works through those asks for it.
void Scorer::list_blocks(const ChunkTask& task, AttendedRows* attended) const {
  const DecodeShape& shape = step_.shape;
  const KeyBlocks& keys = step_.params.key_blocks;
  attended->asked = 0;
  if (attended->blocks == 0 || !reads_values_ || step_.params.sparse_query) return;
  const int64_t numbers = std::min(kAskedBytes / element_size(shape.dtype), shape.head_dim * kSketchRows);
  attended->asked = std::min(attended->unpacked, numbers / shape.value_dim);
  const int64_t first =
      keys.offset(step_.batch_of(task.group), task.group % shape.kv_heads, task.chunk * kSketchesPerChunk);
  for (int64_t i = 0; i < attended->asked; ++i) attended->key_offsets[i] = first + i * shape.value_dim;
}

RowsAhead Scorer::keys_ahead() const {
  if (!listed_) return {};
  const AttendedRows& attended = lists_[current_];
  if (attended.blocks != 0) {
    return {.data = step_.params.key_blocks.data, .offsets = attended.key_offsets, .rows = attended.asked};
  }
  return {.data = step_.params.k.data,
          .offsets = attended.key_offsets + attended.unpacked,
          .rows = attended.count - attended.unpacked};
}

// Scores the blocks of a chunk that hold an attended row, each to its place. Returns the bytes read.
int64_t Scorer::score_blocks(const ChunkTask& task, const AttendedRows& attended, float* scores,
                             int64_t stride) const {
  const DecodeShape& shape = step_.shape;
  const KeyBlocks& keys = step_.params.key_blocks;
  const int64_t size = element_size(shape.dtype);
  const int64_t value_bytes = shape.value_dim * size;
  const int64_t packed_rows = keys.packed_rows(step_.batch_of(task.group));
  const int64_t first = task.chunk * kSketchesPerChunk;
  int64_t read = 0;
  int64_t at = 0;  // in the list of attended rows
  for (int64_t block = 0; block < attended.blocks; ++block) {
    if (!attended.all) {
      const int64_t before = at;
      while (at < attended.count && attended.local[at] < (block + 1) * kSketchRows) ++at;
      if (at == before) continue;
    }
    const int64_t offset = keys.offset(step_.batch_of(task.group), task.group % shape.kv_heads, first + block);
    const char* start = static_cast<const char*>(keys.data) + offset * size;
    // After the last block of a chunk V is read, if at all; then the keys of the next chunk.
    const bool values_next = reads_values_ && block + 1 == attended.blocks;
    const bool more = !values_next && (first + block + 2) * kSketchRows <= packed_rows;
    RowsAhead values;
    if (values_next) {
      values = {.data = step_.params.v.data,
                .offsets = attended.value_offsets,
                .rows = std::min(attended.count, 1 + kAskedBytes / value_bytes)};
    }
    step_.kernels.score_block[static_cast<int>(shape.dtype)](
        {.q = step_.block_query(task.group),
         .q_stride = step_.plan.block_stride,
         .heads = step_.group_size(),
         .features = step_.features(task.group),
         .lane_ends = step_.lane_ends(task.group),
         .ascending = step_.ascending(task.group),
         .block = start,
         .ahead = more ? start + keys.block_stride * size : nullptr,
         .rows_ahead = values,
         .row_bytes = value_bytes,
         .scale = step_.params.scale,
         .scores = scores + block * kSketchRows,
         .scores_stride = stride});
    ++read;
  }
  return read * kSketchRows * step_.used_features(task.group) * size;
}

// Scores the attended rows that are in no block, each to its place. Returns the bytes read.
int64_t Scorer::score_rows(int64_t group, const AttendedRows& attended, float* scores, int64_t stride) {
  const DecodeParams& params = step_.params;
  const int64_t rows = attended.count - attended.unpacked;
  if (rows <= 0) return 0;
  const auto dtype = static_cast<int>(step_.shape.dtype);
  RowsAhead ahead = keys_ahead();
  if (reads_values_) {
    ahead = {.data = params.v.data, .offsets = attended.value_offsets, .rows = attended.count};
  }
  // Rows beside blocks have to be added up as blocks are, and a stochastic query is no number of 16 bits.
  const bool plain =
      params.q_dtype == step_.shape.dtype && params.bernoulli.draws == 0 && !params.key_blocks.present();
  (plain ? step_.kernels.score
         : step_.kernels.score_rows)[dtype]({.q = step_.query(step_.first_head(group)),
                                             .q_stride = step_.plan.query_stride,
                                             .heads = step_.group_size(),
                                             .keys = params.k.data,
                                             .offsets = attended.key_offsets + attended.unpacked,
                                             .rows = rows,
                                             .head_dim = step_.shape.head_dim,
                                             .scale = params.scale,
                                             .scores = attended.all ? scores + attended.unpacked : packed_.data(),
                                             .scores_stride = attended.all ? stride : kChunkRows,
                                             .ahead = ahead});
  for (int64_t g = 0; !attended.all && g < step_.group_size(); ++g) {
    const float* from = packed_.data() + g * kChunkRows;
    for (int64_t i = 0; i < rows; ++i) scores[g * stride + attended.local[attended.unpacked + i]] = from[i];
  }
  return rows * step_.shape.head_dim * element_size(step_.shape.dtype);
}

// Applies the mask to the scores of a chunk.
void Scorer::select(int64_t group, const AttendedRows& attended, int64_t padded_rows, float* scores,
                    int64_t stride) const {
  const int64_t b = step_.batch_of(group);
  const int64_t first = step_.first_head(group) % step_.shape.query_heads;
  for (int64_t g = 0; g < step_.group_size(); ++g) {
    float* to = scores + g * stride;
    const float* from = placed_.data() + g * kChunkRows;
    std::fill_n(to, padded_rows, kNegativeInfinity);
    for (int64_t i = 0; i < attended.count; ++i) {
      const int64_t j = attended.local[i];
      float bias;
      if (mask_.attends(b, first + g, attended.begin + j, &bias)) to[j] = from[j] + bias;
    }
  }
}

const AttendedRows& Scorer::score(const ChunkTask& task, const ChunkTask* next, float* scores, int64_t stride) {
  const StageTimer timer(Stage::kScore);
  const DecodeParams& params = step_.params;
  if (!listed_) list(task, &lists_[current_]);
  const AttendedRows& attended = lists_[current_];
  current_ ^= 1;
  listed_ = next != nullptr;
  if (listed_) list(*next, &lists_[current_]);
  const int64_t group = step_.group_size();
  const int64_t head = step_.first_head(task.group);
  float* const to = attended.all ? scores : placed_.data();
  const int64_t to_stride = attended.all ? stride : kChunkRows;
  const int64_t bytes =
      score_blocks(task, attended, to, to_stride) + score_rows(task.group, attended, to, to_stride);
  if (params.softcap != 0.0f) {
    for (int64_t g = 0; g < group; ++g) {
      step_.kernels.softcap(to + g * to_stride, pad(attended.rows), params.softcap);
    }
  }
  const int64_t padded_rows = step_.padded_rows(task.group, task.chunk);
  if (!attended.all) select(task.group, attended, padded_rows, scores, stride);
  for (int64_t g = 0; g < group; ++g) {
    float* row = scores + g * stride;
    if (attended.all) std::fill(row + attended.rows, row + padded_rows, kNegativeInfinity);
    step_.chunk_maxima(head + g)[task.chunk] = step_.kernels.maximum(row, padded_rows);
  }
  if (params.keys_read != nullptr) {
    KeysRead& read = params.keys_read[task.group];
    std::atomic_ref(read.rows) += attended.count;
    std::atomic_ref(read.bytes) += bytes;
  }
  return attended;
}

}  // namespace santa::cpu
