// Operator "sketch_append": rows of K [B, Hkv, n, D] on their way into blocks [B, Hkv, C, D, 64] of a sketch.
//
// Two launches: a sequence's number of rows, which every block of the first one reads, is moved on by the second.
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "step.cuh"
#include "tile.cuh"

namespace santa::cuda {
namespace {

// Rows that a sequence holds and that it gets. What its blocks have no room for is left out, as are rows that k
// does not have: nothing on the host may look.
struct Rows {
  int64_t held;
  int64_t added;

  __device__ Rows(const AppendParams& params, int64_t b) {
    const int64_t room = (params.capacity + 1) * kSketchRows - 1;  // all blocks whole, and an unfinished one
    held = max(min(params.rows[b], room), int64_t{0});
    const int64_t wanted = params.num_rows.data != nullptr ? params.num_rows[b] : params.shape.rows;
    added = min(max(min(wanted, params.shape.rows), int64_t{0}), room - held);
  }
  __device__ int64_t end() const { return held + added; }
};

constexpr int kPackStride = kPackBytes + kVectorBytes;  // between staged rows: an odd number of vectors

template <class T>
class Packer {
 public:
  // For KV head h of sequence b.
  __device__ Packer(const AppendParams& params, int access, int64_t b, int64_t h)
      : dim_(static_cast<int>(params.shape.head_dim)),
        access_(access),
        blocks_(static_cast<T*>(params.blocks) + b * params.batch_stride + h * params.head_stride),
        block_stride_(params.block_stride),
        open_(static_cast<T*>(params.open) + (b * params.shape.kv_heads + h) * kSketchRows * dim_),
        keys_(static_cast<const T*>(params.k.data) + b * params.k.page_stride + h * params.k.head_stride),
        row_stride_(params.k.row_stride),
        rows_(params, b) {}

  __device__ const Rows& rows() const { return rows_; }

  // [kSketchRows, D] to [D, kSketchRows], kFeatures features at a time. Every thread calls.
  __device__ void pack(int64_t block) const {
    auto& tile = shared_memory<struct PackTile, Words<kVectorBytes>[kSketchRows * kPackStride / kVectorBytes]>();
    auto* const staged = reinterpret_cast<unsigned char*>(&tile);
    T* const to = blocks_ + block * block_stride_;
    for (int first = 0; first < dim_; first += kFeatures) {
      const int features = min(dim_ - first, kFeatures);
      __syncthreads();  // the tile before has been read
      const TileShape shape = {.rows = static_cast<int>(kSketchRows),
                               .row_bytes = features * static_cast<int>(sizeof(T)),
                               .padded_bytes = kPackBytes,
                               .row_stride = kPackStride};
      copy_rows<kThreads>(access_, shape, open_, staged, [&](int r) {
        return reinterpret_cast<const unsigned char*>(source(block * kSketchRows + r) + first);
      });
      commit_copies();
      wait_copies<0>();
      __syncthreads();
      const int lane = static_cast<int>(lane_id());
      for (int d = static_cast<int>(threadIdx.x) / kWarpLanes; d < features; d += kWarps) {
        store_pair(staged + d * sizeof(T), lane, to + static_cast<int64_t>(first + d) * kSketchRows);
      }
    }
  }

  // Rows past the last whole block.
  __device__ void keep_open() const {
    const int64_t first = max(rows_.held, rows_.end() / kSketchRows * kSketchRows);
    for (int64_t row = first + threadIdx.x / kWarpLanes; row < rows_.end(); row += kWarps) {
      const T* from = source(row);
      T* to = open_ + row % kSketchRows * dim_;
      for (int d = static_cast<int>(lane_id()); d < dim_; d += kWarpLanes) to[d] = from[d];
    }
  }

 private:
  static constexpr int kFeatures = kPackBytes / static_cast<int>(sizeof(T));

  __device__ const T* source(int64_t row) const {
    return row < rows_.held ? open_ + row % kSketchRows * dim_ : keys_ + (row - rows_.held) * row_stride_;
  }

  // One feature of rows 2 `lane` and 2 `lane` + 1: a warp stores a whole run.
  __device__ static void store_pair(const unsigned char* feature, int lane, T* run) {
    const auto at = [&](int row) { return *reinterpret_cast<const T*>(feature + row * kPackStride); };
    if constexpr (sizeof(T) == 4) {
      store<8>(run + 2 * lane, Words<8>{{__float_as_uint(at(2 * lane)), __float_as_uint(at(2 * lane + 1))}});
    } else {
      store<4>(run + 2 * lane, Words<4>{{at(2 * lane).bits | static_cast<uint32_t>(at(2 * lane + 1).bits) << 16}});
    }
  }

  const int dim_;
  const int access_;
  T* const blocks_;
  const int64_t block_stride_;
  T* const open_;        // [kSketchRows, D]
  const T* const keys_;  // the first new row
  const int64_t row_stride_;
  const Rows rows_;
};

// Grid: groups times the blocks that so many rows may complete, one at least. The first of a group's blocks is the
// one that reads open rows, so it writes them too, afterwards.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    pack_kernel(const __grid_constant__ AppendParams params, int access, uint32_t most_blocks) {
  wait_for_previous_grid();
  let_next_grid_start();
  const uint32_t group = blockIdx.x / most_blocks;
  const uint32_t i = blockIdx.x % most_blocks;
  const auto kv_heads = static_cast<uint32_t>(params.shape.kv_heads);
  const Packer<T> packer(params, access, group / kv_heads, group % kv_heads);
  const int64_t block = packer.rows().held / kSketchRows + i;
  if ((block + 1) * kSketchRows <= packer.rows().end()) packer.pack(block);
  // Whatever was packed has been read, behind the barriers of its copies.
  if (i == 0) packer.keep_open();
}

// Grid: a thread per sequence.
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ AppendParams params) {
  wait_for_previous_grid();
  const int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (b < params.shape.batch) params.rows[b] = Rows(params, b).end();
}

}  // namespace

void sketch_append(const AppendParams& params, int access, bool overlap, void* stream) {
  const DecodeShape& shape = params.shape;
  const int64_t most_blocks = (shape.rows + kSketchRows - 1) / kSketchRows;
  const int64_t blocks = shape.batch * shape.kv_heads * most_blocks;
  if (blocks > INT32_MAX) {
    throw std::invalid_argument("santa: k has too many rows in all: " + std::to_string(blocks) +
                                " blocks, a launch has at most 2^31 - 1");
  }
  launch_for_dtype(shape.dtype, [&](auto type) {
    launch(pack_kernel<decltype(type)>,
           {.name = "pack",
            .grid = dim3(static_cast<unsigned>(blocks)),
            .block = dim3(kThreads),
            .stream = static_cast<Stream>(stream)},
           params, access, static_cast<uint32_t>(most_blocks));
  });
  launch(count_kernel,
         {.name = "count",
          .grid = dim3(static_cast<unsigned>((shape.batch + kThreads - 1) / kThreads)),
          .block = dim3(kThreads),
          .stream = static_cast<Stream>(stream),
          .overlap = overlap},
         params);
}

}  // namespace santa::cuda
