#pragma once

#include <string>

namespace santa::simt::symbols {

// "file:line" of the instruction before `pc`, with the callers that it was inlined into; needs addr2line, which
// comes with the compiler, and -g1. Empty where there is no telling.
std::string source_line(const void* pc);

// Whether memory belongs to a program or library as loaded: its constants and variables.
bool is_static(const void* p);

// The name of the tag in the text that a compiler has for a function template of <class Tag, class T>.
std::string tag_name(const std::string& function);

}  // namespace santa::simt::symbols
