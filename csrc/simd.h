// SPDX-License-Identifier: Apache-2.0
// Vectors by compiler extension: one source for every width. `Simd<C>` is a vector of C, LINBIAS_VECTOR_BYTES wide;
// comparisons give integer vectors of 0 and -1.
#pragma once

#include <cmath>
#include <cstring>
#include <utility>

#include "call.h"
#include "variant.h"

namespace linbias::LINBIAS_VARIANT {

template <class C>
struct Simd;

template <>
struct Simd<float> {
  typedef float V __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  typedef int32_t I __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  typedef uint8_t Bytes __attribute__((vector_size(LINBIAS_VECTOR_BYTES / 4)));
  using Int = int32_t;
  static constexpr int mantissa = 23;
  static constexpr Int bias = 127;
};

template <>
struct Simd<double> {
  typedef double V __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  typedef int64_t I __attribute__((vector_size(LINBIAS_VECTOR_BYTES)));
  typedef uint8_t Bytes __attribute__((vector_size(LINBIAS_VECTOR_BYTES / 8)));
  using Int = int64_t;
  static constexpr int mantissa = 52;
  static constexpr Int bias = 1023;
};

template <class C>
using Vec = typename Simd<C>::V;
template <class C>
using Mask = typename Simd<C>::I;
template <class C>
constexpr int kLanes = LINBIAS_VECTOR_BYTES / sizeof(C);
// Columns of a panel: one cache line of keys, whatever the width of a vector.
template <class C>
constexpr int kPanel = 64 / sizeof(C);
template <class C>
constexpr int kPanelVecs = 64 / LINBIAS_VECTOR_BYTES;
template <class C>
constexpr C kInf = C(__builtin_inf());

template <class C>
LINBIAS_INLINE Vec<C> load(const C* p) {
  Vec<C> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class C>
LINBIAS_INLINE void store(C* p, Vec<C> v) {
  std::memcpy(p, &v, sizeof v);
}

template <class C>
LINBIAS_INLINE Mask<C> load_mask(const typename Simd<C>::Int* p) {
  Mask<C> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// 0 -> 0, anything else -> -1, one byte a lane.
template <class C>
LINBIAS_INLINE Mask<C> load_mask_bytes(const uint8_t* p) {
  typename Simd<C>::Bytes b;
  std::memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, Mask<C>) != 0;
}

template <class C>
LINBIAS_INLINE Vec<C> splat(C x) {
  return Vec<C>{} + x;
}

// `a` where it exceeds `b`, else `b`: a NaN in b stays.
template <class C>
LINBIAS_INLINE Vec<C> max_keep(Vec<C> a, Vec<C> b) {
#if defined(__AVX2__) && LINBIAS_VECTOR_BYTES == 32
  // Not by <immintrin.h>, which every file would spend most of a second to parse.
  if constexpr (sizeof(C) == 4) return __builtin_ia32_maxps256(a, b);
  if constexpr (sizeof(C) == 8) return __builtin_ia32_maxpd256(a, b);
#endif
  return a > b ? a : b;
}

template <class C>
LINBIAS_INLINE Vec<C> min_keep(Vec<C> a, Vec<C> b) {
  return a < b ? a : b;
}

template <class C>
LINBIAS_INLINE Vec<C> bits_and(Vec<C> a, Mask<C> m) {
  return (Vec<C>)((Mask<C>)a & m);
}

template <class C>
LINBIAS_INLINE Vec<C> absolute(Vec<C> a) {
  constexpr typename Simd<C>::Int keep = sizeof(C) == 4 ? INT32_MAX : typename Simd<C>::Int(INT64_MAX);
  return bits_and<C>(a, Mask<C>{} + keep);
}

// The lanes of v, each exchanged with the one whose number differs in the bit `By`.
template <class C, int By, std::size_t... I>
LINBIAS_INLINE Vec<C> swap_lanes(Vec<C> v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, (int(I) ^ By)...);
}

template <class C, int By = kLanes<C> / 2>
LINBIAS_INLINE C sum_lanes(Vec<C> v) {
  v += swap_lanes<C, By>(v, std::make_index_sequence<kLanes<C>>());
  if constexpr (By > 1) return sum_lanes<C, By / 2>(v);
  return v[0];
}

template <class C, int By = kLanes<C> / 2>
LINBIAS_INLINE C max_lanes(Vec<C> v) {
  v = max_keep<C>(swap_lanes<C, By>(v, std::make_index_sequence<kLanes<C>>()), v);
  if constexpr (By > 1) return max_lanes<C, By / 2>(v);
  return v[0];
}

// (2**f - 1) / f for |f| <= 1/2: minimax in the relative error of 2**f with the constant term held at exactly 1, so
// that 2**0 is 1; 2.6e-9 for float (degree 6 in all), 1.8e-17 for double (degree 11).
template <class C>
LINBIAS_INLINE Vec<C> exp2_slope(Vec<C> f) {
  if constexpr (sizeof(C) == 4) {
    Vec<C> p = splat<C>(0.00015594678161326619f);
    p = p * f + 0.0013406643902351759f;
    p = p * f + 0.0096176929729930626f;
    p = p * f + 0.055503105510137972f;
    p = p * f + 0.24022652782887738f;
    return p * f + 0.69314721496802790f;
  } else {
    Vec<C> p = splat<C>(4.078071929588336665e-10);
    p = p * f + 7.0725704128144235096e-9;
    p = p * f + 1.0180647659234138888e-7;
    p = p * f + 1.3215442675329822143e-6;
    p = p * f + 0.000015252727385193868197;
    p = p * f + 0.0001540353044157213033;
    p = p * f + 0.0013333558153439964747;
    p = p * f + 0.0096181291076070023796;
    p = p * f + 0.055504108664790394552;
    p = p * f + 0.24022650695910098007;
    return p * f + 0.69314718055994569675;
  }
}

// Splits x log2(e), within the exponent's range, into an exact power of two and a rest f in [-1/2, 1/2]. One fused
// product forms f, so the log2(e) factor costs no digits where x is small.
template <class C>
LINBIAS_INLINE Vec<C> exp_split(Vec<C> x, Vec<C>& f) {
  // Adding 1.5 * 2**mantissa rounds to an integer; adding the exponent bias as well leaves n + bias in the low bits,
  // which a shift turns into the float 2**n, and -bias into exactly 0.
  constexpr C magic = C(3) * C(int64_t(1) << (Simd<C>::mantissa - 1)) + C(Simd<C>::bias);
  constexpr C log2e = C(1.44269504088896340736);
  Vec<C> t = x * log2e + magic;
#if LINBIAS_FUSED
  f = x * log2e - (t - magic);
#else
  // n * high is exact for every n in range: high keeps only the leading bits of ln 2.
  constexpr C high = C(sizeof(C) == 4 ? 0.693359375 : 0.693145751953125);
  constexpr C low = C(sizeof(C) == 4 ? -2.12194440054690583e-4 : 1.42860682030941723212e-6);
  const Vec<C> n = t - magic;
  f = (x - n * high - n * low) * log2e;
#endif
  return (Vec<C>)((Mask<C>)t << Simd<C>::mantissa);
}

// exp(x) for x up to 80. Exactly 0 below the exponent's range, which includes -inf; NaN stays NaN, whatever its payload.
template <class C>
LINBIAS_INLINE Vec<C> exp_lanes(Vec<C> x) {
  constexpr C lowest = C(sizeof(C) == 4 ? -88.03 : -709.0896);  // -bias * ln 2, which splits into 2**-bias, that is 0
  x = max_keep<C>(splat<C>(lowest), x);
  Vec<C> f, two_n = exp_split<C>(x, f);
  return (exp2_slope<C>(f) * f + C(1)) * two_n;
}

// exp(x), held within the range of normal numbers: never 0, never infinite; NaN stays NaN.
template <class C>
LINBIAS_INLINE Vec<C> exp_held(Vec<C> x) {
  constexpr C limit = C(sizeof(C) == 4 ? 87 : 708);
  x = max_keep<C>(splat<C>(-limit), min_keep<C>(splat<C>(limit), x));
  Vec<C> f, two_n = exp_split<C>(x, f);
  return (exp2_slope<C>(f) * f + C(1)) * two_n;
}

// tanh(x) = e / (e + 2) with e = exp(2|x|) - 1 formed without cancellation, and x's sign.
template <class C>
LINBIAS_INLINE Vec<C> tanh_lanes(Vec<C> x) {
  constexpr C far = C(sizeof(C) == 4 ? 20 : 40);  // tanh is 1 to the last digit long before
  Vec<C> y = min_keep<C>(splat<C>(far), absolute<C>(x) * C(2));
  Vec<C> f, two_n = exp_split<C>(y, f);
  Vec<C> e = exp2_slope<C>(f) * f * two_n + (two_n - C(1));
  Vec<C> t = e / (e + C(2));
  Mask<C> sign = (Mask<C>)x ^ (Mask<C>)absolute<C>(x);
  return (Vec<C>)((Mask<C>)t | sign);
}

}  // namespace linbias::LINBIAS_VARIANT
