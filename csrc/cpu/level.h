#pragma once

#include <string>
#include <string_view>
#include <vector>

// Linux lets a process use the matrix unit on request; older compilers do not know its instructions.
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define SANTA_HAS_AMX 1
#endif

namespace santa::cpu {

// Instruction-set levels, slowest first. One binary carries all of them and picks at run time.
enum class Level { kGeneric, kAvx2, kAvx512, kAmx };

std::string_view level_name(Level level);

// Levels that this processor can run, slowest first. kGeneric is always there.
std::vector<Level> supported_levels();

// The level of that name. Throws std::invalid_argument, naming `source` (an argument or environment variable)
// and the value, when the name is unknown or the processor lacks the level.
Level parse_level(std::string_view name, const std::string& source);

}  // namespace santa::cpu
