#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

// What the names in simt.h are made of. Kernels do not include this.

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  // As CUDA's: a number is a size in x. NOLINTNEXTLINE(google-explicit-constructor)
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) noexcept : x(x), y(y), z(z) {}
};

namespace santa::simt {

// Any fault: of a launch, of a kernel, of its use of memory. Names the kernel, the block and the thread.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// In what order threads that can go on are taken, and blocks likewise. A kernel is right when its result is the
// same under all of them. Starving ranks the threads of a block at random, and the last get their turn when no
// other thread of any block can go on: unlike a shuffle, it lets some fall far behind.
enum class Order : uint8_t { kForward, kReverse, kShuffled, kStarving };

// Set by a test, in force for the launches that follow.
struct Options {
  Order order = Order::kForward;
  uint64_t seed = 1;        // of the two that are random
  int resident_blocks = 1;  // blocks that run interleaved
  int64_t shared_limit =
      int64_t{99} << 10;  // bytes a block may have: the least of sm_80 to sm_120 (8.6, 8.9, 12.0)
};
inline Options options;

// Global memory that kernels may touch. Where a test names any, accesses elsewhere are errors: every access with
// the race checker, otherwise those through the functions of device.cuh.
struct Memory {
  const void* begin;
  int64_t bytes;
  const char* name;
};
inline std::vector<Memory> global_memory;

struct Launch {
  const char* name = "kernel";
  dim3 grid, block;
  int64_t shared_bytes = 0;  // dynamic shared memory
  bool overlap = false;      // may start before the launch before it has ended
};

// Names of the kernels that have been launched, in their order; for a test to read and to clear.
inline std::vector<std::string> launched;

// A place in a source, by default the caller's.
struct Location {
  const char* file = nullptr;
  int line = 0;

  static constexpr Location here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  bool operator==(const Location& other) const {
    return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

// The built-in variables of the thread that runs.
struct Position {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
inline constinit Position position{};

// Runs body(argument) once in every thread; the argument has so many bytes. Throws Error, and whatever a kernel
// throws; launches from several threads of the host take turns.
void run(const Launch& launch, void (*body)(const void*), const void* argument, int64_t bytes);

// --- What follows is called by kernels, through simt.h and device.cuh.

[[noreturn]] void trap();

enum class Vote : uint8_t { kCount, kAll, kAny };
int sync_threads(Vote vote, bool predicate, Location at);

enum class WarpOp : uint8_t {
  kSync,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAll,
  kAny,
  kAdd,
  kMin,
  kMax,
  kMinSigned,
  kMaxSigned,
  kAnd,
  kOr,
  kXor
};
struct WarpOperands {
  uint64_t value = 0;
  int argument = 0;  // lane, distance or lane mask of a shuffle
  int width = 32;    // of a shuffle
};
// Waits for the other lanes of `mask`; returns this lane's result.
uint64_t warp_operation(WarpOp op, uint32_t mask, const WarpOperands& operands, Location at);

// Shared memory of the running block. An object is known by `key`: made on first use, then the same for all.
void* shared_object(const void* key, const char* name, int64_t bytes);
void* dynamic_shared_object();

// cp.async: the bytes land at the wait that covers them. Past `source_bytes` they are zeros.
void copy_async(void* to, const void* from, int bytes, int source_bytes);
void commit_copies();
void wait_copies(int groups_left);

// Announces an atomic operation, at `pc`, that is about to happen.
void before_atomic(const void* p, int bytes, const void* pc);
// Loads and stores of `bytes` by one instruction, which wants them aligned. Read-only: of memory that no kernel in
// flight writes.
void load(void* to, const void* from, int bytes, bool read_only);
void store(void* to, const void* from, int bytes);
void fence();
void wait_for_previous_grid();

}  // namespace santa::simt
