#pragma once

// The headers of this folder are torch-free and serve the CPU kernels, the CUDA kernels and the tests alike.
#if defined(__CUDACC__)
#define SANTA_HD __host__ __device__ inline
#else
#define SANTA_HD inline
#endif
