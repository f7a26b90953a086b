// santa_torch._C: what Python needs of the native part and torch need not know. Torch-free, so that it
// still loads, and can tell what it was built with, when the operators cannot.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "cpu/level.h"

namespace py = pybind11;

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::vector<std::string> supported_cpu_levels() {
  std::vector<std::string> names;
  for (const santa::cpu::Level level : santa::cpu::supported_levels()) {
    names.emplace_back(santa::cpu::level_name(level));
  }
  return names;
}

// The SANTA_* macros come from build_tools/build_ext.py; an empty one means a build without CUDA.
py::dict build_info() {
  py::dict info;
  info["version"] = SANTA_VERSION;
  info["torch"] = SANTA_TORCH;
  info["cuda"] = SANTA_CUDA;
  info["cuda_archs"] = SANTA_CUDA_ARCHS;
  info["compiler"] = compiler();
  info["cpu_levels"] = supported_cpu_levels();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information and the torch-free parts of santa_torch, bound for Python and its tests.";
  m.def("build_info", &build_info,
        "What this binary was built with (version, torch, cuda, cuda_archs, compiler) and the instruction-set "
        "levels of this processor, slowest first (cpu_levels).");
}
