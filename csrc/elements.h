// SPDX-License-Identifier: Apache-2.0
// Element types of the inputs and their conversion to and from the compute type; half types are read exactly and
// rounded once, to nearest even, when a result is stored.
#pragma once

#include "simd.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace linbias::LINBIAS_VARIANT {

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class X>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

LINBIAS_INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

LINBIAS_INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

LINBIAS_INLINE float widen(float x) { return x; }
LINBIAS_INLINE double widen(double x) { return x; }
LINBIAS_INLINE float widen(Bf16 x) { return from_bits(uint32_t(x.bits) << 16); }
LINBIAS_INLINE float widen(Half x) {
  // No number on the way is subnormal, which a mode of the processor would read as 0: a subnormal half is a count of
  // 2**-24, any other one keeps its mantissa and gets the exponent of a float.
  const uint32_t magnitude = x.bits & 0x7fff;
  const uint32_t small = to_bits(float(magnitude) * from_bits(0x33800000));  // 2**-24
  const uint32_t large = (magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000 : 0x38000000);  // inf and NaN
  return from_bits((magnitude < 0x0400 ? small : large) | uint32_t(x.bits & 0x8000) << 16);
}

LINBIAS_INLINE void narrow(float x, float* out) { *out = x; }
LINBIAS_INLINE void narrow(double x, double* out) { *out = x; }
LINBIAS_INLINE void narrow(float x, Bf16* out) {
  uint32_t bits = to_bits(x);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  out->bits = uint16_t(x == x ? rounded : (bits >> 16 | 0x40));
}
inline void narrow(float x, Half* out) {
  uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {
    half = 0x7c00;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000) {
    // Below 2**-14 the result is a count of 2**-24.
    const uint32_t shift = 126 - (magnitude >> 23), mantissa = (magnitude & 0x7fffff) | 0x800000;
    half = shift > 25 ? 0 : (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  out->bits = uint16_t(half | sign);
}

template <class C>
LINBIAS_INLINE Vec<C> load_widened(const C* p) {
  return load<C>(p);
}

template <class C>
LINBIAS_INLINE Vec<float> load_widened(const Bf16* p) {
  typedef uint16_t U16 __attribute__((vector_size(LINBIAS_VECTOR_BYTES / 2)));
  U16 half;
  std::memcpy(&half, p, sizeof half);
  return (Vec<float>)(__builtin_convertvector(half, Mask<float>) << 16);
}

template <class C>
LINBIAS_INLINE Vec<float> load_widened(const Half* p) {
#if defined(__F16C__) && LINBIAS_VECTOR_BYTES == 32
  __m128i half;
  std::memcpy(&half, p, sizeof half);
  return (Vec<float>)_mm256_cvtph_ps(half);
#elif defined(__AVX512F__) && LINBIAS_VECTOR_BYTES == 64
  __m256i half;
  std::memcpy(&half, p, sizeof half);
  return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, half);
#else
  typedef uint16_t U16 __attribute__((vector_size(LINBIAS_VECTOR_BYTES / 2)));
  U16 half;
  std::memcpy(&half, p, sizeof half);
  const Mask<float> bits = __builtin_convertvector(half, Mask<float>), magnitude = bits & 0x7fff;
  const Mask<float> small = (Mask<float>)(__builtin_convertvector(magnitude, Vec<float>) * from_bits(0x33800000));
  const Mask<float> large = (magnitude << 13) + 0x38000000 + ((magnitude >= 0x7c00) & 0x38000000);
  const Mask<float> subnormal = magnitude < 0x0400;
  return (Vec<float>)((subnormal & small) | (~subnormal & large) | (bits & 0x8000) << 16);
#endif
}

template <class C>
LINBIAS_INLINE void store_narrowed(C* p, Vec<C> x) {
  store<C>(p, x);
}

template <class C>
LINBIAS_INLINE void store_narrowed(Bf16* p, Vec<float> x) {
  typedef uint16_t U16 __attribute__((vector_size(LINBIAS_VECTOR_BYTES / 2)));
  typedef uint32_t U32 __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  const U32 bits = (U32)x, high = bits >> 16, number = (U32)(x == x);
  const U32 rounded = (bits + 0x7fff + (high & 1)) >> 16;
  const U16 half = __builtin_convertvector((number & rounded) | (~number & (high | 0x40)), U16);
  std::memcpy(p, &half, sizeof half);
}

template <class C>
LINBIAS_INLINE void store_narrowed(Half* p, Vec<float> x) {
#if defined(__F16C__) && LINBIAS_VECTOR_BYTES == 32
  const __m128i half = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, sizeof half);
#elif defined(__AVX512F__) && LINBIAS_VECTOR_BYTES == 64
  const __m256i half = _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, sizeof half);
#else
  for (int lane = 0; lane < kLanes<float>; ++lane) narrow(x[lane], p + lane);
#endif
}

// out[0..n) = in[0..n) * factor; `step` elements from one of `in` to the next.
template <class X, class C>
inline void widen_row(const X* in, int64_t step, int64_t n, C factor, C* out) {
  int64_t i = 0;
  if (step == 1)
    for (; i + kLanes<C> <= n; i += kLanes<C>) store<C>(out + i, load_widened<C>(in + i) * factor);
  for (; i < n; ++i) out[i] = widen(in[i * step]) * factor;
}

// out[0..n) = in[0..n) * factor, rounded.
template <class X, class C>
inline void narrow_row(const C* in, int64_t n, C factor, X* out) {
  int64_t i = 0;
  for (; i + kLanes<C> <= n; i += kLanes<C>) store_narrowed<C>(out + i, load<C>(in + i) * factor);
  for (; i < n; ++i) narrow(in[i] * factor, out + i);
}

}  // namespace linbias::LINBIAS_VARIANT
