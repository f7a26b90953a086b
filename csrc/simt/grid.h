#pragma once

#include <array>
#include <cstdint>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "context.h"
#include "engine.h"
#include "races.h"
#include "shared.h"

// The state of a launch, shared by the parts of the engine: engine.cpp schedules, warp.cpp computes what lanes
// give each other, shared.cpp holds shared memory and copies into it, races.cpp checks accesses.
namespace santa::simt {

constexpr int kWarpLanes = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;

enum class State : uint8_t { kReady, kWaiting, kEnded };

// A place in a kernel. Places are the same by source line; for people, the instruction tells more, since helpers
// are inlined into who calls them.
struct Site {
  Location at;
  const void* pc = nullptr;

  bool operator==(const Site& other) const { return at == other.at; }
};
std::ostream& operator<<(std::ostream& out, const Site& site);

// One cp.async that has not landed.
struct Copy {
  void* to;
  const void* from;
  int bytes, source_bytes;
  int64_t group;   // counted from 0 in each thread
  const void* pc;  // where it was issued
};

struct Thread {
  Context context;
  int index = 0;  // in the block, x fastest
  int rank = 0;
  uint3 position{};
  State state = State::kEnded;
  const char* operation = "";  // the one it waits in
  Site at{};
  WarpOperands operands{};
  uint64_t result = 0;
  std::vector<Copy> copies;
  int64_t groups = 0;  // committed
  bool previous_grid_ended = false;
  races::ThreadClock clock;

  int lane() const { return index % kWarpLanes; }
};

// A warp operation that some lanes of its mask have reached.
struct Collective {
  WarpOp op;
  uint32_t mask, arrived;
  Site at;
};

struct Warp {
  uint32_t alive = 0;
  std::vector<Collective> open;
};

struct Barrier {
  int arrived = 0;
  int first = 0;  // thread that came first
  int votes = 0;
  Vote vote = Vote::kCount;
  Site at{};
};

// A block that runs, and what stays allocated for the next one in its place.
struct Block {
  uint3 index{};
  uint32_t number = 0;  // counted from 1 in the order of starting
  int size = 0, alive = 0, ready_threads = 0;
  // Threads by their rank, in which order they get their turns where they can; and a bit for each rank that can.
  std::array<uint64_t, kMaxThreads / 64> ready{};
  std::vector<Thread*> ranking;
  std::array<Warp, kMaxThreads / kWarpLanes> warps;
  std::vector<Thread> threads{kMaxThreads};
  Barrier barrier;
  bool previous_grid_ended = false;  // some thread has waited for it
  SharedMemory shared;
  Stacks stacks{kMaxThreads, kStackBytes};
  races::BlockClock clock;

  Warp& warp_of(const Thread& thread) { return warps[thread.index / kWarpLanes]; }
  void set_ready(Thread& thread) {
    thread.state = State::kReady;
    ready[thread.rank / 64] |= uint64_t{1} << thread.rank % 64;
    ++ready_threads;
  }
  // The first rank from `rank` on, around the end, whose thread can go on.
  int next_ready(int rank) const {
    int word = rank / 64;
    uint64_t bits = ready[word] & ~uint64_t{0} << rank % 64;
    while (bits == 0) {
      word = (word + 1) % ((size + 63) / 64);
      bits = ready[word];
    }
    return word * 64 + __builtin_ctzll(bits);
  }
};

// Block and thread that run; null outside kernels.
struct Running {
  Block* block = nullptr;
  Thread* thread = nullptr;
  // The thread is in a function of the engine rather than in its kernel. Functions that both instantiate may be
  // the kernel's copies, whose accesses the race checker would otherwise take for the kernel's.
  bool in_engine = true;
};
inline Running running;

// In every function that kernels call. Threads are left and resumed only in there.
struct InEngine {
  InEngine() { running.in_engine = true; }
  ~InEngine() { running.in_engine = false; }
  InEngine(const InEngine&) = delete;
  InEngine& operator=(const InEngine&) = delete;
};
inline thread_local bool launching = false;  // this thread of the host

// Ends the launch: run() throws Error with this text behind the names of kernel, block and thread. What the
// running thread has on its stack is left there.
[[noreturn]] void fail(const std::string& what);

// Whether memory holds the parameters of the running kernel.
bool is_parameter(const void* p);

// Leaves the running thread until set_ready() is called for it.
void wait(const char* operation, const Site& at);

// Lets others go first, where the order is a shuffle.
void yield_if_shuffled();

// Completes the warp operations that wait for nobody else, after a lane has arrived or ended.
void complete_collectives(Block& block, int warp);

template <class... T>
std::string text(const T&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace santa::simt
