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
  // `array`: (B, G, S, D) or pages. Rows are `row_width` apart, D or more; they are used in place where they already are.
  void reset(const Call& call, const Codec<C>& codec, const Array<void>& array, int64_t D, int64_t row_width,
             int64_t slots, int packings) {
    call_ = &call, codec_ = &codec, array_ = &array;
    slots_ = slots, width_ = row_width, D_ = D, b_ = g_ = -1;
    const bool cut = call.page % kTile != 0;  // a page may end within a tile
    usable_ = codec.plain && array.stride[3] == 1 && width_ == D;
    in_place_ = usable_ && !cut;
    panels_.reset(packings & as_panels ? slots * kTile * D : 0);
    rows_.reset(packings & as_rows && !in_place_ ? slots * kTile * width_ : 0);
    joined_.reset(packings & as_panels && call.page % kPanel<C> != 0 ? kTile * D : 0);
    panel_tags_.reset(slots), row_tags_.reset(slots);
  }

  // Forgets what belongs to another head.
  void bind(int64_t b, int64_t g) {
    if (b == b_ && g == g_) return;
    b_ = b, g_ = g;
    keys_ = call_->keys(b);
    source_ = codec_->source(*call_, *array_, b, g);
    for (int64_t i = 0; i < slots_; ++i) panel_tags_[i] = row_tags_[i] = -1;
  }

  // [panel][D][lane].
  const C* panels(int64_t tile) {
    const int64_t slot = tile % slots_;
    C* packed = panels_.data() + slot * kTile * D_;
    if (panel_tags_[slot] == tile) return packed;
    panel_tags_[slot] = tile;
    if (call_->page % kPanel<C> != 0)
      codec_->pack_panels(stretch(tile), 0, count(tile), D_, packed);
    else  // a page holds whole panels
      each_run(tile, 0, count(tile), [&](const Rows& part, int at, int n) {
        codec_->pack_panels(part, 0, n, D_, packed + at * D_);
      });
    return packed;
  }

  // Row by row, and the distance between rows.
  const C* rows(int64_t tile, int64_t* row) {
    int64_t run;
    *row = in_place_ ? source_.rows.row : width_;
    if (in_place_) return reinterpret_cast<const C*>(source_.from(tile * kTile, &run).data);
    const int64_t slot = tile % slots_;
    C* packed = rows_.data() + slot * kTile * width_;
    if (row_tags_[slot] != tile)
      each_run(tile, 0, count(tile), [&](const Rows& part, int at, int n) {
        codec_->pack_rows(part, 0, n, D_, width_, packed + at * width_);
      });
    row_tags_[slot] = tile;
    return packed;
  }

  // Rows [first, last) of the tile by stretches: `take(rows, row, at, n)`, n rows from `at` on that lie `row` apart. A few
  // rows of a product do not repay joining what is read once, so it is taken where it lies if it can be.
  template <class Take>
  LINBIAS_INLINE void each_stretch(int64_t tile, int first, int last, bool joined, const Take& take) {
    if (usable_ && !in_place_ && !joined)
      return each_run(tile, first, last, [&](const Rows& part, int at, int n) __attribute__((always_inline)) {
        take(reinterpret_cast<const C*>(part.data), part.row, at, n);
      });
    int64_t row;
    const C* packed = rows(tile, &row);
    take(packed + first * row, row, first, last - first);
  }

  // Asks for rows [first, last) of the tile, which are read panel by panel, a pattern the hardware does not foresee.
  // Always inline: gcc takes a function that only prefetches for one without effect and drops its calls.
  LINBIAS_INLINE void prefetch(int64_t tile, int first, int last) const {
    if (source_.rows.step != 1) return;
    const int64_t bytes = D_ * source_.rows.bytes;
    each_run(tile, first, lesser(last, count(tile)), [&](const Rows& part, int, int n) __attribute__((always_inline)) {
      if (part.row == D_) {  // one stretch, and no count of lines to each row
        for (const char *at = part.data, *to = part.at(n); at < to; at += 256)
          __builtin_prefetch(at), __builtin_prefetch(at + 64), __builtin_prefetch(at + 128), __builtin_prefetch(at + 192);
        return;
      }
      for (int i = 0; i < n; ++i)
        for (int64_t d = 0; d < bytes; d += 64) __builtin_prefetch(part.at(i) + d);
    });
  }

 private:
  int count(int64_t tile) const { return int(lesser<int64_t>(kTile, keys_ - tile * kTile)); }

  // Rows [first, last) of the tile by stretches: `take(rows, at, n)` for those from `at` on.
  template <class Take>
  LINBIAS_INLINE void each_run(int64_t tile, int first, int last, const Take& take) const {
    for (int64_t at = first, run; at < last; at += run) {
      const Rows part = source_.from(tile * kTile + at, &run);
      run = lesser<int64_t>(run, last - at);
      take(part, int(at), int(run));
    }
  }

  // The tile's rows in one stretch, joined where a page ends among them.
  Rows stretch(int64_t tile) {
    int64_t run;
    const Rows rows = source_.from(tile * kTile, &run);
    if (run >= count(tile)) return rows;
    char* out = reinterpret_cast<char*>(joined_.data());
    each_run(tile, 0, count(tile), [&](const Rows& part, int at, int n) {
      char* to = out + at * D_ * part.bytes;
      for (int i = 0; i < n; ++i)
        for (int64_t d = 0, step = part.step == 1 ? D_ : 1; d < D_; d += step, to += step * part.bytes)
          std::memcpy(to, part.at(i) + d * part.step * part.bytes, std::size_t(step * part.bytes));
    });
    return {out, D_, 1, rows.bytes};
  }

  const Call* call_ = nullptr;
  const Codec<C>* codec_ = nullptr;
  const Array<void>* array_ = nullptr;
  int64_t b_ = -1, g_ = -1, slots_ = 0, width_ = 0, D_ = 0, keys_ = 0;
  bool usable_ = false, in_place_ = false;  // rows where they lie; and all of a tile in one stretch
  Source source_;
  Buffer<C> panels_, rows_, joined_;
  Buffer<int64_t> panel_tags_, row_tags_;
};

}  // namespace linbias::LINBIAS_VARIANT
