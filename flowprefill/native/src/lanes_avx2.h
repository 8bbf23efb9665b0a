// Sixteen fp32 lanes of AVX2 with FMA, two registers. Same order of additions as lanes_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace flowprefill {

struct Vec {
  __m256 low, high;
};
using Words = Vec;

// Panels whose sums fit the registers beside each other, for so many rows: twelve of the sixteen.
constexpr int register_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Words load_words(const uint32_t* from) { return load(reinterpret_cast<const float*>(from)); }
inline void store(float* to, Vec x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}

struct FirstLanes {
  __m256i low, high;
};
inline FirstLanes first_lanes(int count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes),
          _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8), lanes)};
}
inline Vec load_first(const float* from, int count) {  // the other lanes: 0
  const FirstLanes lanes = first_lanes(count);
  return {_mm256_maskload_ps(from, lanes.low), _mm256_maskload_ps(from + 8, lanes.high)};
}
inline void store_first(float* to, int count, Vec x) {
  const FirstLanes lanes = first_lanes(count);
  _mm256_maskstore_ps(to, lanes.low, x.low);
  _mm256_maskstore_ps(to + 8, lanes.high, x.high);
}
inline Vec keep_first(int count, Vec x, Vec others) {
  const FirstLanes lanes = first_lanes(count);
  return {_mm256_blendv_ps(others.low, x.low, _mm256_castsi256_ps(lanes.low)),
          _mm256_blendv_ps(others.high, x.high, _mm256_castsi256_ps(lanes.high))};
}

inline Vec add(Vec a, Vec b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Vec sub(Vec a, Vec b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Vec mul(Vec a, Vec b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Vec mul_add(Vec a, Vec b, Vec c) {  // a b + c
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vec mul_subtract(Vec a, Vec b, Vec c) {  // c - a b
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Vec greater_of(Vec a, Vec b) {  // b if one is a NaN
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Vec absolute(Vec x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Vec mul_add_word(Vec sum, uint32_t a, Words b) {  // of fp32 words
  const __m256 all = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(a)));
  return {_mm256_fmadd_ps(all, b.low, sum.low), _mm256_fmadd_ps(all, b.high, sum.high)};
}

inline float sum_of_lanes(Vec x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float greatest_lane(Vec x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline float first_lane(Vec x) { return _mm256_cvtss_f32(x.low); }
inline bool any_greater(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ),
                                         _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ))) != 0;
}

inline Vec nearest_whole(Vec x) {
  constexpr int HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, HOW), _mm256_round_ps(x.high, HOW)};
}
// 2^n of whole n from -126 to 127.
inline __m256 power_of_2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// Two factors, so that what is not normal is rounded once, as one factor 2^whole would.
inline __m256 scale_down(__m256 x, __m256 whole) {
  const __m256i n = _mm256_cvtps_epi32(_mm256_max_ps(whole, _mm256_set1_ps(-252.0f)));
  const __m256i half = _mm256_srai_epi32(n, 1);
  return _mm256_mul_ps(_mm256_mul_ps(x, power_of_2(half)), power_of_2(_mm256_sub_epi32(n, half)));
}
// x 2^whole, for whole <= 0.
inline Vec scale_down(Vec x, Vec whole) {
  return {scale_down(x.low, whole.low), scale_down(x.high, whole.high)};
}
inline Vec reciprocal(Vec x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return {_mm256_div_ps(one, x.low), _mm256_div_ps(one, x.high)};
}
// x where sign >= 0, else x y.
inline Vec mul_if_negative(Vec sign, Vec x, Vec y) {
  const Vec product = mul(x, y);
  const __m256 zeros = _mm256_setzero_ps();
  return {_mm256_blendv_ps(x.low, product.low, _mm256_cmp_ps(sign.low, zeros, _CMP_LT_OQ)),
          _mm256_blendv_ps(x.high, product.high, _mm256_cmp_ps(sign.high, zeros, _CMP_LT_OQ))};
}

}  // namespace flowprefill
