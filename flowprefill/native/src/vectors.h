// The two element types, as the kernels see them: operands are 32-bit words, 16 to a vector.
//
// A word holds one fp32 value, or two bf16 values that are neighbours along the dimension that a
// product sums over. So one kernel serves both: broadcast a word of A, multiply it with a vector of
// words of B, add to 16 fp32 sums.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __AVX512F__
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif

namespace flowprefill {

constexpr int LANES = 16;
using Word = uint32_t;

struct Fp32 {
  using Element = float;
  static constexpr int PER_WORD = 1;
  static Vec dot(Vec sum, Word a, Words b) { return mul_add_word(sum, a, b); }
  static Vec load(const Element* from) { return flowprefill::load(from); }
  static void store(Element* to, Vec x) { flowprefill::store(to, x); }
  static void store_two(Element* to, Vec x, Vec y) {
    store(to, x);
    store(to + LANES, y);
  }
  static void store_by_turns(Word*, Vec, Vec) {}  // no two values share a word
};

#ifdef __AVX512BF16__
struct Bf16 {
  using Element = uint16_t;
  static constexpr int PER_WORD = 2;
  static Vec dot(Vec sum, Word a, Words b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
  }
  static Vec load(const Element* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void store(Element* to, Vec x) {  // rounds to nearest even
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
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
  const Vec whole = nearest_whole(x);
  const Vec rest = sub(x, whole);
  Vec p = broadcast(1.32647369e-3f);
  p = mul_add(p, rest, broadcast(9.67151657e-3f));
  p = mul_add(p, rest, broadcast(5.55073376e-2f));
  p = mul_add(p, rest, broadcast(2.40222420e-1f));
  p = mul_add(p, rest, broadcast(6.93146978e-1f));
  p = mul_add(p, rest, broadcast(1.0f));
  return scale_down(p, whole);
}

// x / (1 + e^-x), any x: e^-|x| never overflows.
inline Vec silu(Vec x) {
  const Vec power = mul(absolute(x), broadcast(-1.44269504f));
  // in this order a NaN stays one
  const Vec e = exp2_of_negative(greater_of(broadcast(-200.0f), power));
  return mul(mul_if_negative(x, x, e), reciprocal(add(broadcast(1.0f), e)));
}

}  // namespace flowprefill
