#include <atomic>
#include <cstdlib>

#include "kernels.h"

namespace santa::cpu {
namespace {

Level initial_level() {
  const char* forced = std::getenv("SANTA_CPU_LEVEL");
  if (forced == nullptr || *forced == '\0') return supported_levels().back();
  return parse_level(forced, "SANTA_CPU_LEVEL");
}

// A bad SANTA_CPU_LEVEL throws from here at every call until it is mended: the static stays unset.
std::atomic<Level>& level_in_use() {
  static std::atomic<Level> level{initial_level()};
  return level;
}

}  // namespace

Level active_level() { return level_in_use().load(std::memory_order_relaxed); }

void set_active_level(Level level) { level_in_use().store(level, std::memory_order_relaxed); }

const KernelTable& active_kernels() {
#if defined(__x86_64__)
  switch (active_level()) {
    case Level::kAmx:
#if SANTA_HAS_AMX
      return amx_kernels();
#endif
    case Level::kAvx512:
      return kAvx512Kernels;
    case Level::kAvx2:
      return kAvx2Kernels;
    case Level::kGeneric:
      break;
  }
#endif
  return kGenericKernels;
}

}  // namespace santa::cpu
