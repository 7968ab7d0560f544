// SPDX-License-Identifier: Apache-2.0
// The tiles of one head's keys or values in the form the products read, packed when first needed.
#pragma once

#include "spans.h"

namespace linbias::LINBIAS_VARIANT {

enum Packing { as_rows = 1, as_panels = 2 };

// With fewer slots than tiles a slot serves the tiles that are congruent to it, which suits the local order in which
// ALiBi visits them.
template <class C>
class TileCache {
 public:
  // `array`: (B, G, S, D). Rows are `row_width` apart, D or more; they are used in place where they already are.
  void reset(const Codec<C>& codec, const Array<void>& array, int64_t S, int64_t D, int64_t row_width, int64_t slots,
             int packings) {
    codec_ = &codec, array_ = &array;
    slots_ = slots, width_ = row_width, D_ = D, S_ = S, b_ = g_ = -1;
    in_place_ = codec.plain && array.stride[3] == 1 && width_ == D;
    panels_.reset(packings & as_panels ? slots * kTile * D : 0);
    rows_.reset(packings & as_rows && !in_place_ ? slots * kTile * width_ : 0);
    panel_tags_.reset(slots), row_tags_.reset(slots);
  }

  // Forgets what belongs to another head.
  void bind(int64_t b, int64_t g) {
    if (b == b_ && g == g_) return;
    b_ = b, g_ = g;
    source_ = codec_->rows(*array_, b, g);
    for (int64_t i = 0; i < slots_; ++i) panel_tags_[i] = row_tags_[i] = -1;
  }

  // [panel][D][lane].
  const C* panels(int64_t tile) {
    const int64_t slot = tile % slots_;
    C* packed = panels_.data() + slot * kTile * D_;
    if (panel_tags_[slot] != tile) codec_->pack_panels(source_, tile * kTile, count(tile), D_, packed);
    panel_tags_[slot] = tile;
    return packed;
  }

  // Row by row, and the distance between rows.
  const C* rows(int64_t tile, int64_t* row) {
    *row = in_place_ ? source_.row : width_;
    if (in_place_) return reinterpret_cast<const C*>(source_.at(tile * kTile));
    const int64_t slot = tile % slots_;
    C* packed = rows_.data() + slot * kTile * width_;
    if (row_tags_[slot] != tile) codec_->pack_rows(source_, tile * kTile, count(tile), D_, width_, packed);
    row_tags_[slot] = tile;
    return packed;
  }

  // Asks for rows [first, last) of the tile, which are read panel by panel, a pattern the hardware does not foresee.
  // Always inline: gcc takes a function that only prefetches for one without effect and drops its calls.
  LINBIAS_INLINE void prefetch(int64_t tile, int first, int last) const {
    if (source_.step != 1) return;
    const int64_t bytes = D_ * source_.bytes, end = tile * kTile + lesser(last, count(tile));
    if (source_.row == D_) {  // one stretch, and no count of lines to each row
      for (const char *at = source_.at(tile * kTile + first), *to = source_.at(end); at < to; at += 256)
        __builtin_prefetch(at), __builtin_prefetch(at + 64), __builtin_prefetch(at + 128), __builtin_prefetch(at + 192);
      return;
    }
    for (int64_t i = tile * kTile + first; i < end; ++i)
      for (int64_t d = 0; d < bytes; d += 64) __builtin_prefetch(source_.at(i) + d);
  }

 private:
  int count(int64_t tile) const { return int(lesser<int64_t>(kTile, S_ - tile * kTile)); }

  const Codec<C>* codec_ = nullptr;
  const Array<void>* array_ = nullptr;
  int64_t b_ = -1, g_ = -1, slots_ = 0, width_ = 0, D_ = 0, S_ = 0;
  bool in_place_ = false;
  Rows source_{};
  Buffer<C> panels_, rows_;
  Buffer<int64_t> panel_tags_, row_tags_;
};

}  // namespace linbias::LINBIAS_VARIANT
