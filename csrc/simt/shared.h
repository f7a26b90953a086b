#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace santa::simt {

// Fills memory with NaN of each floating-point type, which are huge integers too.
void poison(void* p, int64_t bytes);

// Fails where a test has said which global memory there is, and this is elsewhere; `pc` is who asks.
void check_global(const void* p, int64_t bytes, const void* pc);

// Shared memory of one block: objects apart from each other, with redzones between.
class SharedMemory {
 public:
  struct Object {
    const void* key;   // null: the dynamic one
    const char* name;  // as the compiler prints the function that has it
    char* begin;
    int64_t bytes;
    int64_t behind;  // bytes of redzone after it

    std::string title() const;  // for people
  };

  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Fresh memory for the next block.
  void reset(int64_t dynamic_bytes);
  // The object of this key, made and poisoned on first use.
  const Object& object(const void* key, const char* name, int64_t bytes);

  bool contains(const void* p) const { return p >= begin_ && p < end_; }
  std::pair<uintptr_t, uintptr_t> extent() const {
    return {reinterpret_cast<uintptr_t>(begin_), reinterpret_cast<uintptr_t>(end_)};
  }
  const Object* find(const void* p) const;
  // An object whose redzone was written to, or null.
  const Object* damaged() const;
  int64_t bytes() const;  // of all objects

 private:
  void add(const void* key, const char* name, char* begin, int64_t bytes, int64_t behind);

  std::vector<Object> objects_;
  char* begin_;
  char* dynamic_end_;
  char* end_;
  char* next_ = nullptr;  // where static objects go on
};

}  // namespace santa::simt
