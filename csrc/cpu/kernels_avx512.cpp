// 16 lanes, 32 registers: 4 heads by 4 rows of sums, or 4 heads by 4 vectors.
#if defined(__x86_64__)
#include <immintrin.h>

#include "../math/softmax.h"
#include "../math/weights.h"
#include "convert.h"
#include "kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC's own intrinsics start from a deliberately unset register and then warn of it (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define SANTA_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#include "target_begin.h"

namespace santa::cpu {
namespace avx512 {
namespace {

struct Isa {
  static constexpr int64_t kLanes = 16;
  static constexpr int kHeads = 4;
  static constexpr int kColumns = 4;
  using F = __m512;
  using I = __m512i;

  static F set1(float x) { return _mm512_set1_ps(x); }
  static F widen(__m256i bits, BFloat) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static F widen(__m256i bits, Half) { return _mm512_cvtph_ps(bits); }
  static F load(const float* from) { return _mm512_loadu_ps(from); }
  template <class T>
  static F load(const T* from) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), T{});
  }
  template <class T>
  static void load_pair(const T* from, F* to) {
    to[0] = load(from);
    to[1] = load(from + kLanes);
  }
  // One permutation puts 16 of the 32 numbers into the high halves of as many lanes.
  static void load_pair(const BFloat* from, F* to) {
    const __m512i both = _mm512_loadu_si512(from);
    constexpr __mmask32 kHighHalves = 0xAAAAAAAA;
    to[0] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kHighHalves, spread(0), both));
    to[1] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kHighHalves, spread(16), both));
  }
  static __m512i spread(int first) {  // lane j: 16-bit element first + j in both halves
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_mullo_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)), _mm512_set1_epi32(0x10001));
  }
  static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
  static F load_partial(const float* from, int64_t n) { return _mm512_maskz_loadu_ps(first(n), from); }
  template <class T>
  static F load_partial(const T* from, int64_t n) {
    return widen(_mm256_maskz_loadu_epi16(first(n), from), T{});
  }
  static void store(float* to, F x) { _mm512_storeu_ps(to, x); }
  static void store_as(float* to, F x) { store(to, x); }
  static void store_as(Half* to, F x) {
    const __m256i bits = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  }
  // Nearest, ties to even; a NaN keeps its high half and stays one.
  static void store_as(BFloat* to, F x) {
    const I bits = _mm512_castps_si512(x);
    const I high = _mm512_srli_epi32(bits, 16);
    const I bias = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7FFF));
    const I rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const I nan = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    const I chosen = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(chosen));
  }
  static F from_doubles(const double* from, double factor) {
    const __m512d by = _mm512_set1_pd(factor);
    const __m256 low = _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_loadu_pd(from), by));
    const __m256 high = _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_loadu_pd(from + 8), by));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
  static void add_scaled(double* to, F x, double factor) {
    const __m512d by = _mm512_set1_pd(factor);
    const __m512d low = _mm512_mul_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x)), by);
    const __m512d high = _mm512_mul_pd(_mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)), by);
    _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), low));
    _mm512_storeu_pd(to + 8, _mm512_add_pd(_mm512_loadu_pd(to + 8), high));
  }
  static I load_int(const uint32_t* from) { return _mm512_loadu_si512(from); }
  static void store_int(uint32_t* to, I x) { _mm512_storeu_si512(to, x); }
  static I zero_int() { return _mm512_setzero_si512(); }
  static I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F sqrt(F x) { return _mm512_sqrt_ps(x); }
  static bool any_nan(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
  static F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static I to_int(F x) { return _mm512_cvtps_epi32(x); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static F scale_by_power(F x, F n) { return _mm512_scalef_ps(x, n); }
  static F zero_below(F x, F limit, F value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
  }
  static __m128 add_quarters(F x) {
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  }
  static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
  static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
  // Transposes while it adds: every row's sum is taken over the same tree of lanes, whatever is beside it.
  static F add_within_quarters(const F* sum) {
    const F low = _mm512_add_ps(_mm512_unpacklo_ps(sum[0], sum[1]), _mm512_unpackhi_ps(sum[0], sum[1]));
    const F high = _mm512_add_ps(_mm512_unpacklo_ps(sum[2], sum[3]), _mm512_unpackhi_ps(sum[2], sum[3]));
    const __m512d low2 = _mm512_castps_pd(low);
    const __m512d high2 = _mm512_castps_pd(high);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low2, high2)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(low2, high2)));
  }
  static F add_halves(F a, F b) {  // those of a, then those of b
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  }
  template <int kHeadsHere>
  static void reduce(const F (*sum)[4], float scale, float* to, int64_t stride) {
    if constexpr (kHeadsHere == 4) {
      const F a = add_halves(add_within_quarters(sum[0]), add_within_quarters(sum[1]));
      const F b = add_halves(add_within_quarters(sum[2]), add_within_quarters(sum[3]));
      const F all = _mm512_mul_ps(
          _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD)), set1(scale));
      _mm_storeu_ps(to, _mm512_castps512_ps128(all));
      _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps(all, 1));
      _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps(all, 2));
      _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps(all, 3));
    } else {
      for (int h = 0; h < kHeadsHere; ++h) {
        const __m128 four = add_quarters(add_within_quarters(sum[h]));
        _mm_storeu_ps(to + h * stride, _mm_mul_ps(four, _mm_set1_ps(scale)));
      }
    }
  }
  static constexpr int64_t kSumBlocks = 8;
  static __m512i add_pairs(__m512i a, __m512i b) {  // neighbours of a, neighbours of b, by quarters
    return _mm512_add_epi64(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  static __m512i add_halves(__m512i a, __m512i b) {  // those of a, then those of b
    return _mm512_add_epi64(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE));
  }
  static void sum_blocks(const uint32_t* x, uint64_t* to) {
    __m512i sum[kSumBlocks];
    for (int64_t b = 0; b < kSumBlocks; ++b) {
      const __m512i all = _mm512_loadu_si512(x + b * kBlockRows);
      sum[b] = _mm512_add_epi64(_mm512_maskz_mov_epi32(0x5555, all), _mm512_srli_epi64(all, 32));
    }
    const __m512i a = add_halves(add_pairs(sum[0], sum[1]), add_pairs(sum[2], sum[3]));
    const __m512i b = add_halves(add_pairs(sum[4], sum[5]), add_pairs(sum[6], sum[7]));
    _mm512_storeu_si512(to, _mm512_add_epi64(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD)));
  }
};

#include "kernels-inl.h"

}  // namespace
}  // namespace avx512

constinit const KernelTable kAvx512Kernels = avx512::kTable;

}  // namespace santa::cpu

#include "target_end.h"
#endif
