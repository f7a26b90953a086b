// The kernels that the emulator's tests run, for nvcc: the same sources compile for every architecture, without
// warnings, and launch() from the host does too.

#include "test_simt_faults.cuh"
#include "test_simt_kernels.cuh"

namespace santa::simt_test {

template __global__ void copies<4>(const unsigned char*, int, unsigned char*);
template __global__ void copies<8>(const unsigned char*, int, unsigned char*);
template __global__ void copies<16>(const unsigned char*, int, unsigned char*);
template __global__ void loads<4>(const unsigned char*, uint32_t*);
template __global__ void loads<8>(const unsigned char*, uint32_t*);
template __global__ void loads<16>(const unsigned char*, uint32_t*);
template __global__ void conversions<Half>(const Half*, float*, Half*, int);
template __global__ void conversions<BFloat>(const BFloat*, float*, BFloat*, int);
template __global__ void sum_rows<Fault::kNone>(float*, int, float*);
template __global__ void reduce<Fault::kNone>(const float*, float*);
template __global__ void merge<Fault::kNone>(const float*, float*, uint32_t*, float*);

void launch_all(float* x, float* between, float* out, Stream stream) {
  launch(produce<Fault::kNone>, {.name = "produce", .grid = 1, .block = 64, .stream = stream}, x, between);
  launch(consume<Fault::kNone>, {.name = "consume", .grid = 1, .block = 64, .stream = stream, .overlap = true}, x,
         between, out);
}

}  // namespace santa::simt_test
