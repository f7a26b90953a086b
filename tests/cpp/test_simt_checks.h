#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <string>

#include "simt/engine.h"
#include "simt/races.h"

// What the programs that test the emulator share.
namespace santa::simt_test {

inline int checks = 0;

#define CHECK(...)                                                                     \
  do {                                                                                 \
    ++::santa::simt_test::checks;                                                      \
    if (!(__VA_ARGS__)) {                                                              \
      std::fprintf(stderr, "%s:%d: %s (order %d)\n", __FILE__, __LINE__, #__VA_ARGS__, \
                   static_cast<int>(::santa::simt::options.order));                    \
      std::exit(1);                                                                    \
    }                                                                                  \
  } while (0)

constexpr bool kRaces = simt::races::kOn;

inline std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const simt::Error& error) {
    return error.what();
  }
  return "";
}

// f() fails with an error that has every one of these in it.
inline void expect(std::initializer_list<const char*> parts, const std::function<void()>& f,
                   int line = __builtin_LINE()) {
  const std::string error = error_of(f);
  for (const char* part : parts) {
    ++checks;
    if (error.find(part) != std::string::npos) continue;
    std::fprintf(stderr, "line %d: '%s' is not in the error: %s\n", line, part, error.c_str());
    std::exit(1);
  }
}

}  // namespace santa::simt_test
