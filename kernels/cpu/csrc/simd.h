// Vectors of the machine the file is compiled for, and the one product everything is made of.
//
// A "word" is 32 bits of a row: two neighbouring bf16 values, or one float. Dot products run over words, so that the same
// loops serve both element types. ELEMENT_IS_BF16 chooses the type; the compiler's flags choose the instructions:
// AVX-512 with or without its bf16 product, or AVX2.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace trunkline {

#define INLINE static inline __attribute__((always_inline))
#define INLINE_METHOD inline __attribute__((always_inline))

#if ELEMENT_IS_BF16
using Element = uint16_t;  // bf16 bits
#else
using Element = float;
#endif
constexpr int WORD_ELEMENTS = 4 / sizeof(Element);

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int VECTOR_BYTES = LANES * 4;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef Floats UnalignedFloats __attribute__((aligned(4)));
typedef Words UnalignedWords __attribute__((aligned(2)));
typedef uint16_t HalfWords __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
typedef uint32_t Word __attribute__((may_alias, aligned(2)));

INLINE Floats load(const float* p) { return *(const UnalignedFloats*)p; }
INLINE void store(float* p, Floats x) { *(UnalignedFloats*)p = x; }
INLINE Words load_words(const Word* p) { return *(const UnalignedWords*)p; }
INLINE void store_first(float* p, Floats x, int count) {
#ifdef __AVX512F__
  _mm512_mask_storeu_ps(p, (1u << count) - 1, (__m512)x);
#else
  for (int i = 0; i < count; i++) p[i] = x[i];
#endif
}
INLINE Floats all(float x) { return x - Floats{}; }
INLINE Ints all_ints(int32_t x) { return x - Ints{}; }
INLINE Words all_words(uint32_t x) { return x - Words{}; }

INLINE Floats fma(Floats a, Floats b, Floats c) {
#ifdef __AVX512F__
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

INLINE Floats larger(Floats a, Floats b) {
#ifdef __AVX512F__
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#endif
}

// In a fixed order, so that a sum has the same bits wherever it is taken.
INLINE float sum(Floats x) {
  float parts[LANES];
  memcpy(parts, &x, sizeof x);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

INLINE float largest(Floats x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float parts[LANES];
  memcpy(parts, &x, sizeof x);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
  return parts[0];
#endif
}

// 1 / x, to 1 part in 10^7, in a fraction of a division's time.
INLINE Floats inverse(Floats x) {
#ifdef __AVX512F__
  const Floats y = (Floats)_mm512_rcp14_ps((__m512)x);
  return y * fma(-x, y, all(2.f));
#else
  return 1.f / x;
#endif
}

INLINE bool any_nan(Floats x) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
#else
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q));
#endif
}

constexpr float NEAREST = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits

// 2^x for x <= 127, to 2 parts in 10^7, or 1 in 10^4 where results are rounded to bf16; 2^0 is exactly 1, and what is
// masked exactly 0, so that it does not count at all.
INLINE Floats exp2(Floats x) {
#if ELEMENT_IS_BF16 && defined(__AVX512DQ__)
  const Floats f = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // the part behind the point
  Floats p = fma(f, all(7.7067720e-2f), all(2.2764425e-1f));
  p = fma(p, f, all(6.9511695e-1f));
  p = fma(p, f, all(1.f));
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  const Floats round = all(NEAREST);
  const Floats shifted = x + round, whole = shifted - round, f = x - whole;
#if ELEMENT_IS_BF16
  Floats p = all(9.6181291e-3f);
#else
  Floats p = fma(f, all(1.5403530e-4f), all(1.3333558e-3f));
  p = fma(p, f, all(9.6181291e-3f));
#endif
  p = fma(p, f, all(5.5504109e-2f));
  p = fma(p, f, all(2.4022651e-1f));
  p = fma(p, f, all(6.9314718e-1f));
  p = fma(p, f, all(1.f));
#ifdef __AVX512F__
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  const Floats y = (Floats)((Ints)p + ((Ints)shifted << 23));
  return x < -126.f ? Floats{} : y;
#endif
#endif
}

#if ELEMENT_IS_BF16

INLINE float to_float(Element x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

// Rounds to nearest, ties to even; NaN stays NaN.
INLINE void store_elements(Element* p, Floats x) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  Words bits = (Words)x;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Words nan = (bits >> 16) | 0x40;
  *(HalfWords*)p = __builtin_convertvector(x == x ? rounded : nan, HalfWords);
#endif
}

// Words as they enter a product.
#ifdef __AVX512BF16__
struct Factor {
  Words words;
};
INLINE Factor factor(Words x) { return {x}; }
INLINE Floats dot(Floats sum, Factor a, Factor b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a.words, (__m512bh)b.words);
}
#else
struct Factor {
  Floats even, odd;
};
INLINE Factor factor(Words x) { return {(Floats)(x << 16), (Floats)(x & 0xffff0000u)}; }
INLINE Floats dot(Floats sum, Factor a, Factor b) { return fma(a.odd, b.odd, fma(a.even, b.even, sum)); }
#endif

#else

INLINE float to_float(Element x) { return x; }
INLINE void store_elements(Element* p, Floats x) { store(p, x); }

struct Factor {
  Floats x;
};
INLINE Factor factor(Words x) { return {(Floats)x}; }
INLINE Floats dot(Floats sum, Factor a, Factor b) { return fma(a.x, b.x, sum); }

#endif

INLINE void store_element(Element* to, float x) {
  Element parts[LANES];
  store_elements(parts, all(x));
  *to = parts[0];
}

// Asks for a line, into the second cache: into the first, half as many come at a time. Not _mm_prefetch, in which gcc
// sees no effect: it drops loops and functions that do nothing else.
INLINE void prefetch(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*(const char*)p)); }

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

}  // namespace trunkline
