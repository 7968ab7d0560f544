// SPDX-License-Identifier: Apache-2.0
// Keys and values in the form the products read, converted on the way; and the norms that bounds are made of: all that
// depends on the type of the elements.
#pragma once

#include "codec.h"
#include "elements.h"

namespace linbias::LINBIAS_VARIANT {

template <class X>
LINBIAS_INLINE const X* row_of(const Rows& rows, int64_t i) {
  return reinterpret_cast<const X*>(rows.at(i));
}

// One round of a transpose: rows i and i + L/2 interleaved into rows 2i and 2i + 1.
template <class C, std::size_t... I>
LINBIAS_INLINE void interleave(const Vec<C>* in, Vec<C>* out, std::index_sequence<I...>) {
  constexpr int L = kLanes<C>;
#pragma GCC unroll 16
  for (int i = 0; i < L / 2; ++i) {
    out[2 * i] = __builtin_shufflevector(in[i], in[i + L / 2], int(I / 2 + (I % 2) * L)...);
    out[2 * i + 1] = __builtin_shufflevector(in[i], in[i + L / 2], int(L / 2 + I / 2 + (I % 2) * L)...);
  }
}

// L rows of L elements from `in`, transposed to out[lane of row] with rows `panel` apart.
template <class X, class C>
LINBIAS_INLINE void transpose_block(const Rows& in, int64_t first, int64_t d, C* out) {
  constexpr int L = kLanes<C>;
  Vec<C> a[L], t[L];
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) a[i] = load_widened<C>(row_of<X>(in, first + i) + d);
#pragma GCC unroll 4
  for (int width = L; width > 1; width /= 2) {
    interleave<C>(a, t, std::make_index_sequence<L>());
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) a[i] = t[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) store<C>(out + i * kPanel<C>, a[i]);
}

// Rows [first, first + count) as panels: out[panel][d][lane]; the last of them is padded with 0.
template <class X, class C>
inline void pack_panels(const Rows& in, int64_t first, int count, int64_t D, C* out) {
  constexpr int L = kLanes<C>, W = kPanel<C>;
  for (int p = 0; p * W < count; ++p, out += D * W) {
    const int inside = lesser(W, count - p * W);
    int64_t row = first + p * W, d = 0;
    if (inside == W && in.step == 1)
      for (; d + L <= D; d += L)
        for (int i = 0; i < W; i += L) transpose_block<X, C>(in, row + i, d, out + d * W + i);
    for (; d < D; ++d)
      for (int i = 0; i < W; ++i) out[d * W + i] = i < inside ? C(widen(row_of<X>(in, row + i)[d * in.step])) : C(0);
  }
}

// Rows [first, first + count) widened, `width` apart and padded with 0 to it.
template <class X, class C>
inline void pack_rows(const Rows& in, int64_t first, int count, int64_t D, int64_t width, C* out) {
  for (int i = 0; i < count; ++i, out += width) {
    widen_row<X, C>(row_of<X>(in, first + i), in.step, D, C(1), out);
    for (int64_t d = D; d < width; ++d) out[d] = 0;
  }
}

// An upper bound of the Euclidean norm of n elements; NaN if one is NaN.
template <class X, class C>
inline C norm_bound(const X* x, int64_t step, int64_t n) {
  constexpr int L = kLanes<C>;
  Vec<C> sums = {}, more = {};
  int64_t i = 0;
  if (step == 1) {
    for (; i + 2 * L <= n; i += 2 * L) {
      const Vec<C> v = load_widened<C>(x + i), w = load_widened<C>(x + i + L);
      sums += v * v, more += w * w;
    }
    sums += more;
  }
  C sum = sum_lanes<C>(sums);
  for (; i < n; ++i) sum += C(widen(x[i * step])) * C(widen(x[i * step]));
  // Rounding of n products and sums loses at most n + 2 halves of eps; a few more are free.
  const C inflate = 1 + C(n + 8) * (sizeof(C) == 4 ? C(1.2e-7) : C(2.3e-16));
  constexpr C safe_low = sizeof(C) == 4 ? C(1e-25) : C(1e-250), safe_high = sizeof(C) == 4 ? C(1e37) : C(1e300);
  if (sum > safe_low && sum < safe_high) return std::sqrt(sum) * inflate;
  // Squares may have underflowed or overflowed: the largest element times sqrt(n) bounds the norm without squaring.
  C most = 0;
  bool nan = false;
  for (i = 0; i < n; ++i) {
    C v = std::fabs(C(widen(x[i * step])));
    most = v > most ? v : most;
    nan = nan || v != v;
  }
  return nan ? C(__builtin_nan("")) : most * (std::sqrt(C(n)) * inflate);
}

template <class X, class C>
inline C largest_norm(const Rows& in, int64_t first, int64_t last, int64_t n, const uint8_t* mask, int64_t mask_step) {
  C most = 0;
  for (int64_t i = first; i < last; ++i)
    if (!mask || mask[i * mask_step]) most = larger_or_nan(most, norm_bound<X, C>(row_of<X>(in, i), in.step, n));
  return most;
}

template <class X, class C = typename Accumulator<X>::type>
inline const Codec<C>& codec_of() {
  static const Codec<C> codec = {
      sizeof(X),
      sizeof(X) == sizeof(C),
      [](const void* in, int64_t step, int64_t n, C factor, C* out) {
        widen_row<X, C>(static_cast<const X*>(in), step, n, factor, out);
      },
      [](const C* in, int64_t n, C factor, void* out) { narrow_row<X, C>(in, n, factor, static_cast<X*>(out)); },
      [](const void* in, int64_t step, int64_t n) { return norm_bound<X, C>(static_cast<const X*>(in), step, n); },
      largest_norm<X, C>,
      pack_panels<X, C>,
      pack_rows<X, C>,
  };
  return codec;
}

}  // namespace linbias::LINBIAS_VARIANT
