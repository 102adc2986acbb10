// One block of one head as it lies in the cache: elements, or values of one byte with or without scales behind them. What
// the bytes stand for is said, and computed a second time, in kernels/kv_format.py.
#pragma once

#include <algorithm>

#include "interface.h"
#include "simd.h"

namespace trunkline {

enum class KVFormat : int32_t { ELEMENTS = 0, INT8 = 1, FP8 = 2 };

constexpr int MAX_HEAD_DIM = 256;
constexpr uint16_t NAN_SCALE = 0x7fc0, LEAST_SCALE = 0x0080;  // bf16; the second is the least normal number
constexpr uint32_t INFINITE_BITS = 0x7f800000;

struct RecordShape {
  KVFormat format;
  int block_size, head_dim;

  size_t value_bytes() const { return format == KVFormat::ELEMENTS ? sizeof(Element) : 1; }
  size_t token_bytes() const { return head_dim * value_bytes(); }  // without its scale
  size_t num_bytes() const {
    return block_size * (token_bytes() + (format == KVFormat::INT8 ? sizeof(uint16_t) : 0));
  }
};

INLINE float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float x;
  memcpy(&x, &wide, 4);
  return x;
}

INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// gcc takes vectors of bytes apart, one by one, where it converts them itself
#ifdef __AVX512F__
INLINE Ints load_signed_bytes(const uint8_t* p) { return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE Ints load_bytes(const uint8_t* p) { return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE void store_low_bytes(uint8_t* p, Ints x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }
#else
INLINE Ints load_signed_bytes(const uint8_t* p) { return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE Ints load_bytes(const uint8_t* p) { return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE void store_low_bytes(uint8_t* p, Ints x) {
  for (int i = 0; i < LANES; i++) p[i] = uint8_t(x[i]);
}
#endif

INLINE Floats load_elements(const Element* p) {
#if !ELEMENT_IS_BF16
  return load(p);
#elif defined(__AVX512F__)
  return (Floats)((Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#else
  return (Floats)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#endif
}

// LANES values to numbers.
template <KVFormat F>
INLINE Floats widen(const uint8_t* p) {
  if constexpr (F == KVFormat::INT8) {
    return __builtin_convertvector(load_signed_bytes(p), Floats);
  } else {
    const Ints bits = load_bytes(p), magnitude = bits & 0x7f;
    // not by way of numbers below 2^-126, which some processors take a hundred times as long for
    const Floats small = __builtin_convertvector(magnitude, Floats) * 0x1p-9f;
    Ints x = magnitude < 8 ? (Ints)small : (magnitude << 20) + (120 << 23);
    x = magnitude == 0x7f ? (Ints)all(NAN) : x;
    return (Floats)(x | (bits & 0x80) << 24);
  }
}

// `count` tokens of a record from `first` on to elements, [count][head_dim].
template <KVFormat F>
INLINE void read_record(const RecordShape& shape, const char* record, int first, int count, Element* out) {
  const int head_dim = shape.head_dim;
  const uint8_t* values = (const uint8_t*)record + size_t(first) * head_dim;
  const uint16_t* scales = (const uint16_t*)(record + size_t(shape.block_size) * head_dim) + first;
  for (int token = 0; token < count; token++, values += head_dim, out += head_dim) {
    const Floats scale = all(F == KVFormat::INT8 ? from_bf16(scales[token]) : 1.f);
    const auto read = [&](const uint8_t* from) {
      return F == KVFormat::INT8 ? widen<F>(from) * scale : widen<F>(from);
    };
    int i = 0;
    for (; i + LANES <= head_dim; i += LANES) store_elements(out + i, read(values + i));
    if (i < head_dim) {
      alignas(64) uint8_t left[LANES] = {};
      Element numbers[LANES];
      memcpy(left, values + i, head_dim - i);
      store_elements(numbers, read(left));
      memcpy(out + i, numbers, (head_dim - i) * sizeof(Element));
    }
  }
}

INLINE Ints magnitude_bits(Floats x) { return (Ints)x & 0x7fffffff; }

// In the low bytes.
INLINE Ints to_int8(Floats x, Floats scale) { return (Ints)(x / scale + NEAREST); }

INLINE Ints to_fp8(Floats x) {
  const Ints bits = magnitude_bits(x), largest = all_ints(0x43e00000);  // 448
  const Ints kept = bits < largest ? bits : largest;
  const Ints normal = ((kept + 0x7ffff + (kept >> 20 & 1)) >> 20) - (120 << 3);
  const Ints small = (Ints)((Floats)kept * 512.f + NEAREST) & 0xff;
  const Ints sign = (Ints)((Words)x >> 24) & 0x80;
  const Ints rounded = (kept < 0x3c800000 ? small : normal) | sign;  // 2^-6
  return bits < int32_t(INFINITE_BITS) ? rounded : all_ints(0x7f);
}

// The token's elements, zeros behind the last up to a multiple of LANES, into the record.
INLINE void write_record(const RecordShape& shape, char* record, int token, const Element* x) {
  const int head_dim = shape.head_dim;
  uint8_t* values = (uint8_t*)record + size_t(token) * head_dim;
  alignas(64) uint8_t bytes[MAX_HEAD_DIM];
  if (shape.format == KVFormat::FP8) {
    for (int i = 0; i < head_dim; i += LANES) store_low_bytes(bytes + i, to_fp8(load_elements(x + i)));
  } else {
    Ints most{};
    for (int i = 0; i < head_dim; i += LANES) {
      const Ints bits = magnitude_bits(load_elements(x + i));
      most = bits > most ? bits : most;
    }
    uint32_t largest_bits = 0;
    for (int i = 0; i < LANES; i++) largest_bits = std::max(largest_bits, uint32_t(most[i]));
    float largest;
    memcpy(&largest, &largest_bits, 4);
    uint16_t scale = largest_bits < INFINITE_BITS ? to_bf16(largest / 127.f) : NAN_SCALE;
    if (scale < LEAST_SCALE) scale = 0;
    if (scale == 0 || scale == NAN_SCALE) {
      memset(bytes, 0, head_dim);
    } else {
      const Floats step = all(from_bf16(scale));
      for (int i = 0; i < head_dim; i += LANES) store_low_bytes(bytes + i, to_int8(load_elements(x + i), step));
    }
    memcpy(record + size_t(shape.block_size) * head_dim + token * sizeof scale, &scale, sizeof scale);
  }
  memcpy(values, bytes, head_dim);
}

}  // namespace trunkline
