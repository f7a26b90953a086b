#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cstdint>
#include <string>

namespace santa {

// A string argument of an operator. Before 2.14 torch's own conversion to std::string allocates one that nobody
// frees, 48 bytes at every call; this one frees what it was given and allocates nothing that stays.
struct Text : std::string {
  using std::string::string;
};

}  // namespace santa

template <>
struct torch::stable::detail::ToImpl<santa::Text> {
  static santa::Text call(StableIValue value, uint64_t, bool) {
    StringHandle handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    santa::Text text(data, length);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
