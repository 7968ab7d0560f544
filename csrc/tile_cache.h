// SPDX-License-Identifier: Apache-2.0
// The key and value tiles of one head in the form the products read, packed when first needed.
#pragma once

#include "spans.h"

namespace linbias::LINBIAS_VARIANT {

// Packed key tiles, and value tiles where they cannot be used in place, of one (b, g). A tile is packed when first
// visited; with fewer slots than tiles a slot serves the tiles that are congruent to it, which suits the local order in
// which ALiBi visits them.
template <class C>
class TileCache {
 public:
  void reset(const Call& call, const Codec<C>& codec, int64_t slots, bool keys) {
    codec_ = &codec;
    slots_ = slots;
    width_ = round_up(call.V, kPanel<C>);
    in_place_ = codec.plain && call.value.stride[3] == 1 && width_ == call.V;
    D_ = call.D, V_ = call.V, S_ = call.S;
    if (keys) keys_.reset(slots * kTile * D_);
    if (!in_place_) values_.reset(slots * kTile * width_);
    key_tags_.reset(slots), value_tags_.reset(slots);
  }

  // Forgets what belongs to another head.
  void bind(const Call& call, int64_t b, int64_t g) {
    if (b == b_ && g == g_) return;
    b_ = b, g_ = g;
    key_rows_ = codec_->rows(call.key, b, g);
    value_rows_ = codec_->rows(call.value, b, g);
    for (int64_t i = 0; i < slots_; ++i) key_tags_[i] = value_tags_[i] = -1;
  }

  const Rows& key_rows() const { return key_rows_; }
  // Elements between packed value rows, and between panels of them.
  int64_t value_width() const { return width_; }

  // Panels of the tile's keys: [panel][D][lane].
  const C* keys(int64_t tile) {
    int64_t slot = tile % slots_;
    C* packed = keys_.data() + slot * kTile * D_;
    if (key_tags_[slot] != tile) {
      codec_->pack_panels(key_rows_, tile * kTile, count(tile), D_, packed);
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
      codec_->pack_rows(value_rows_, tile * kTile, count(tile), V_, width_, packed);
      value_tags_[slot] = tile;
    }
    *row = width_;
    return packed;
  }

 private:
  // Always inline: gcc takes a function that only prefetches for one without effect and drops its calls.
  LINBIAS_INLINE void prefetch_rows(const Rows& rows, int64_t tile, int first, int last, int64_t width) const {
    const int64_t bytes = width * rows.bytes, end = tile * kTile + lesser(last, count(tile));
    if (rows.row == width) {  // one stretch, and no count of lines to each row
      for (const char *at = rows.at(tile * kTile + first), *to = rows.at(end); at < to; at += 256)
        __builtin_prefetch(at), __builtin_prefetch(at + 64), __builtin_prefetch(at + 128), __builtin_prefetch(at + 192);
      return;
    }
    for (int64_t i = tile * kTile + first; i < end; ++i)
      for (int64_t d = 0; d < bytes; d += 64) __builtin_prefetch(rows.at(i) + d);
  }
  int count(int64_t tile) const { return int(lesser<int64_t>(kTile, S_ - tile * kTile)); }

  const Codec<C>* codec_ = nullptr;
  int64_t b_ = -1, g_ = -1, slots_ = 0, width_ = 0, D_ = 0, V_ = 0, S_ = 0;
  bool in_place_ = false;
  Rows key_rows_{}, value_rows_{};
  Buffer<C> keys_, values_;
  Buffer<int64_t> key_tags_, value_tags_;
};

}  // namespace linbias::LINBIAS_VARIANT
