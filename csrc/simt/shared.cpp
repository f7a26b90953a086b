#include "shared.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "grid.h"
#include "symbols.h"

namespace santa::simt {
namespace {

constexpr int64_t kRedzone = 64;
constexpr int64_t kAlignment = 128;
constexpr int64_t kStaticBytes = 256 << 10;  // the limit of 48 KiB, with a redzone for each object
constexpr int64_t kDynamicBytes = 256 << 10;
constexpr int64_t kStaticLimit = 48 << 10;  // nvcc's

// Read by mistake, either looks like NaN or like an index that is out of range. They differ, so that copying
// fresh memory over a redzone shows.
constexpr uint16_t kPoison = 0x7FFF;
constexpr uint16_t kCanary = 0x7FFE;

constexpr auto kCanaries = [] {
  std::array<uint16_t, kAlignment> values{};  // of two bytes: as many as may lie behind an object
  values.fill(kCanary);
  return values;
}();

void fill(void* p, int64_t bytes, uint16_t value) {
  auto* to = static_cast<unsigned char*>(p);
  for (int64_t i = 0; i < bytes; ++i) to[i] = static_cast<unsigned char>(i % 2 == 0 ? value : value >> 8);
}

bool intact(const char* p, int64_t bytes) { return std::memcmp(p, kCanaries.data(), bytes) == 0; }

int64_t round_up(int64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

void check_alignment(const void* p, int bytes, const char* what, const Site& at) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
    fail(text(what, " of ", bytes, " bytes at address ", p, ", which is not a multiple of them, at ", at));
  }
}

// The running thread's access, to the race checker; without it, to global memory alone.
void announce(const void* p, int64_t bytes, races::Access access, const void* pc) {
  if (bytes == 0) return;
  if constexpr (races::kOn) {
    races::note(p, bytes, access, pc);
  } else if (!running.block->shared.contains(p)) {
    check_global(p, bytes, pc);
  }
}

// The copies of groups before `groups` land, in the order of issue.
void land(Thread& thread, int64_t groups) {
  auto waiting = thread.copies.begin();
  for (const Copy& copy : thread.copies) {
    if (copy.group >= groups) {
      *waiting++ = copy;
      continue;
    }
    std::memset(copy.to, 0, copy.bytes);
    if (copy.source_bytes > 0) std::memcpy(copy.to, copy.from, copy.source_bytes);
    announce(copy.from, copy.source_bytes, races::Access::kRead, copy.pc);
    announce(copy.to, copy.bytes, races::Access::kLanding, copy.pc);
  }
  thread.copies.erase(waiting, thread.copies.end());
}

}  // namespace

void poison(void* p, int64_t bytes) { fill(p, bytes, kPoison); }

void check_global(const void* p, int64_t bytes, const void* pc) {
  if (global_memory.empty() || is_parameter(p)) return;
  const auto begin = reinterpret_cast<intptr_t>(p);
  const Memory* nearest = global_memory.data();
  int64_t distance = INT64_MAX;  // from the end of the one, or to the beginning
  for (const Memory& memory : global_memory) {
    const auto first = reinterpret_cast<intptr_t>(memory.begin);
    if (begin >= first && begin + bytes <= first + memory.bytes) return;
    const int64_t away = begin < first ? first - begin : begin + bytes - (first + memory.bytes);
    if (away < distance) {
      distance = away;
      nearest = &memory;
    }
  }
  if (symbols::is_static(p)) return;
  fail(text("access to ", bytes, " bytes outside of global memory, ", distance, " bytes ",
            begin < reinterpret_cast<intptr_t>(nearest->begin) ? "before " : "past the end of ", nearest->name,
            ", at ", Site{{}, pc}));
}

SharedMemory::SharedMemory() {
  constexpr auto kGuard = static_cast<int64_t>(kGuardBytes);
  char* memory = map_memory(kStaticBytes + kDynamicBytes + 2 * kGuard);
  begin_ = memory;
  dynamic_end_ = memory + kGuard + kStaticBytes + kDynamicBytes;
  end_ = dynamic_end_ + kGuard;
  guard(begin_);
  guard(dynamic_end_);
}

std::string SharedMemory::Object::title() const {
  return key == nullptr ? "dynamic shared memory" : symbols::tag_name(name);
}

SharedMemory::~SharedMemory() { unmap_memory(begin_, static_cast<size_t>(end_ - begin_)); }

void SharedMemory::reset(int64_t dynamic_bytes) {
  objects_.clear();
  next_ = begin_ + kGuardBytes;
  // Against the guard, so that an access far past the end is a fault.
  const int64_t padded = round_up(dynamic_bytes) + kAlignment;
  add(nullptr, "", dynamic_end_ - padded, dynamic_bytes, padded - dynamic_bytes);
}

void SharedMemory::add(const void* key, const char* name, char* begin, int64_t bytes, int64_t behind) {
  fill(begin - kRedzone, kRedzone, kCanary);
  fill(begin + bytes, behind, kCanary);
  poison(begin, bytes);
  objects_.push_back({key, name, begin, bytes, behind});
}

const SharedMemory::Object& SharedMemory::object(const void* key, const char* name, int64_t bytes) {
  for (const Object& object : objects_) {
    if (object.key == key) return object;
  }
  const int64_t fixed = this->bytes() - objects_[0].bytes + bytes;
  if (fixed > kStaticLimit) fail(text(fixed, " bytes of static shared memory; the limit is ", kStaticLimit));
  if (fixed + objects_[0].bytes > options.shared_limit) {
    fail(text(fixed + objects_[0].bytes, " bytes of shared memory; the limit is ", options.shared_limit));
  }
  char* begin = next_ + kAlignment;
  next_ = begin + round_up(bytes);
  add(key, name, begin, bytes, next_ - begin - bytes + kRedzone);
  return objects_.back();
}

const SharedMemory::Object* SharedMemory::find(const void* p) const {
  for (const Object& object : objects_) {
    if (p >= object.begin && p < object.begin + object.bytes) return &object;
  }
  return nullptr;
}

const SharedMemory::Object* SharedMemory::damaged() const {
  for (const Object& object : objects_) {
    if (!intact(object.begin - kRedzone, kRedzone)) return &object;
    if (!intact(object.begin + object.bytes, object.behind)) return &object;
  }
  return nullptr;
}

int64_t SharedMemory::bytes() const {
  int64_t sum = 0;
  for (const Object& object : objects_) sum += object.bytes;
  return sum;
}

void* shared_object(const void* key, const char* name, int64_t bytes) {
  const InEngine inside;
  return running.block->shared.object(key, name, bytes).begin;
}

void* dynamic_shared_object() {
  const InEngine inside;
  return running.block->shared.object(nullptr, "", 0).begin;
}

void copy_async(void* to, const void* from, int bytes, int source_bytes) {
  const InEngine inside;
  const Site at = {{}, __builtin_return_address(0)};
  check_alignment(to, bytes, "cp.async to shared memory", at);
  check_alignment(from, bytes, "cp.async from global memory", at);
  if (source_bytes < 0 || source_bytes > bytes) {
    fail(text("cp.async of ", bytes, " bytes reads ", source_bytes, ", at ", at));
  }
  const SharedMemory& shared = running.block->shared;
  const SharedMemory::Object* object = shared.find(to);
  if (object == nullptr || static_cast<char*>(to) + bytes > object->begin + object->bytes) {
    fail(text("cp.async to ", to, ", which is outside every shared object, at ", at));
  }
  if (shared.contains(from)) fail(text("cp.async from shared memory, at ", at));
  Thread& thread = *running.thread;
  for (const Copy& other : thread.copies) {
    if (to < static_cast<char*>(other.to) + other.bytes && other.to < static_cast<char*>(to) + bytes) {
      fail(text("cp.async to bytes that another one in flight will write, at ", at, "; the other is at ",
                Site{{}, other.pc}));
    }
  }
  announce(from, source_bytes, races::Access::kRead, at.pc);
  announce(to, bytes, races::Access::kCopy, at.pc);
  // What is read before the wait is poison; what is written before it is lost.
  poison(to, bytes);
  thread.copies.push_back({to, from, bytes, source_bytes, thread.groups, at.pc});
}

void commit_copies() { ++running.thread->groups; }

void wait_copies(int groups_left) {
  const InEngine inside;
  land(*running.thread, running.thread->groups - groups_left);
}

void load(void* to, const void* from, int bytes, bool read_only) {
  const InEngine inside;
  const void* pc = __builtin_return_address(0);
  check_alignment(from, bytes, "a load", {{}, pc});
  if (read_only && running.block->shared.contains(from)) {
    fail(text("a load from shared memory as if it were global, at ", Site{{}, pc}));
  }
  announce(from, bytes, read_only ? races::Access::kReadOnly : races::Access::kRead, pc);
  std::memcpy(to, from, bytes);
}

void store(void* to, const void* from, int bytes) {
  const InEngine inside;
  const void* pc = __builtin_return_address(0);
  check_alignment(to, bytes, "a store", {{}, pc});
  announce(to, bytes, races::Access::kWrite, pc);
  std::memcpy(to, from, bytes);
}

void before_atomic(const void* p, int bytes, const void* pc) {
  const InEngine inside;
  check_alignment(p, bytes, "an atomic operation", {{}, pc});
  yield_if_shuffled();
  announce(p, bytes, races::Access::kAtomic, pc);
}

}  // namespace santa::simt
