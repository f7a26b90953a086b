// santa_torch._C: what Python needs of the native part and torch need not know. Torch-free, so that it
// still loads, and can tell what it was built with, when the operators cannot.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/level.h"
#include "math/bernoulli.h"
#include "math/draws.h"
#include "math/philox.h"
#include "math/weights.h"
#include "planner.h"

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

std::vector<uint32_t> philox(const std::vector<uint32_t>& counter, const std::vector<uint32_t>& key) {
  if (counter.size() != 4)
    throw std::invalid_argument("counter must have 4 words, got " + std::to_string(counter.size()));
  if (key.size() != 2) throw std::invalid_argument("key must have 2 words, got " + std::to_string(key.size()));
  const santa::Philox4x32 bits =
      santa::philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  return {bits.word, bits.word + 4};
}

// Plan of a CPU decode step as text and bytes, for people and tests.
py::dict plan_cpu(int64_t batch, int64_t query_heads, int64_t kv_heads, int64_t rows, int64_t head_dim,
                  int64_t value_dim, const std::string& method) {
  const santa::DecodeShape shape = {
      batch, query_heads, kv_heads, rows, head_dim, value_dim, santa::Dtype::kBFloat16};
  const santa::CpuPlan plan = santa::plan_cpu(shape, santa::parse_method(method, "plan_cpu"), rows);
  py::dict result;
  result["text"] = plan.to_string();
  result["chunks"] = plan.chunks;
  result["scratch_bytes"] = plan.bytes;
  return result;
}

santa::Dtype parse_dtype(const std::string& name) {
  if (name == "float32") return santa::Dtype::kFloat32;
  if (name == "float16") return santa::Dtype::kFloat16;
  if (name == "bfloat16") return santa::Dtype::kBFloat16;
  throw std::invalid_argument("plan_launch: dtype must be float32, float16 or bfloat16, got '" + name + "'");
}

py::dict describe(const santa::Splits& splits) {
  py::dict result;
  result["units"] = splits.units;
  result["splits"] = splits.splits;
  result["chunks_per_split"] = splits.chunks_per_split;
  return result;
}

// Plan of a decode step on a GPU as text and numbers.
py::dict plan_launch(const std::vector<int64_t>& sizes, const std::string& dtype, const std::string& method,
                     int64_t samples, bool statistics, const std::vector<int64_t>& device, double bytes_per_second,
                     bool sketch, bool bernoulli) {
  if (sizes.size() != 6) {
    throw std::invalid_argument("plan_launch: sizes must be B, Hq, Hkv, L, D, Dv, got " +
                                std::to_string(sizes.size()) + " numbers");
  }
  if (device.size() != 4) {
    throw std::invalid_argument(
        "plan_launch: device must be multiprocessors, shared bytes of a block and of a multiprocessor, and "
        "compute "
        "capability, got " +
        std::to_string(device.size()) + " numbers");
  }
  for (const auto* numbers : {&sizes, &device}) {
    for (const int64_t number : *numbers) {
      if (number < 0)
        throw std::invalid_argument("plan_launch: sizes are not negative, got " + std::to_string(number));
    }
  }
  const santa::DecodeShape shape = {sizes[0], sizes[1], sizes[2],          sizes[3],
                                    sizes[4], sizes[5], parse_dtype(dtype)};
  if (shape.kv_heads < 1 || shape.query_heads < 1 || shape.query_heads % shape.kv_heads != 0 ||
      shape.head_dim < 1) {
    throw std::invalid_argument("plan_launch: Hkv must be at least 1 and divide Hq, and D at least 1");
  }
  if (samples < 1 || samples > santa::kMaxSamples) {
    throw std::invalid_argument("plan_launch: samples must be between 1 and 2^24, got " + std::to_string(samples));
  }
  const santa::LaunchPlan plan =
      santa::plan_launch(shape, santa::parse_method(method, "plan_launch"), samples, statistics,
                         {device[0], device[1], device[2], static_cast<int>(device[3]), bytes_per_second},
                         {.sketch = sketch, .bernoulli = bernoulli});
  py::dict result;
  result["text"] = plan.to_string();
  result["launches"] = plan.launches;
  result["overlap"] = plan.overlap;
  result["tile_rows"] = plan.tile_rows;
  result["heads_per_block"] = plan.heads_per_block;
  result["score"] = describe(plan.score);
  result["score_shared_bytes"] = plan.score_shared;
  result["score_resident"] = plan.score_resident;
  result["weigh"] = describe(plan.weigh);
  result["include"] = describe(plan.include);
  result["draw_heads"] = plan.draw_heads;
  result["capacity"] = plan.capacity;
  result["value_slices"] = plan.value_slices;
  result["scratch_bytes"] = plan.bytes;
  result["kv_bytes"] = plan.predicted_kv_bytes;
  result["bytes"] = plan.predicted_bytes;
  result["microseconds"] = plan.predicted_microseconds;
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information and the torch-free parts of santa_torch, bound for Python and its tests.";
  m.def("build_info", &build_info,
        "What this binary was built with (version, torch, cuda, cuda_archs, compiler) and the instruction-set "
        "levels of this processor, slowest first (cpu_levels).");
  m.def("philox4x32", &philox, py::arg("counter"), py::arg("key"),
        "Philox4x32-10: four words from a counter and a key.");
  m.def(
      "random64",
      [](int64_t seed, int64_t position, int64_t layer, int64_t head, uint32_t draw) {
        return santa::random64({seed, position, layer, head}, draw);
      },
      py::arg("seed"), py::arg("position"), py::arg("layer"), py::arg("head"), py::arg("draw"),
      "The 64 random bits of one draw, as the kernels see them.");
  m.def("stratum_threshold", &santa::stratum_threshold, py::arg("m"), py::arg("samples"), py::arg("total"),
        py::arg("u"), "floor((m * total + u) / samples) without overflow.");
  m.def("shared_threshold", &santa::shared_threshold, py::arg("k"), py::arg("bits"),
        "Threshold k of the shared sample.");
  m.def("multiply_high", &santa::multiply_high, py::arg("a"), py::arg("b"), "High half of a 64 x 64-bit product.");
  m.def("draw_capacity", &santa::draw_capacity, py::arg("shared"), py::arg("samples"), py::arg("group_size"),
        "Most rows that a draw can return, before the cut at the number of rows.");
  m.attr("MAX_SAMPLES") = santa::kMaxSamples;
  m.attr("MAX_BERNOULLI_DRAWS") = santa::kMaxBernoulliDraws;
  m.def("plan_cpu", &plan_cpu, py::arg("batch"), py::arg("query_heads"), py::arg("kv_heads"), py::arg("rows"),
        py::arg("head_dim"), py::arg("value_dim"), py::arg("method"), "Scratch plan of a CPU decode step.");
  m.def("plan_launch", &plan_launch, py::arg("sizes"), py::arg("dtype"), py::arg("method"), py::arg("samples"),
        py::arg("statistics"), py::arg("device"), py::arg("bytes_per_second") = 0.0, py::arg("sketch") = false,
        py::arg("bernoulli") = false, "Launch plan of a CUDA decode step; see santa_torch.plan.");
}
