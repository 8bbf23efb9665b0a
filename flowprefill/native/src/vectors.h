// The two element types, as the kernels see them: operands are 32-bit words, 16 to a vector.
//
// A word holds one fp32 value, or two bf16 values that are neighbours along the dimension that a
// product sums over. So one kernel serves both: broadcast a word of A, multiply it with a vector of
// words of B, add to 16 fp32 sums.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

namespace flowprefill {

constexpr int LANES = 16;
using Vec = __m512;
using Word = uint32_t;

inline __mmask16 first_lanes(int count) {
  return static_cast<__mmask16>(count >= LANES ? 0xffff : (1u << count) - 1);
}

struct Fp32 {
  using Element = float;
  static constexpr int PER_WORD = 1;
  static Vec dot(Vec sum, Word a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(a))),
                           _mm512_castsi512_ps(b), sum);
  }
  static Vec load(const Element* from, __mmask16 lanes) {
    return _mm512_maskz_loadu_ps(lanes, from);
  }
  static void store(Element* to, __mmask16 lanes, Vec x) { _mm512_mask_storeu_ps(to, lanes, x); }
  static void store_two(Element* to, Vec x, Vec y) {
    _mm512_storeu_ps(to, x);
    _mm512_storeu_ps(to + LANES, y);
  }
  static void store_by_turns(Word*, Vec, Vec) {}  // no two values share a word
};

#ifdef __AVX512BF16__
struct Bf16 {
  using Element = uint16_t;
  static constexpr int PER_WORD = 2;
  static Vec dot(Vec sum, Word a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
  }
  static Vec load(const Element* from, __mmask16 lanes) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void store(Element* to, __mmask16 lanes, Vec x) {  // rounds to nearest even
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(x));
  }
  static void store_two(Element* to, Vec x, Vec y) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(y, x));
  }
  static void store_by_turns(Word* to, Vec x, Vec y) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(y));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
};
#endif

// 2^x of finite x <= 0; exactly 0 far below. Degree 5, minimax: relative error under 3e-7.
inline Vec exp2_of_negative(Vec x) {
  const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec rest = _mm512_sub_ps(x, whole);
  Vec p = _mm512_set1_ps(1.32647369e-3f);
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.67151657e-3f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.55073376e-2f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.40222420e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.93146978e-1f));
  p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

// 1 / x of normal x: an estimate of 14 bits, made exact to 2 ulp by one Newton step.
inline Vec reciprocal(Vec x) {
  const Vec y = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
}

// x / (1 + e^-x), any x: e^-|x| never overflows.
inline Vec silu(Vec x) {
  const Vec power = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-1.44269504f));
  // in this order a NaN stays one
  const Vec e = exp2_of_negative(_mm512_max_ps(_mm512_set1_ps(-200.0f), power));
  const __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const Vec numerator = _mm512_mask_mul_ps(x, is_negative, x, e);
  return _mm512_mul_ps(numerator, reciprocal(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

}  // namespace flowprefill
