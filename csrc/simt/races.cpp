#include "races.h"

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "grid.h"

namespace santa::simt::races {
namespace {

// One access as it is remembered.
struct Record {
  const void* pc = nullptr;
  uint32_t block = 0;  // 0: none
  uint32_t epoch = 0;
  uint32_t time = 0;
  uint16_t thread = 0;
  Access access = Access::kRead;
  bool in_flight = false;  // a cp.async that has not landed

  bool is_set() const { return block != 0; }
};

// What is known of four bytes: the last write and, since then, readers that are not ordered among themselves: two
// threads of one warp and one of another, so that a writer always meets one that it is not ordered after. Four
// bytes become one cell each when an access touches some of them alone.
struct Cell {
  Record write;
  std::array<Record, 3> reads;
  std::unique_ptr<std::array<Cell, 4>> bytes;
};

constexpr uintptr_t kPageBytes = 1024;
using Page = std::array<Cell, kPageBytes / 4>;

// The releases at the place of an atomic, in order; and what those who released were ordered after.
struct Place {
  struct Release {
    uint32_t thread;
    Point before;
    size_t number;  // of the release, from 0
  };
  std::unordered_map<uint32_t, std::vector<Release>> by_block;
  size_t releases = 0;
  Acquired acquired;
};

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
std::unordered_map<const void*, Place> places;
uint32_t blocks = 0;         // started since memory was forgotten
uint32_t first_block = 0;    // of this launch
std::vector<uint3> indices;  // of its blocks

void join(const Acquired& from, Acquired* to) {
  for (const auto& [place, releases] : from) {
    size_t& known = (*to)[place];
    known = std::max(known, releases);
  }
}

void join(const Point& from, Point* to) {
  to->epoch = std::max(to->epoch, from.epoch);
  for (size_t i = 0; i < from.lanes.size(); ++i) to->lanes[i] = std::max(to->lanes[i], from.lanes[i]);
}

bool same_warp(const Record& a, const Record& b) {
  return a.block == b.block && a.thread / kWarpLanes == b.thread / kWarpLanes;
}

bool covers(const Point& point, uint32_t thread, const Record& record) {
  if (record.epoch < point.epoch) return true;
  return record.thread / kWarpLanes == thread / kWarpLanes &&
         record.time <= point.lanes[record.thread % kWarpLanes];
}

// Whether everything of the running thread from now on comes after this access.
bool is_before(const Record& record, const Record& now) {
  if (!record.is_set()) return true;
  if (record.block <= first_block) return running.thread->previous_grid_ended;
  const ThreadClock& clock = running.thread->clock;
  if (record.block == now.block && (record.thread == now.thread || covers(clock.point, now.thread, record))) {
    return true;
  }
  for (const auto& [place, releases] : clock.acquired) {
    const auto found = places[place].by_block.find(record.block);
    if (found == places[place].by_block.end()) continue;
    for (const auto& release : found->second) {
      if (release.number < releases && covers(release.before, release.thread, record)) return true;
    }
  }
  return false;
}

const char* name(Access access) {
  static constexpr const char* kNames[] = {"a read", "a read", "a write", "an atomic", "a cp.async", "a cp.async"};
  return kNames[static_cast<int>(access)];
}

std::string describe(const Record& record) {
  const Site where = {{}, record.pc};
  std::string block;
  if (record.block <= first_block) {
    block = " of the previous grid";
  } else if (record.block != running.block->number) {
    const uint3& index = indices[record.block - first_block - 1];
    block = text(" of block (", index.x, ", ", index.y, ", ", index.z, ")");
  }
  return text(name(record.access), " by thread ", record.thread, block, " at ", where);
}

std::string describe_memory(const char* p) {
  const SharedMemory::Object* object = running.block->shared.find(p);
  if (object == nullptr) return text("global memory at ", static_cast<const void*>(p));
  return text("byte ", p - object->begin, " of ", object->title());
}

[[noreturn]] void report_race(const char* p, const Record& before, const Record& now) {
  fail(text("race on ", describe_memory(p), ": ", describe(before), ", then ", describe(now),
            ", and nothing orders them"));
}

void keep_read(Cell& cell, const Record& now) {
  auto& [first, same, other] = cell.reads;
  if (is_before(first, now)) {
    first = now;
    if (is_before(same, now)) same = {};
    if (is_before(other, now)) other = {};
  } else {
    (same_warp(first, now) ? same : other) = now;
  }
}

void check(Cell& cell, const char* p, bool shared, Access access, const Record& now) {
  if (shared) {
    if (cell.write.in_flight && access != Access::kLanding) {
      fail(text(describe_memory(p), ": ", describe(now), " before the wait for ", describe(cell.write)));
    }
    if (!cell.write.is_set() && (access == Access::kRead || access == Access::kAtomic)) {
      fail(text(describe_memory(p), ", which nobody has written: ", describe(now)));
    }
  }
  const bool both_atomic = access == Access::kAtomic && cell.write.access == Access::kAtomic;
  if (!both_atomic && !is_before(cell.write, now)) report_race(p, cell.write, now);
  if (access == Access::kReadOnly && cell.write.is_set()) {
    fail(text(describe_memory(p), ": ", describe(now),
              " through the path for what no kernel in flight writes, after ", describe(cell.write)));
  }
  if (access == Access::kRead || access == Access::kReadOnly) {
    keep_read(cell, now);
    return;
  }
  for (const Record& read : cell.reads) {
    if (!is_before(read, now)) report_race(p, read, now);
  }
  cell.reads = {};
  cell.write = now;
  cell.write.in_flight = access == Access::kCopy;
}

Cell& cell_of(uintptr_t address) {
  std::unique_ptr<Page>& page = pages[address / kPageBytes];
  if (page == nullptr) page = std::make_unique<Page>();
  return (*page)[address % kPageBytes / 4];
}

void split(Cell& cell) {
  auto bytes = std::make_unique<std::array<Cell, 4>>();
  for (Cell& byte : *bytes) {
    byte.write = cell.write;
    byte.reads = cell.reads;
  }
  cell.bytes = std::move(bytes);
}

// An atomic is an acquire for a later fence, and with a fence before it a release.
void note_place(const void* p, const Record& now) {
  Place& place = places[p];
  ThreadClock& clock = running.thread->clock;
  join(place.acquired, &clock.seen);
  if (!clock.has_fence) return;
  place.by_block[now.block].push_back({now.thread, clock.fenced, place.releases});
  ++place.releases;
  join(clock.acquired, &place.acquired);
  place.acquired[p] = place.releases;
}

}  // namespace

void begin_launch(bool overlap) {
  places.clear();
  if (!overlap) {
    pages.clear();
    blocks = 0;
  }
  first_block = blocks;
  indices.clear();
}

void begin_block(Block& block) {
  block.number = ++blocks;
  indices.push_back(block.index);
  block.clock = {};
  for (int i = 0; i < block.size; ++i) {
    block.threads[i].clock = {};
    block.threads[i].clock.point.lanes[i % kWarpLanes] = 1;
  }
  const auto [begin, end] = block.shared.extent();
  for (uintptr_t at = begin / kPageBytes; at * kPageBytes < end; ++at) pages.erase(at);
}

void pass_barrier(Block& block) {
  Acquired acquired;
  bool previous = false;
  for (int i = 0; i < block.size; ++i) {
    join(block.threads[i].clock.acquired, &acquired);
    previous = previous || block.threads[i].previous_grid_ended;
  }
  ++block.clock.epoch;
  for (int i = 0; i < block.size; ++i) {
    block.threads[i].clock.acquired = acquired;
    block.threads[i].clock.point.epoch = block.clock.epoch;
    block.threads[i].previous_grid_ended = previous;
  }
}

void pass_warp_barrier(Block& block, int warp, uint32_t lanes) {
  ThreadClock all;
  bool previous = false;
  const auto each = [&](const auto& f) {
    for (int lane = 0; lane < kWarpLanes; ++lane) {
      if ((lanes >> lane & 1u) != 0) f(block.threads[warp * kWarpLanes + lane]);
    }
  };
  each([&](Thread& thread) {
    join(thread.clock.acquired, &all.acquired);
    join(thread.clock.point, &all.point);
    previous = previous || thread.previous_grid_ended;
  });
  each([&](Thread& thread) {
    thread.clock.acquired = all.acquired;
    thread.clock.point = all.point;
    ++thread.clock.point.lanes[thread.lane()];
    thread.previous_grid_ended = previous;
  });
}

void pass_fence(Thread& thread) {
  ThreadClock& clock = thread.clock;
  join(clock.seen, &clock.acquired);
  clock.fenced = clock.point;
  clock.has_fence = true;
  ++clock.point.lanes[thread.lane()];
}

void note(const void* p, int64_t bytes, Access access, const void* pc) {
  if (bytes == 0) return;
  Block& block = *running.block;
  const Thread& thread = *running.thread;
  if (p >= &position && p < &position + 1) return;
  if (block.stacks.contains(p)) {
    const auto owner = static_cast<int>(block.stacks.owner(p));
    if (owner != thread.index) fail(text(name(access), " of the local memory of thread ", owner));
    return;
  }
  const auto* begin = static_cast<const char*>(p);
  const bool shared = block.shared.contains(p);
  if (!shared) check_global(p, bytes, pc);
  const Record now = {.pc = pc,
                      .block = block.number,
                      .epoch = block.clock.epoch,
                      .time = thread.clock.point.lanes[thread.lane()],
                      .thread = static_cast<uint16_t>(thread.index),
                      .access = access};
  if (shared && (block.shared.find(begin) == nullptr || block.shared.find(begin + bytes - 1) == nullptr)) {
    fail(text(describe(now), " of ", bytes, " bytes outside every shared object"));
  }
  for (const char* at = begin; at < begin + bytes;) {
    const auto address = reinterpret_cast<uintptr_t>(at);
    const auto count = std::min<int64_t>(4 - static_cast<int64_t>(address % 4), begin + bytes - at);
    Cell& cell = cell_of(address);
    if (count == 4 && cell.bytes == nullptr) {
      check(cell, at, shared, access, now);
    } else {
      if (cell.bytes == nullptr) split(cell);
      for (int64_t i = 0; i < count; ++i) check((*cell.bytes)[address % 4 + i], at + i, shared, access, now);
    }
    at += count;
  }
  if (access == Access::kAtomic) note_place(p, now);
}

}  // namespace santa::simt::races
