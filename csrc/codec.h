// SPDX-License-Identifier: Apache-2.0
// How the workers reach the inputs: they are compiled once for each compute type C, and what depends on the type of the
// elements stands behind these functions, each of which does a row or a tile of work a call. pack.h fills them.
#pragma once

#include "arena.h"
#include "call.h"
#include "simd.h"

namespace linbias::LINBIAS_VARIANT {

constexpr int kTile = 64;  // keys of a tile

// Rows of one (b, head): element d of row i lies d * step elements of `bytes` bytes behind at(i).
struct Rows {
  const char* data = nullptr;
  int64_t row = 0, step = 0, bytes = 0;

  const char* at(int64_t i) const { return data + i * row * bytes; }
};

// Keys or values of one (b, head) where they lie: in one stretch, or a stretch a page.
struct Source {
  const Call* call = nullptr;
  Rows rows;  // of the stretch, or of page 0
  int64_t b = 0, apart = 0;  // `apart` elements from one page to the next

  // Rows from row i on, and how many of them follow in the same stretch.
  LINBIAS_INLINE Rows from(int64_t i, int64_t* count) const {
    const int64_t page = call->page;
    *count = int64_t(1) << 62;
    Rows found = rows;
    if (page == 0) {
      found.data = rows.at(i);
      return found;
    }
    const int64_t n = i / page, inside = i - n * page;
    *count = page - inside;
    found.data = rows.at(inside) + call->page_of(b, n) * apart * rows.bytes;
    return found;
  }
};

template <class C>
struct Codec {
  int64_t bytes;  // of an element
  bool plain;     // elements are C: they can be used where they lie

  Source source(const Call& call, const Array<void>& array, int64_t b, int64_t head) const {
    const Rows rows{array.at(bytes, call.page ? 0 : b, head), array.stride[2], array.stride[3], bytes};
    return {&call, rows, b, array.stride[0]};
  }

  // out[0..n) = in[0..n) * factor; `step` elements from one of `in` to the next.
  void (*widen)(const void* in, int64_t step, int64_t n, C factor, C* out);
  // The same the other way, rounded once.
  void (*narrow)(const C* in, int64_t n, C factor, void* out);
  // An upper bound of the Euclidean norm of n elements; NaN if one is NaN.
  C (*norm_bound)(const void* in, int64_t step, int64_t n);
  // The largest of the bounds of rows [first, last), without those that `mask` (null: none) has 0 for.
  C (*largest_norm)(const Rows& in, int64_t first, int64_t last, int64_t n, const uint8_t* mask, int64_t mask_step);
  // Rows [first, first + count) as panels: out[panel][d][lane]; the last of them is padded with 0.
  void (*pack_panels)(const Rows& in, int64_t first, int count, int64_t n, C* out);
  // Rows [first, first + count), `width` apart and padded with 0 to it.
  void (*pack_rows)(const Rows& in, int64_t first, int count, int64_t n, int64_t width, C* out);
};

// The larger of the two; NaN once either is.
template <class C>
LINBIAS_INLINE C larger_or_nan(C a, C b) {
  return b > a || b != b ? b : a;
}
template <class C>
LINBIAS_INLINE C smaller_or_nan(C a, C b) {
  return b < a || b != b ? b : a;
}

}  // namespace linbias::LINBIAS_VARIANT
