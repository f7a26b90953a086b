#pragma once

#include <cstdint>

#include "../math/host_device.h"
#include "../math/layout.h"

// Sizes that kernels and their planner share.
namespace santa::cuda {

constexpr int kThreads = 128;      // of every block but those that draw
constexpr int kDrawThreads = 256;  // one block draws a whole sample
constexpr int kScoreBlocks = 4;    // that score, on one multiprocessor: by registers, 128 a thread
constexpr int kWarps = kThreads / 32;
constexpr int kVectorBytes = 16;  // of shared memory, read at once
constexpr int kStages = 3;        // tiles of rows in flight or in use
constexpr int kHeadTile = 4;      // heads whose sums a thread keeps in registers
constexpr int kOctet = 8;         // rows that a warp scores at once, by as many lanes each as there are parts
constexpr int kRowParts = 32 / kOctet;

constexpr int kPackBytes = 128;  // of a row of K that become runs of a block at once

constexpr int kOverlapCapability = 90;  // from which on launches overlap

constexpr int kIncludeHeads = 1024;  // of a group, whose totals a block keeps at once

constexpr int kSliceFeatures = 32;                // of V at most, summed by one block: a warp's width
constexpr int kSliceBytes = 32;                   // of a row at least: what memory hands out at once
constexpr int kGatherRows = 64;                   // drawn rows staged at once
constexpr int kGatherHeads = kWarps * kHeadTile;  // heads summed by one block
constexpr int kMergeFeatures = kThreads;          // of a dense head, merged by one block

// Tiles of drawn rows in flight or in use: rows are scattered, and what is under way hides how long each takes.
constexpr int gather_stages(int element_bytes) { return element_bytes == 2 ? 5 : 3; }

// Shared memory that a block which scores has besides, at most: what reductions pass between warps.
constexpr int kStaticBytes = 512;

// Shared memory of the blocks that score, in bytes from its beginning.
struct ScoreLayout {
  int64_t scores;  // float [heads, kChunkRows]; the queries, float [heads, query_stride], lie before it
  int64_t stages;  // [kStages, tile_rows, key_stride]
  int64_t loaded;  // uint8 [kChunkRows]: whether some head attends the row
  int64_t bytes;
};

SANTA_HD ScoreLayout score_layout(int64_t heads, int64_t query_stride, int64_t tile_rows, int64_t key_stride) {
  ScoreLayout layout{};
  layout.scores = heads * query_stride * 4;
  layout.stages = layout.scores + heads * kChunkRows * 4;
  layout.loaded = layout.stages + kStages * tile_rows * key_stride;
  layout.bytes = layout.loaded + kChunkRows;
  return layout;
}

}  // namespace santa::cuda
