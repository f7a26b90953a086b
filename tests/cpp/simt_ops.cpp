// Private operators of the library that tests build from the CUDA backend and the emulator: how kernels are run.
#include <string>

#include "cuda/torch_side.h"
#include "registration.h"
#include "simt/engine.h"

namespace {

// Order of threads and blocks, and the device that plans are made for. None of it may change a bit of any result.
void configure(int64_t order, int64_t seed, int64_t resident_blocks, int64_t multiprocessors, int64_t shared_bytes,
               bool overlap) {
  santa::simt::options = {.order = static_cast<santa::simt::Order>(order),
                          .seed = static_cast<uint64_t>(seed),
                          .resident_blocks = static_cast<int>(resident_blocks),
                          .shared_limit = shared_bytes};
  santa::cuda::set_device({.multiprocessors = multiprocessors,
                           .shared_bytes = shared_bytes,
                           .shared_bytes_per_multiprocessor = shared_bytes + 1024,
                           .compute_capability = overlap ? 90 : 80});
}

// Names of the kernels launched since the last call, in their order.
std::string launches() {
  std::string names;
  for (const std::string& name : santa::simt::launched) names += (names.empty() ? "" : ",") + name;
  santa::simt::launched.clear();
  return names;
}

}  // namespace

SANTA_EXPAND(STABLE_TORCH_LIBRARY_FRAGMENT, SANTA_LIBRARY, m) {
  m.def(
      "configure(int order, int seed, int resident_blocks, int multiprocessors, int shared_bytes, bool overlap) "
      "-> ()");
  m.def("launches() -> str");
}

SANTA_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("configure", TORCH_BOX(&configure));
  m.impl("launches", TORCH_BOX(&launches));
}
