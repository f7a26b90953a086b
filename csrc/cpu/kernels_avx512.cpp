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
  static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
  static F load_partial(const float* from, int64_t n) { return _mm512_maskz_loadu_ps(first(n), from); }
  template <class T>
  static F load_partial(const T* from, int64_t n) {
    return widen(_mm256_maskz_loadu_epi16(first(n), from), T{});
  }
  static void store(float* to, F x) { _mm512_storeu_ps(to, x); }
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
  // Transposes while it adds: every row's sum is taken over the same tree of lanes.
  static void reduce4(const F* sum, float scale, float* to) {
    const F low = _mm512_add_ps(_mm512_unpacklo_ps(sum[0], sum[1]), _mm512_unpackhi_ps(sum[0], sum[1]));
    const F high = _mm512_add_ps(_mm512_unpacklo_ps(sum[2], sum[3]), _mm512_unpackhi_ps(sum[2], sum[3]));
    const __m512d low2 = _mm512_castps_pd(low);
    const __m512d high2 = _mm512_castps_pd(high);
    const F four = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low2, high2)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(low2, high2)));
    _mm_storeu_ps(to, _mm_mul_ps(add_quarters(four), _mm_set1_ps(scale)));
  }
  static uint64_t sum16(const uint32_t* x) {
    const __m512i all = _mm512_loadu_si512(x);
    const __m512i even = _mm512_maskz_mov_epi32(0x5555, all);
    const __m512i odd = _mm512_srli_epi64(all, 32);
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(even, odd)));
  }
};

#include "kernels-inl.h"

}  // namespace
}  // namespace avx512

const KernelTable kAvx512Kernels = avx512::kTable;

}  // namespace santa::cpu

#include "target_end.h"
#endif
