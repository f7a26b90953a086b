// The level of every processor: 4 lanes of the compiler's own vectors, no intrinsics.
#include "../math/softmax.h"
#include "../math/weights.h"
#include "convert.h"
#include "kernels.h"

namespace santa::cpu {
namespace generic {
namespace {

struct Isa {
  static constexpr int64_t kLanes = 4;
  static constexpr int kHeads = 2;
  static constexpr int kColumns = 4;
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));

  static F set1(float x) { return F{x, x, x, x}; }
  template <class T>
  static F load(const T* from) {
    return F{to_float(from[0]), to_float(from[1]), to_float(from[2]), to_float(from[3])};
  }
  static F load(const float* from) {
    F x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  template <class T>
  static void load_pair(const T* from, F* to) {
    to[0] = load(from);
    to[1] = load(from + kLanes);
  }
  template <class T>
  static F load_partial(const T* from, int64_t n) {
    F x = set1(0.0f);
    for (int64_t i = 0; i < n; ++i) x[i] = to_float(from[i]);
    return x;
  }
  static void store(float* to, F x) { std::memcpy(to, &x, sizeof x); }
  template <class T>
  static void store_as(T* to, F x) {
    for (int i = 0; i < kLanes; ++i) cpu::store_as(x[i], to + i);
  }
  static F from_doubles(const double* from, double factor) {
    F x;
    for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(from[i] * factor);
    return x;
  }
  static void add_scaled(double* to, F x, double factor) {
    for (int i = 0; i < kLanes; ++i) to[i] += static_cast<double>(x[i]) * factor;
  }
  static I load_int(const uint32_t* from) {
    I x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  static void store_int(uint32_t* to, I x) { std::memcpy(to, &x, sizeof x); }
  static I zero_int() { return I{}; }
  static I bit_xor(I a, I b) { return a ^ b; }

  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F sqrt(F x) {
    return F{__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3])};
  }
  static bool any_nan(F x) {
    const I unordered = x != x;
    return (unordered[0] | unordered[1] | unordered[2] | unordered[3]) != 0;
  }
  // Adding and taking away 1.5 * 2^23 leaves a number below 2^22 rounded to even.
  static F round(F x) {
    const F magic = set1(12582912.0f);
    return (x + magic) - magic;
  }
  // Not negative. From 2^23 on every float is an integer already.
  static I to_int(F x) {
    const F magic = set1(8388608.0f);
    return __builtin_convertvector(x < magic ? (x + magic) - magic : x, I);
  }
  static F to_float(I x) { return __builtin_convertvector(x, F); }
  static float to_float(float x) { return x; }
  static float to_float(Half x) { return cpu::to_float(x); }
  static float to_float(BFloat x) { return cpu::to_float(x); }
  static F scale_by_power(F x, F n) {
    const I bits = (__builtin_convertvector(n, I) + 127) << 23;
    F power;
    std::memcpy(&power, &bits, sizeof power);
    return x * power;
  }
  static F zero_below(F x, F limit, F value) { return x < limit ? set1(0.0f) : value; }
  static float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float reduce_max(F x) {
    const float a = x[0] > x[1] ? x[0] : x[1];
    const float b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
  }
  static void reduce4(const F* sum, float scale, float* to) {
    for (int r = 0; r < 4; ++r) to[r] = reduce_add(sum[r]) * scale;
  }
  template <int kHeadsHere>
  static void reduce(const F (*sum)[4], float scale, float* to, int64_t stride) {
    for (int h = 0; h < kHeadsHere; ++h) reduce4(sum[h], scale, to + h * stride);
  }
  static constexpr int64_t kSumBlocks = 1;
  static void sum_blocks(const uint32_t* x, uint64_t* to) {
    *to = 0;
    for (int i = 0; i < 16; ++i) *to += x[i];
  }
};

#include "kernels-inl.h"

}  // namespace
}  // namespace generic

constinit const KernelTable kGenericKernels = generic::kTable;

}  // namespace santa::cpu
