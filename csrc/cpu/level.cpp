#include "level.h"

#include <stdexcept>

#if SANTA_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace santa::cpu {
namespace {

constexpr Level kAllLevels[] = {Level::kGeneric, Level::kAvx2, Level::kAvx512, Level::kAmx};

// The system saves the unit's registers only for processes that ask.
bool ask_for_amx() {
#if SANTA_HAS_AMX
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  constexpr unsigned kTilesAndBfloat16 = 1u << 24 | 1u << 22;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTilesAndBfloat16) != kTilesAndBfloat16) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

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
    case Level::kAmx: {
      static const bool usable = ask_for_amx();
      return usable && supported(Level::kAvx512);
    }
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
    case Level::kAmx:
      return "amx";
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
