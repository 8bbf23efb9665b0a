// Sixteen fp32 lanes of AVX-512, one register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace flowprefill {

using Vec = __m512;
using Words = __m512i;

// Panels whose sums fit the registers beside each other, for so many rows.
constexpr int register_panels(int) { return 4; }

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline Words load_words(const uint32_t* from) { return _mm512_loadu_si512(from); }
inline void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }

inline __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
}
inline Vec load_first(const float* from, int count) {  // the other lanes: 0
  return _mm512_maskz_loadu_ps(first_lanes(count), from);
}
inline void store_first(float* to, int count, Vec x) {
  _mm512_mask_storeu_ps(to, first_lanes(count), x);
}
inline Vec keep_first(int count, Vec x, Vec others) {
  return _mm512_mask_blend_ps(first_lanes(count), others, x);
}

inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec mul_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }       // a b + c
inline Vec mul_subtract(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Vec greater_of(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b if one is a NaN
inline Vec absolute(Vec x) { return _mm512_abs_ps(x); }
inline Vec mul_add_word(Vec sum, uint32_t a, Words b) {  // of fp32 words
  return mul_add(_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(a))),
                 _mm512_castsi512_ps(b), sum);
}

inline float sum_of_lanes(Vec x) { return _mm512_reduce_add_ps(x); }
inline float greatest_lane(Vec x) { return _mm512_reduce_max_ps(x); }
inline float first_lane(Vec x) { return _mm512_cvtss_f32(x); }
inline bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

inline Vec nearest_whole(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x 2^whole, for whole <= 0.
inline Vec scale_down(Vec x, Vec whole) { return _mm512_scalef_ps(x, whole); }
// 1 / x of normal x: an estimate of 14 bits, made exact to 2 ulp by one Newton step.
inline Vec reciprocal(Vec x) {
  const Vec y = _mm512_rcp14_ps(x);
  return mul(y, mul_subtract(x, y, broadcast(2.0f)));
}
// x where sign >= 0, else x y.
inline Vec mul_if_negative(Vec sign, Vec x, Vec y) {
  return _mm512_mask_mul_ps(x, _mm512_cmp_ps_mask(sign, zero(), _CMP_LT_OQ), x, y);
}

}  // namespace flowprefill
