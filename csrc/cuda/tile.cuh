#pragma once

#include "device.cuh"

// Rows of K or V on their way into shared memory.
namespace santa::cuda {

// Where the rows of a tile come from and go to.
struct TileShape {
  int rows;
  int row_bytes;     // of global memory
  int padded_bytes;  // of shared memory that are written: zero past row_bytes; a multiple of 16
  int row_stride;    // bytes between rows of shared memory
};

// One copy by every thread of the block, of `kBytes` or less. row(i) is the address of row i, or null for a row
// that is not read and becomes zero.
template <int kBytes, int kBlockThreads, class Row>
__device__ __forceinline__ void copy_rows_by(const TileShape& tile, const void* base, unsigned char* to,
                                             const Row& row) {
  const int units = tile.padded_bytes / kBytes;
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows * units; i += kBlockThreads) {
    const int r = i / units;
    const int at = i % units * kBytes;
    const unsigned char* from = row(r);
    const int left = from == nullptr ? 0 : max(tile.row_bytes - at, 0);
    unsigned char* const there = to + r * tile.row_stride + at;
    if constexpr (kBytes >= 4) {
      copy_async<kBytes>(there, left > 0 ? from + at : base, min(left, kBytes));
    } else {  // 16-bit numbers at odd places: too narrow for a copy in the background
      *reinterpret_cast<uint16_t*>(there) = left > 0 ? *reinterpret_cast<const uint16_t*>(from + at) : uint16_t{0};
    }
  }
}

// `access` is what every row can be read in at once; `base` any aligned address.
template <int kBlockThreads, class Row>
__device__ void copy_rows(int access, const TileShape& tile, const void* base, unsigned char* to, const Row& row) {
  switch (access) {
    case 16:
      return copy_rows_by<16, kBlockThreads>(tile, base, to, row);
    case 8:
      return copy_rows_by<8, kBlockThreads>(tile, base, to, row);
    case 4:
      return copy_rows_by<4, kBlockThreads>(tile, base, to, row);
    default:
      return copy_rows_by<2, kBlockThreads>(tile, base, to, row);
  }
}

// Runs use(t) for tiles 0 to `tiles` - 1 in order, kStages - 1 of them on their way at any time. issue(t) starts
// the copies of a tile; its stage is t % kStages. Every thread of the block calls.
template <int kStages, class Issue, class Use>
__device__ __forceinline__ void pipeline(int64_t tiles, const Issue& issue, const Use& use) {
  for (int64_t t = 0; t < kStages - 1; ++t) {
    if (t < tiles) issue(t);
    commit_copies();
  }
  for (int64_t t = 0; t < tiles; ++t) {
    wait_copies<kStages - 2>();
    // Behind it every thread's copies are there, and every thread is done with the stage that is filled next.
    __syncthreads();
    if (t + kStages - 1 < tiles) issue(t + kStages - 1);
    commit_copies();
    use(t);
  }
  wait_copies<0>();
}

}  // namespace santa::cuda
