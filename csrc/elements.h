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
  // Exponent and mantissa moved into place are the value times 2**-112, subnormals included.
  uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  float value = from_bits(magnitude) * from_bits(0x77800000);  // 2**112
  uint32_t bits = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : to_bits(value);  // inf and NaN
  return from_bits(bits | uint32_t(x.bits & 0x8000) << 16);
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
    // Below 2**-14 the result is a multiple of 2**-24: adding 0.5 leaves that multiple, rounded, in the low bits.
    half = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000;
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
#else
  typedef uint16_t U16 __attribute__((vector_size(LINBIAS_VECTOR_BYTES / 2)));
  U16 half;
  std::memcpy(&half, p, sizeof half);
  Mask<float> bits = __builtin_convertvector(half, Mask<float>);
  Mask<float> magnitude = (bits & 0x7fff) << 13;
  Mask<float> scaled = (Mask<float>)((Vec<float>)magnitude * from_bits(0x77800000));
  Mask<float> special = magnitude >= 0x0f800000;
  Mask<float> value = (special & (magnitude | 0x7f800000)) | (~special & scaled);
  return (Vec<float>)(value | (bits & 0x8000) << 16);
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
