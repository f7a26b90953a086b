#pragma once

#include <cstdint>

#include "host_device.h"

namespace santa {

// Rows are cut into chunks of this many, counted from row 0 whatever the batch, the capacity or the device:
// the sums below a chunk are fp32 and those between chunks fp64, so the cut decides the bits of the result.
constexpr int64_t kChunkRows = 256;

SANTA_HD int64_t chunk_count(int64_t rows) { return (rows + kChunkRows - 1) / kChunkRows; }

// Rows whose weights are also kept as one sum, so that a draw scans little.
constexpr int64_t kBlockRows = 16;
constexpr int64_t kBlocksPerChunk = kChunkRows / kBlockRows;

// Rows of a block of keys that lie feature by feature: one feature of them is one run of memory.
constexpr int64_t kSketchRows = 64;
constexpr int64_t kSketchesPerChunk = kChunkRows / kSketchRows;

// Scratch arrays of floats have multiples of this many elements: vectors may be written whole.
constexpr int64_t kPadFloats = 16;

// Lanes of the widest vectors, over which a row's sum of products is spread.
constexpr int64_t kMaxLanes = 16;

// Queries that lie feature by feature have multiples of this many heads.
constexpr int64_t kHeadPad = 4;

// Queries are read in pairs of vectors.
constexpr int64_t kPairFloats = 2 * kPadFloats;

SANTA_HD int64_t pad(int64_t n, int64_t to = kPadFloats) { return (n + to - 1) / to * to; }

}  // namespace santa
