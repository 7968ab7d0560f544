// SPDX-License-Identifier: Apache-2.0
// Keys and values in the form the products read, converted on the way; and the norms that bounds are made of.
#pragma once

#include "arena.h"
#include "elements.h"
#include "spans.h"

namespace linbias::LINBIAS_VARIANT {

// Rows and columns of one (b, head): element (i, d) = data[i * row + d * step].
template <class X>
struct Rows {
  const X* data;
  int64_t row, step;

  const X* at(int64_t i) const { return data + i * row; }
};

template <class X>
LINBIAS_INLINE Rows<X> rows_of(const Array<X>& array, int64_t b, int64_t head) {
  return {array.at(b, head), array.stride[2], array.stride[3]};
}

// One round of a transpose: rows i and i + L/2 interleaved into rows 2i and 2i + 1.
template <class C, std::size_t... I>
LINBIAS_INLINE void interleave(const Vec<C>* in, Vec<C>* out, std::index_sequence<I...>) {
  constexpr int L = kLanes<C>;
  const Mask<C> low{int(I / 2 + (I % 2) * L)...}, high{int(L / 2 + I / 2 + (I % 2) * L)...};
#pragma GCC unroll 16
  for (int i = 0; i < L / 2; ++i) {
    out[2 * i] = __builtin_shuffle(in[i], in[i + L / 2], low);
    out[2 * i + 1] = __builtin_shuffle(in[i], in[i + L / 2], high);
  }
}

// L rows of L elements from `in`, transposed to out[lane of row] with rows `panel` apart.
template <class X, class C>
LINBIAS_INLINE void transpose_block(const Rows<X>& in, int64_t first, int64_t d, C* out) {
  constexpr int L = kLanes<C>;
  Vec<C> a[L], t[L];
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) a[i] = load_widened<C>(in.at(first + i) + d);
#pragma GCC unroll 4
  for (int width = L; width > 1; width /= 2) {
    interleave<C>(a, t, std::make_index_sequence<L>());
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) a[i] = t[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) store<C>(out + i * kPanel<C>, a[i]);
}

// Rows [first, first + count) as panels: out[panel][d][lane]; rows beyond `count` are 0.
template <class X, class C>
inline void pack_panels(const Rows<X>& in, int64_t first, int count, int64_t D, C* out) {
  constexpr int L = kLanes<C>, W = kPanel<C>;
  for (int p = 0; p < kTile / W; ++p, out += D * W) {
    int inside = lesser(W, greater(0, count - p * W));
    int64_t row = first + p * W, d = 0;
    if (inside == 0) {
      std::memset(out, 0, static_cast<std::size_t>(D * W) * sizeof(C));
      continue;
    }
    if (inside == W && in.step == 1)
      for (; d + L <= D; d += L)
        for (int i = 0; i < W; i += L) transpose_block<X, C>(in, row + i, d, out + d * W + i);
    for (; d < D; ++d)
      for (int i = 0; i < W; ++i) out[d * W + i] = i < inside ? C(widen(in.at(row + i)[d * in.step])) : C(0);
  }
}

// Rows [first, first + count) widened, `width` apart and padded with 0 to it.
template <class X, class C>
inline void pack_rows(const Rows<X>& in, int64_t first, int count, int64_t D, int64_t width, C* out) {
  for (int i = 0; i < count; ++i, out += width) {
    widen_row<X, C>(in.at(first + i), in.step, D, out);
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

// The larger of the two; NaN once either is.
template <class C>
LINBIAS_INLINE C larger_or_nan(C a, C b) {
  return b > a || b != b ? b : a;
}

// Packed key tiles, and value tiles where they cannot be used in place, of one (b, g). A tile is packed when first
// visited; with fewer slots than tiles a slot serves the tiles that are congruent to it, which suits the local order in
// which ALiBi visits them.
template <class X, class C>
class TileCache {
 public:
  void reset(const Call& call, int64_t slots, bool keys) {
    slots_ = slots;
    width_ = round_up(call.V, kPanel<C>);
    in_place_ = sizeof(X) == sizeof(C) && call.value.stride[3] == 1 && width_ == call.V;
    D_ = call.D, V_ = call.V, S_ = call.S;
    if (keys) keys_.reset(slots * kTile * D_);
    if (!in_place_) values_.reset(slots * kTile * width_);
    key_tags_.reset(slots), value_tags_.reset(slots);
  }

  // Forgets what belongs to another head.
  void bind(const Call& call, int64_t b, int64_t g) {
    if (b == b_ && g == g_) return;
    b_ = b, g_ = g;
    key_rows_ = rows_of(call.key.as<X>(), b, g);
    value_rows_ = rows_of(call.value.as<X>(), b, g);
    for (int64_t i = 0; i < slots_; ++i) key_tags_[i] = value_tags_[i] = -1;
  }

  const Rows<X>& key_rows() const { return key_rows_; }
  // Elements between packed value rows, and between panels of them.
  int64_t value_width() const { return width_; }

  // Panels of the tile's keys: [panel][D][lane].
  const C* keys(int64_t tile) {
    int64_t slot = tile % slots_;
    C* packed = keys_.data() + slot * kTile * D_;
    if (key_tags_[slot] != tile) {
      pack_panels<X, C>(key_rows_, tile * kTile, count(tile), D_, packed);
      key_tags_[slot] = tile;
    }
    return packed;
  }

  // Asks for value rows [first, last) of the tile, which are read panel by panel, a pattern that the hardware does not
  // foresee.
  LINBIAS_INLINE void prefetch_values(int64_t tile, int first, int last) const {
    if (value_rows_.step == 1) prefetch_rows(value_rows_, tile, first, last, V_);
  }
  LINBIAS_INLINE void prefetch_keys(int64_t tile, int first, int last) const { prefetch_rows(key_rows_, tile, first, last, D_); }

  // The tile's value rows and the distance between them.
  const C* values(int64_t tile, int64_t* row) {
    if (in_place_) {
      *row = value_rows_.row;
      return reinterpret_cast<const C*>(value_rows_.at(tile * kTile));
    }
    int64_t slot = tile % slots_;
    C* packed = values_.data() + slot * kTile * width_;
    if (value_tags_[slot] != tile) {
      pack_rows<X, C>(value_rows_, tile * kTile, count(tile), V_, width_, packed);
      value_tags_[slot] = tile;
    }
    *row = width_;
    return packed;
  }

 private:
  // Always inline: gcc takes a function that only prefetches for one without effect and drops its calls.
  LINBIAS_INLINE void prefetch_rows(const Rows<X>& rows, int64_t tile, int first, int last, int64_t width) const {
    constexpr int64_t line = 64 / sizeof(X);
    for (int i = first; i < lesser(last, count(tile)); ++i)
      for (int64_t d = 0; d < width; d += line) __builtin_prefetch(rows.at(tile * kTile + i) + d);
  }
  int count(int64_t tile) const { return int(lesser<int64_t>(kTile, S_ - tile * kTile)); }

  int64_t b_ = -1, g_ = -1, slots_ = 0, width_ = 0, D_ = 0, V_ = 0, S_ = 0;
  bool in_place_ = false;
  Rows<X> key_rows_{}, value_rows_{};
  Buffer<C> keys_, values_;
  Buffer<int64_t> key_tags_, value_tags_;
};

}  // namespace linbias::LINBIAS_VARIANT
