#include "symbols.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <sstream>

namespace santa::simt::symbols {
namespace {

std::string output_of(const std::string& command) {
  // The command has no words from outside but the name of this program's file.
  // NOLINTNEXTLINE(bugprone-command-processor)
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::string out;
  std::array<char, 256> buffer;
  while (pipe != nullptr && fgets(buffer.data(), buffer.size(), pipe.get()) != nullptr) out += buffer.data();
  return out;
}

}  // namespace

std::string source_line(const void* pc) {
  Dl_info info{};
  if (dladdr(pc, &info) == 0 || info.dli_fbase == nullptr) return {};
  // What can be loaded anywhere is looked up by offset; a program that cannot, which no offset fits, by address.
  const uintptr_t at = reinterpret_cast<uintptr_t>(pc) - 1;
  const uintptr_t offset = at - reinterpret_cast<uintptr_t>(info.dli_fbase);
  std::ostringstream command;
  command << "addr2line -s -i -e '" << info.dli_fname << std::hex << "' 0x" << offset << " 0x" << at
          << " 2>/dev/null";
  std::istringstream lines(output_of(command.str()));
  std::string result;
  for (std::string line; std::getline(lines, line);) {
    line.resize(std::min(line.find(' '), line.size()));  // "(discriminator 2)"
    // simt.h's own lines are where CUDA's names are, which says nothing.
    if (!line.empty() && line[0] != '?' && line.rfind("simt.h:", 0) != 0)
      result += (result.empty() ? "" : ", in ") + line;
  }
  return result;
}

bool is_static(const void* p) {
  Dl_info info{};
  return dladdr(p, &info) != 0;
}

std::string tag_name(const std::string& function) {
  // "... [with Tag = name; T = ...]" of GCC, "... [Tag = name, T = ...]" of clang; the name with its scopes.
  size_t end = function.rfind("; T = ");
  if (end == std::string::npos) end = function.rfind(", T = ");
  if (end == std::string::npos) return function;
  const size_t begin = function.find_last_of(": =", end - 1);
  return function.substr(begin + 1, end - begin - 1);
}

}  // namespace santa::simt::symbols
