// 8 lanes, 16 registers: 2 heads by 4 rows of sums, or 2 heads by 4 vectors.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../math/softmax.h"
#include "../math/weights.h"
#include "convert.h"
#include "kernels.h"

#define SANTA_TARGET "avx2,fma,f16c"
#include "target_begin.h"

namespace santa::cpu {
namespace avx2 {
namespace {

struct Isa {
  static constexpr int64_t kLanes = 8;
  static constexpr int kHeads = 2;
  static constexpr int kColumns = 4;
  using F = __m256;
  using I = __m256i;

  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* from) { return _mm256_loadu_ps(from); }
  static F load(const BFloat* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static F load(const Half* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  template <class T>
  static void load_pair(const T* from, F* to) {
    to[0] = load(from);
    to[1] = load(from + kLanes);
  }
  template <class T>
  static F load_partial(const T* from, int64_t n) {
    T whole[kLanes] = {};
    __builtin_memcpy(whole, from, static_cast<size_t>(n) * sizeof(T));
    return load(whole);
  }
  static void store(float* to, F x) { _mm256_storeu_ps(to, x); }
  static void store_as(float* to, F x) { store(to, x); }
  static void store_as(Half* to, F x) {
    const __m128i bits = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
  }
  // Nearest, ties to even; a NaN keeps its high half and stays one.
  static void store_as(BFloat* to, F x) {
    const I bits = _mm256_castps_si256(x);
    const I high = _mm256_srli_epi32(bits, 16);
    const I bias = _mm256_add_epi32(_mm256_and_si256(high, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7FFF));
    const I rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const I nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const I is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const I chosen = _mm256_blendv_epi8(rounded, nan, is_nan);
    const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(chosen, chosen), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }
  static F from_doubles(const double* from, double factor) {
    const __m256d by = _mm256_set1_pd(factor);
    const __m128 low = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_loadu_pd(from), by));
    const __m128 high = _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_loadu_pd(from + 4), by));
    return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
  }
  static void add_scaled(double* to, F x, double factor) {
    const __m256d by = _mm256_set1_pd(factor);
    const __m256d low = _mm256_mul_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), by);
    const __m256d high = _mm256_mul_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)), by);
    _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), low));
    _mm256_storeu_pd(to + 4, _mm256_add_pd(_mm256_loadu_pd(to + 4), high));
  }
  static I load_int(const uint32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void store_int(uint32_t* to, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
  static I zero_int() { return _mm256_setzero_si256(); }
  static I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F sqrt(F x) { return _mm256_sqrt_ps(x); }
  static bool any_nan(F x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
  static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static I to_int(F x) { return _mm256_cvtps_epi32(x); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static F scale_by_power(F x, F n) {
    const I bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
  }
  static F zero_below(F x, F limit, F value) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), value);
  }
  static __m128 add_halves(F x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }
  static float reduce_add(F x) {
    __m128 sum = add_halves(x);
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  }
  static float reduce_max(F x) {
    __m128 largest = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    largest = _mm_max_ps(largest, _mm_movehl_ps(largest, largest));
    return _mm_cvtss_f32(_mm_max_ss(largest, _mm_movehdup_ps(largest)));
  }
  // Transposes while it adds: every row's sum is taken over the same tree of lanes.
  static void reduce4(const F* sum, float scale, float* to) {
    const F low = _mm256_add_ps(_mm256_unpacklo_ps(sum[0], sum[1]), _mm256_unpackhi_ps(sum[0], sum[1]));
    const F high = _mm256_add_ps(_mm256_unpacklo_ps(sum[2], sum[3]), _mm256_unpackhi_ps(sum[2], sum[3]));
    const __m256d low2 = _mm256_castps_pd(low);
    const __m256d high2 = _mm256_castps_pd(high);
    const F four = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(low2, high2)),
                                 _mm256_castpd_ps(_mm256_unpackhi_pd(low2, high2)));
    _mm_storeu_ps(to, _mm_mul_ps(add_halves(four), _mm_set1_ps(scale)));
  }
  template <int kHeadsHere>
  static void reduce(const F (*sum)[4], float scale, float* to, int64_t stride) {
    for (int h = 0; h < kHeadsHere; ++h) reduce4(sum[h], scale, to + h * stride);
  }
  static constexpr int64_t kSumBlocks = 1;
  static void sum_blocks(const uint32_t* x, uint64_t* to) {
    const __m256i* at = reinterpret_cast<const __m256i*>(x);
    const __m256i a = _mm256_loadu_si256(at);
    const __m256i b = _mm256_loadu_si256(at + 1);
    const __m256i low_halves = _mm256_set1_epi64x(0xFFFFFFFF);
    const __m256i even = _mm256_add_epi64(_mm256_and_si256(a, low_halves), _mm256_and_si256(b, low_halves));
    const __m256i odd = _mm256_add_epi64(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    const __m256i four = _mm256_add_epi64(even, odd);
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    *to = static_cast<uint64_t>(_mm_cvtsi128_si64(two)) + static_cast<uint64_t>(_mm_extract_epi64(two, 1));
  }
};

#include "kernels-inl.h"

}  // namespace
}  // namespace avx2

constinit const KernelTable kAvx2Kernels = avx2::kTable;

}  // namespace santa::cpu

#include "target_end.h"
#endif
