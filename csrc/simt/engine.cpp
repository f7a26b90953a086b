#include "engine.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>

#include "../cpu/denormals.h"
#include "faults.h"
#include "grid.h"
#include "symbols.h"

namespace santa::simt {
namespace {

constexpr int64_t kSharedLimit = 227 << 10;  // of the largest device
constexpr uint32_t kMaxGridX = (uint32_t{1} << 31) - 1;
constexpr uint32_t kMaxGridYZ = 65535;
constexpr uint32_t kMaxBlockZ = 64;

// The launch that runs.
struct Grid {
  Launch launch;
  void (*body)(const void*);
  const void* argument;
  int64_t argument_bytes;
  uint64_t random;
  uint64_t blocks, started = 0;
  uint64_t stride = 1, shift = 0;  // of the order of blocks
  Context scheduler = {};
  std::exception_ptr failure = {};

  // xorshift64 (Marsaglia 2003): any order will do, as long as the seed repeats it.
  uint64_t next_random() {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random;
  }
};

std::mutex one_launch;
Grid* grid = nullptr;
std::vector<std::unique_ptr<Block>> slots;  // kept between launches for their stacks

std::string describe(const uint3& index) { return text("(", index.x, ", ", index.y, ", ", index.z, ")"); }

std::string where() {
  std::string place = text("kernel '", grid->launch.name, "'");
  if (running.block != nullptr) place += ", block " + describe(running.block->index);
  if (running.thread != nullptr) place += ", thread " + describe(running.thread->position);
  return place + ": ";
}

void leave(Thread& thread) { switch_context(&thread.context, &grid->scheduler); }

void end_thread(Block& block, Thread& thread) {
  if (!thread.copies.empty())
    fail(text("ends with ", thread.copies.size(), " cp.async that it has not waited for"));
  if (block.barrier.arrived > 0) {
    fail(text("ends while thread ", block.barrier.first, " waits in __syncthreads at ", block.barrier.at));
  }
  thread.state = State::kEnded;
  --block.alive;
  block.warp_of(thread).alive &= ~(1u << thread.lane());
  complete_collectives(block, thread.index / kWarpLanes);
}

void thread_main() {
  running.in_engine = false;
  try {
    grid->body(grid->argument);
  } catch (...) {
    grid->failure = std::current_exception();
  }
  running.in_engine = true;
  Thread& thread = *running.thread;
  if (!grid->failure) end_thread(*running.block, thread);
  leave(thread);
  std::abort();  // nobody goes on with a thread that has ended
}

// The number of the block that starts next: every block once, in the order asked for. The shuffle is a
// multiplication by a number without common factors, since a grid may have too many blocks for a list.
uint64_t next_block() {
  const uint64_t i = grid->started++;
  if (options.order == Order::kForward) return i;
  if (options.order == Order::kReverse) return grid->blocks - 1 - i;
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(i) * grid->stride + grid->shift) % grid->blocks);
}

void rank_threads(Block& block) {
  block.ranking.resize(block.size);
  for (int i = 0; i < block.size; ++i) block.ranking[i] = &block.threads[i];
  if (options.order == Order::kReverse) std::reverse(block.ranking.begin(), block.ranking.end());
  if (options.order == Order::kStarving) {
    for (int i = block.size; i > 1; --i) std::swap(block.ranking[i - 1], block.ranking[grid->next_random() % i]);
  }
  for (int i = 0; i < block.size; ++i) block.ranking[i]->rank = i;
}

void start_block(Block& block) {
  const uint64_t number = next_block();
  const Launch& launch = grid->launch;
  block.index = {static_cast<uint32_t>(number % launch.grid.x),
                 static_cast<uint32_t>(number / launch.grid.x % launch.grid.y),
                 static_cast<uint32_t>(number / launch.grid.x / launch.grid.y)};
  block.size = block.alive = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  block.ready.fill(0);
  block.ready_threads = 0;
  block.warps.fill({});
  block.barrier = {};
  block.previous_grid_ended = false;
  block.shared.reset(launch.shared_bytes);
  rank_threads(block);
  for (int i = 0; i < block.size; ++i) {
    Thread& thread = block.threads[i];
    const auto x = static_cast<uint32_t>(i);
    thread.index = i;
    thread.position = {x % launch.block.x, x / launch.block.x % launch.block.y,
                       x / launch.block.x / launch.block.y};
    thread.copies.clear();
    thread.groups = 0;
    thread.previous_grid_ended = false;
    block.set_ready(thread);
    block.warp_of(thread).alive |= 1u << thread.lane();
    // Tops of stacks at one offset in their pages would share a few sets of the caches.
    make_context(&thread.context, block.stacks[i], kStackBytes - (x % 64) * size_t{192}, thread_main);
  }
  if constexpr (races::kOn) races::begin_block(block);
}

// Whose turn it is in a block.
Thread& pick_thread(Block& block) {
  const bool shuffled = options.order == Order::kShuffled;
  return *block.ranking[block.next_ready(shuffled ? static_cast<int>(grid->next_random() % block.size) : 0)];
}

// Which of the blocks goes on.
size_t pick_block(const std::vector<Block*>& live) {
  if (live.size() == 1 || options.order == Order::kForward) return 0;
  if (options.order == Order::kReverse) return live.size() - 1;
  if (options.order == Order::kShuffled) return grid->next_random() % live.size();
  const auto before = [](const Block* a, const Block* b) { return a->next_ready(0) < b->next_ready(0); };
  return std::min_element(live.begin(), live.end(), before) - live.begin();
}

// Which threads wait where, of a block in which none can go on.
std::string describe_threads(const Block& block) {
  std::string list;
  for (int begin = 0, end = 0; begin < block.size; begin = end) {
    const Thread& first = block.threads[begin];
    const auto alike = [&](const Thread& other) {
      if (other.state == State::kEnded || first.state == State::kEnded) return other.state == first.state;
      return other.operation == first.operation && other.at == first.at;
    };
    while (end < block.size && alike(block.threads[end])) ++end;
    list += text(begin == 0 ? "" : "; ", begin, "-", end - 1, " ");
    list += first.state == State::kEnded ? "have ended" : text("in ", first.operation, " at ", first.at);
  }
  return list;
}

void resume(Block& block, Thread& thread) {
  block.ready[thread.rank / 64] &= ~(uint64_t{1} << thread.rank % 64);
  --block.ready_threads;
  running = {.block = &block, .thread = &thread};
  position = {thread.position, block.index, grid->launch.block, grid->launch.grid};
  switch_context(&grid->scheduler, &thread.context);
  if (grid->failure) std::rethrow_exception(grid->failure);
  if (const SharedMemory::Object* object = block.shared.damaged()) {
    throw Error(
        text(where(), "wrote outside of ", object->title(), ", ", object->bytes, " bytes of shared memory"));
  }
  running.thread = nullptr;
  if (block.ready_threads == 0 && block.alive > 0) {
    throw Error(text(where(), "no thread can go on: ", describe_threads(block)));
  }
  if (block.alive == 0 && grid->launch.overlap && !block.previous_grid_ended) {
    throw Error(text(where(), "ends without having waited for the previous grid, which it may overlap"));
  }
  running = {};
}

void run_blocks() {
  const auto resident = std::min<uint64_t>(std::max(options.resident_blocks, 1), grid->blocks);
  while (slots.size() < resident) slots.push_back(std::make_unique<Block>());
  std::vector<Block*> live;
  for (uint64_t i = 0; i < resident; ++i) {
    start_block(*slots[i]);
    live.push_back(slots[i].get());
  }
  while (!live.empty()) {
    const size_t i = pick_block(live);
    resume(*live[i], pick_thread(*live[i]));
    if (live[i]->alive > 0) continue;
    if (grid->started < grid->blocks) {
      start_block(*live[i]);
    } else {
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

void check_launch(const Launch& launch) {
  const auto refuse = [&](const std::string& what) { throw Error(text("kernel '", launch.name, "': ", what)); };
  const auto check = [&](const char* what, uint32_t size, uint32_t limit) {
    if (size < 1 || size > limit) refuse(text(what, " is ", size, "; it must be from 1 to ", limit));
  };
  check("grid x", launch.grid.x, kMaxGridX);
  check("grid y", launch.grid.y, kMaxGridYZ);
  check("grid z", launch.grid.z, kMaxGridYZ);
  check("block x", launch.block.x, kMaxThreads);
  check("block y", launch.block.y, kMaxThreads);
  check("block z", launch.block.z, kMaxBlockZ);
  const uint64_t threads = uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  if (threads > kMaxThreads) refuse(text(threads, " threads in a block; the limit is ", kMaxThreads));
  const int64_t limit = std::min(options.shared_limit, kSharedLimit);
  if (launch.shared_bytes < 0 || launch.shared_bytes > limit) {
    refuse(text(launch.shared_bytes, " bytes of dynamic shared memory; the limit is ", limit));
  }
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Site& site) {
  const std::string line = symbols::source_line(site.pc);
  if (!line.empty()) return out << line;
  if (site.at.file == nullptr) return out << "address " << site.pc;
  const char* slash = std::strrchr(site.at.file, '/');
  return out << (slash == nullptr ? site.at.file : slash + 1) << ":" << site.at.line;
}

void fail(const std::string& what) {
  const Error error(where() + what);
  if (running.thread == nullptr) throw error;
  // Through the scheduler rather than by throwing here: the checker's calls come from code that the compiler
  // believes cannot throw.
  grid->failure = std::make_exception_ptr(error);
  leave(*running.thread);
  std::abort();
}

bool is_parameter(const void* p) {
  const char* begin = static_cast<const char*>(grid->argument);
  return p >= begin && p < begin + grid->argument_bytes;
}

void wait(const char* operation, const Site& at) {
  Thread& thread = *running.thread;
  thread.operation = operation;
  thread.at = at;
  leave(thread);
}

void yield_if_shuffled() {
  if (options.order != Order::kShuffled) return;
  Thread& thread = *running.thread;
  running.block->set_ready(thread);
  leave(thread);
}

void trap() {
  const InEngine inside;
  fail(text("__trap at ", Site{{}, __builtin_return_address(0)}));
}

int sync_threads(Vote vote, bool predicate, Location location) {
  const InEngine inside;
  const Site at = {location, __builtin_return_address(0)};
  Block& block = *running.block;
  Thread& thread = *running.thread;
  Barrier& barrier = block.barrier;
  if (block.alive < block.size) {
    fail(text("waits in __syncthreads at ", at, ", which threads that have ended will not reach"));
  }
  if (barrier.arrived == 0) {
    barrier = {.first = thread.index, .vote = vote, .at = at};
  } else if (barrier.at != at || barrier.vote != vote) {
    fail(
        text("waits in __syncthreads at ", at, " while thread ", barrier.first, " waits in that at ", barrier.at));
  }
  ++barrier.arrived;
  barrier.votes += predicate ? 1 : 0;
  thread.state = State::kWaiting;
  if (barrier.arrived == block.size) {
    const int all = barrier.votes == block.size ? 1 : 0;
    const int result = vote == Vote::kCount ? barrier.votes
                       : vote == Vote::kAll ? all
                                            : std::min(barrier.votes, 1);
    barrier = {};
    if constexpr (races::kOn) races::pass_barrier(block);
    // The thread that comes last goes on no sooner than the others: its luck would hide a missing barrier.
    for (int i = 0; i < block.size; ++i) {
      block.threads[i].result = result;
      block.set_ready(block.threads[i]);
    }
  }
  wait("__syncthreads", at);
  return static_cast<int>(thread.result);
}

void fence() {
  const InEngine inside;
  if constexpr (races::kOn) races::pass_fence(*running.thread);
}

void wait_for_previous_grid() { running.thread->previous_grid_ended = running.block->previous_grid_ended = true; }

void run(const Launch& launch, void (*body)(const void*), const void* argument, int64_t bytes) {
  if (launching) {
    const InEngine inside;
    fail("launches a kernel");
  }
  const std::lock_guard<std::mutex> turn(one_launch);
  check_launch(launch);
  launched.emplace_back(launch.name);
  Grid state = {.launch = launch,
                .body = body,
                .argument = argument,
                .argument_bytes = bytes,
                .random = options.seed * 0x9E3779B97F4A7C15u | 1,
                .blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z};
  if (options.order == Order::kShuffled || options.order == Order::kStarving) {
    state.shift = state.next_random() % state.blocks;
    do state.stride = state.next_random() % state.blocks;
    while (std::gcd(state.stride, state.blocks) != 1);
  }
  grid = &state;
  launching = true;
  if constexpr (races::kOn) races::begin_launch(launch.overlap);
  struct End {
    ~End() {
      running = {};
      grid = nullptr;
      launching = false;
    }
  } const end;
  const cpu::KeepDenormals keep;  // the host's mode is none of a kernel's
  const FaultHandler handler;
  if (sigsetjmp(fault_exit, 1) != 0) throw Error(where() + describe_fault());
  run_blocks();
}

}  // namespace santa::simt
