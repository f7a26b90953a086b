#include "level.h"

#include <stdexcept>

namespace santa::cpu {
namespace {

constexpr Level kAllLevels[] = {Level::kGeneric, Level::kAvx2, Level::kAvx512};

bool supported(Level level) {
#if defined(__x86_64__)
  switch (level) {
    case Level::kGeneric:
      return true;
    case Level::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case Level::kAvx512:
      return supported(Level::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
#else
  return level == Level::kGeneric;
#endif
}

std::string join(const std::vector<Level>& levels) {
  std::string names;
  for (const Level level : levels) {
    if (!names.empty()) names += ", ";
    names += level_name(level);
  }
  return names;
}

}  // namespace

std::string_view level_name(Level level) {
  switch (level) {
    case Level::kGeneric:
      return "generic";
    case Level::kAvx2:
      return "avx2";
    case Level::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<Level> supported_levels() {
  std::vector<Level> levels;
  for (const Level level : kAllLevels) {
    if (supported(level)) levels.push_back(level);
  }
  return levels;
}

Level parse_level(std::string_view name, const std::string& source) {
  for (const Level level : kAllLevels) {
    if (level_name(level) != name) continue;
    if (supported(level)) return level;
    throw std::invalid_argument(source + ": this processor does not support the level '" + std::string(name) +
                                "'; it supports " + join(supported_levels()));
  }
  throw std::invalid_argument(source + ": unknown level '" + std::string(name) + "'; the levels are " +
                              join({std::begin(kAllLevels), std::end(kAllLevels)}));
}

}  // namespace santa::cpu
