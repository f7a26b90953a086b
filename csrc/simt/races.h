#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

// The race checker: whether two accesses to the same bytes, one of them a write, by two threads, have anything
// between them that orders them. In shared memory it also finds reads of what nobody has written, accesses
// outside every object, and accesses to bytes that a cp.async is about to write.
//
// What orders accesses: __syncthreads within a block; __syncwarp within a warp; between blocks, a __threadfence
// behind the first, an atomic by the same thread, an atomic to the same place by the other thread later, and a
// __threadfence before the second; the end of a launch; for launches that overlap, waiting for the previous
// grid. Shuffles and votes order nothing, as in CUDA. A release by one thread covers what others did before a
// barrier that it has passed, but a fence counts only where the thread of the atomic made it itself.
namespace santa::simt {

struct Block;
struct Thread;

namespace races {

#ifndef SANTA_SIMT_RACES
#define SANTA_SIMT_RACES 0
#endif
constexpr bool kOn = SANTA_SIMT_RACES != 0;

enum class Access : uint8_t { kRead, kReadOnly, kWrite, kAtomic, kCopy, kLanding };

// How many releases at the place of an atomic a thread is ordered after, for each place.
using Acquired = std::map<const void*, size_t>;

// A point up to which accesses of a block are ordered before what comes later. Times are those of lanes.
struct Point {
  uint32_t epoch = 0;                   // every access of an earlier epoch, and
  std::array<uint32_t, 32> lanes = {};  // of the lanes of the thread's own warp, those no later than this
};

struct ThreadClock {
  Point point;        // what this thread is ordered after in its block; its own lane holds its own time
  Acquired acquired;  // what it is ordered after in other blocks
  Acquired seen;      // what it will be ordered after at its next fence
  Point fenced;       // what was before its last fence
  bool has_fence = false;
};

struct BlockClock {
  uint32_t epoch = 0;  // barriers that the block has passed
};

void begin_launch(bool overlap);
void begin_block(Block& block);
void pass_barrier(Block& block);
void pass_warp_barrier(Block& block, int warp, uint32_t lanes);
void pass_fence(Thread& thread);
// The running thread's access to [p, p + bytes) from the instruction before `pc`.
void note(const void* p, int64_t bytes, Access access, const void* pc);

}  // namespace races
}  // namespace santa::simt
