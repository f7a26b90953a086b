#include <algorithm>

#include "grid.h"

namespace santa::simt {
namespace {

constexpr const char* kNames[] = {
    "__syncwarp",        "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",
    "__shfl_xor_sync",   "__ballot_sync",     "__all_sync",        "__any_sync",
    "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync",
    "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync"};

const char* name(WarpOp op) { return kNames[static_cast<int>(op)]; }

bool is_shuffle(WarpOp op) { return op >= WarpOp::kShuffle && op <= WarpOp::kShuffleXor; }

// The lane that a lane of a shuffle reads. `width` cuts the warp into segments. What leaves the segment reads
// itself, except that an exclusive or may go to an earlier segment.
int source_lane(WarpOp op, int lane, const WarpOperands& operands) {
  const int first = lane & ~(operands.width - 1);
  const int last = first + operands.width - 1;
  switch (op) {
    case WarpOp::kShuffle:
      return first | (operands.argument & (operands.width - 1));
    case WarpOp::kShuffleUp:
      return lane - operands.argument < first ? lane : lane - operands.argument;
    case WarpOp::kShuffleDown:
      return lane + operands.argument > last ? lane : lane + operands.argument;
    default:
      return (lane ^ operands.argument) > last ? lane : lane ^ operands.argument;
  }
}

// What votes and reductions return to every lane.
uint32_t combine(WarpOp op, const Thread* lanes, uint32_t mask) {
  const auto fold = [&](uint32_t start, auto f) {
    uint32_t result = start;
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      if ((mask >> lane & 1u) != 0) result = f(result, static_cast<uint32_t>(lanes[lane].operands.value));
    }
    return result;
  };
  uint32_t ballot = 0;
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    const bool vote = (mask >> lane & 1u) != 0 && static_cast<uint32_t>(lanes[lane].operands.value) != 0;
    ballot |= static_cast<uint32_t>(vote) << lane;
  }
  const auto least = [](auto a, auto b) { return static_cast<uint32_t>(std::min(a, b)); };
  const auto greatest = [](auto a, auto b) { return static_cast<uint32_t>(std::max(a, b)); };
  const auto integer = [](uint32_t x) { return static_cast<int32_t>(x); };
  switch (op) {
    case WarpOp::kBallot:
      return ballot;
    case WarpOp::kAll:
      return ballot == mask ? 1 : 0;
    case WarpOp::kAny:
      return ballot != 0 ? 1 : 0;
    case WarpOp::kAdd:
      return fold(0, [](uint32_t a, uint32_t b) { return a + b; });
    case WarpOp::kMin:
      return fold(UINT32_MAX, least);
    case WarpOp::kMax:
      return fold(0, greatest);
    case WarpOp::kMinSigned:
      return fold(INT32_MAX, [&](uint32_t a, uint32_t b) { return least(integer(a), integer(b)); });
    case WarpOp::kMaxSigned:
      return fold(1u << 31, [&](uint32_t a, uint32_t b) { return greatest(integer(a), integer(b)); });
    case WarpOp::kAnd:
      return fold(UINT32_MAX, [](uint32_t a, uint32_t b) { return a & b; });
    case WarpOp::kOr:
      return fold(0, [](uint32_t a, uint32_t b) { return a | b; });
    case WarpOp::kXor:
      return fold(0, [](uint32_t a, uint32_t b) { return a ^ b; });
    default:
      return 0;
  }
}

void complete(Block& block, int warp, const Collective& collective) {
  Thread* lanes = block.threads.data() + static_cast<std::ptrdiff_t>(warp) * kWarpLanes;
  const uint32_t mask = collective.arrived;  // of those named, lanes that have ended do not take part
  const bool shuffle = is_shuffle(collective.op);
  const uint32_t combined = shuffle || collective.op == WarpOp::kSync ? 0 : combine(collective.op, lanes, mask);
  for (int lane = 0; lane < kWarpLanes; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    lanes[lane].result = combined;
    if (shuffle) {
      const int source = source_lane(collective.op, lane, lanes[lane].operands);
      if ((mask >> source & 1u) == 0) {
        fail(text(name(collective.op), " reads lane ", source, " in lane ", lane, " of warp ", warp,
                  ", and that lane takes no part, at ", collective.at));
      }
      lanes[lane].result = lanes[source].operands.value;
    }
    block.set_ready(lanes[lane]);
  }
  if constexpr (races::kOn) {
    if (collective.op == WarpOp::kSync) races::pass_warp_barrier(block, warp, mask);
  }
}

}  // namespace

void complete_collectives(Block& block, int warp) {
  std::vector<Collective>& open = block.warps[warp].open;
  for (size_t i = 0; i < open.size();) {
    if ((open[i].mask & block.warps[warp].alive & ~open[i].arrived) != 0) {
      ++i;
      continue;
    }
    const Collective done = open[i];
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
    complete(block, warp, done);
  }
}

uint64_t warp_operation(WarpOp op, uint32_t mask, const WarpOperands& operands, Location location) {
  const InEngine inside;
  const Site at = {location, __builtin_return_address(0)};
  Block& block = *running.block;
  Thread& thread = *running.thread;
  Warp& warp = block.warp_of(thread);
  const uint32_t own = 1u << thread.lane();
  if ((mask & own) == 0) fail(text(name(op), " with a mask that leaves out the calling lane, at ", at));
  const int width = operands.width;
  if (width < 1 || width > kWarpLanes || (width & (width - 1)) != 0) {
    fail(text(name(op), " of width ", width, ", at ", at));
  }
  // A barrier joins lanes from different places. Everything else does so on hardware by luck.
  const auto matches = [&](const Collective& other) {
    return other.op == op && other.mask == mask && (op == WarpOp::kSync || other.at == at);
  };
  auto found = std::find_if(warp.open.begin(), warp.open.end(), matches);
  if (found == warp.open.end()) {
    for (const Collective& other : warp.open) {
      // Each waits for the other for ever.
      if ((other.mask & own) != 0 && (other.arrived & mask) != 0) {
        fail(text(name(op), " at ", at, " while lanes of the same mask wait in ", name(other.op), " at ",
                  other.at));
      }
    }
    found = warp.open.insert(warp.open.end(), {op, mask, 0, at});
  }
  found->arrived |= own;
  thread.operands = operands;
  thread.state = State::kWaiting;
  complete_collectives(block, thread.index / kWarpLanes);
  wait(name(op), at);
  return thread.result;
}

}  // namespace santa::simt
