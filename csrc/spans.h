// SPDX-License-Identifier: Apache-2.0
// Summaries of ranges of keys and rows, from which visibility.h proves what all pairs between them have in common.
//
// The keys of a batch item form a tree: level 0 are tiles of kTile keys, and a node of level l joins kFan nodes of the
// level below, so that whole superblocks are judged at once.
#pragma once

#include <cmath>

#include "codec.h"

namespace linbias::LINBIAS_VARIANT {

constexpr int kFan = 16;  // children of a node
constexpr int kMaxLevels = 8;

// a - b, held within int64.
LINBIAS_INLINE int64_t minus(int64_t a, int64_t b) {
  int64_t d;
  if (__builtin_sub_overflow(a, b, &d)) return a < b ? INT64_MIN : INT64_MAX;
  return d;
}

// The keys of one node that exist; `total` counts those that key_mask removes as well.
struct KeySpan {
  int64_t low = INT64_MAX, high = INT64_MIN;            // positions
  int64_t segment_low = INT64_MAX, segment_high = INT64_MIN;
  int64_t rank_low = INT64_MAX, rank_high = INT64_MIN;  // INT64_MAX both where the call has no ranks
  int64_t alive = 0, total = 0;
  bool unbiased = false;  // holds a key that gives no bias
  bool rising = true;     // positions strictly increase in storage order, so distances to one side are distinct

  // Key j of the node stands at low + j: what a causal or windowed row sees is a range of j.
  bool consecutive() const { return rising && alive == total && minus(high, low) == total - 1; }

  void add(int64_t position, int64_t segment, int64_t rank, bool no_bias) {
    rising = rising && (alive == 0 || position > high);
    low = lesser(low, position), high = greater(high, position);
    segment_low = lesser(segment_low, segment), segment_high = greater(segment_high, segment);
    rank_low = lesser(rank_low, rank), rank_high = greater(rank_high, rank);
    unbiased = unbiased || no_bias;
    ++alive;
  }
  void join(const KeySpan& next) {
    rising = rising && next.rising && (alive == 0 || next.alive == 0 || next.low > high);
    low = lesser(low, next.low), high = greater(high, next.high);
    segment_low = lesser(segment_low, next.segment_low), segment_high = greater(segment_high, next.segment_high);
    rank_low = lesser(rank_low, next.rank_low), rank_high = greater(rank_high, next.rank_high);
    unbiased = unbiased || next.unbiased;
    alive += next.alive, total += next.total;
  }
};

// Some rows that are treated together: a tile or a strip of it.
struct RowSpan {
  int64_t low = INT64_MAX, high = INT64_MIN;
  int64_t segment_low = INT64_MAX, segment_high = INT64_MIN;
  bool past_infinite = true, future_infinite = true;  // every row has an infinite slope on that side

  void add(int64_t position, int64_t segment, bool past_inf, bool future_inf) {
    low = lesser(low, position), high = greater(high, position);
    segment_low = lesser(segment_low, segment), segment_high = greater(segment_high, segment);
    past_infinite = past_infinite && past_inf;
    future_infinite = future_infinite && future_inf;
  }
};

// A node of the key tree as the rows of a tile see it.
template <class C>
struct Node {
  C distance;  // nearest distance to any row of the tile, in the units that slopes multiply
  int level;
  uint32_t mask;  // strips that still need it
  int64_t index;
};

// The tree of one call: spans for every batch item that differs, boxes under a metric.
template <class C>
class KeyTree {
 public:
  void build(const Call& call) {
    call_ = &call;
    levels_ = 0;
    int64_t count = ceil_div(call.S, kTile), total = 0;
    for (;;) {
      offset_[levels_] = total;
      count_[levels_] = count;
      total += count;
      ++levels_;
      if (count <= kFan || levels_ == kMaxLevels) break;
      count = ceil_div(count, kFan);
    }
    nodes_ = total;
    // Batch items share their spans unless one of the tensors that spans summarise tells them apart.
    items_ = varies(call.key_positions.stride[0], bool(call.key_positions)) || varies_of(call.key_segments) ||
                     varies_of(call.key_mask) || varies_of(call.key_ranks) || varies_of(call.key_unbiased) ||
                     varies_of(call.key_lengths)
                 ? call.B
                 : 1;
    spans_.reset(items_ * nodes_);
    if (call.metric != Metric::none) boxes_.reset(items_ * nodes_ * 2 * call.C);
    for (int64_t b = 0; b < items_; ++b) build_item(b);
  }

  int levels() const { return levels_; }
  int64_t count(int level) const { return count_[level]; }
  int64_t nodes() const { return nodes_; }
  // Index of a node among all nodes of a batch item.
  int64_t node(int level, int64_t index) const { return offset_[level] + index; }
  const KeySpan& span(int64_t b, int level, int64_t index) const {
    return spans_[(items_ == 1 ? 0 : b) * nodes_ + node(level, index)];
  }
  // Coordinates' lower ends, then upper ends, C each; NaN once a key's coordinate is.
  const C* box(int64_t b, int level, int64_t index) const {
    return boxes_.data() + ((items_ == 1 ? 0 : b) * nodes_ + node(level, index)) * 2 * call_->C;
  }

 private:
  bool varies(int64_t stride, bool present) const { return present && stride != 0 && call_->B > 1; }
  template <class X>
  bool varies_of(const Array<X>& array) const {
    return varies(array.stride[0], bool(array));
  }

  void build_item(int64_t b) {
    const bool plain = call_->metric == Metric::none && !call_->key_positions && !call_->key_segments &&
                       !call_->key_mask && !call_->key_ranks && !call_->key_unbiased;
    KeySpan* spans = spans_.data() + b * nodes_;
    for (int64_t t = 0; t < count_[0]; ++t) {
      if (plain)
        spans[t] = plain_span(t, call_->keys(b));
      else
        spans[t] = listed_span(b, t);
    }
    for (int level = 1; level < levels_; ++level)
      for (int64_t i = 0; i < count_[level]; ++i) {
        int64_t first = i * kFan, last = lesser(first + kFan, count_[level - 1]);
        KeySpan joined;
        for (int64_t child = first; child < last; ++child) joined.join(spans[offset_[level - 1] + child]);
        spans[offset_[level] + i] = joined;
        if (call_->metric != Metric::none) join_boxes(b, level, i, first, last);
      }
  }

  KeySpan plain_span(int64_t tile, int64_t keys) const {
    KeySpan span;
    if (tile * kTile >= keys) return span;
    span.low = tile * kTile;
    span.high = lesser(span.low + kTile, keys) - 1;
    span.segment_low = span.segment_high = 0;
    span.rank_low = span.rank_high = INT64_MAX;
    span.alive = span.total = span.high - span.low + 1;
    return span;
  }

  KeySpan listed_span(int64_t b, int64_t tile) {
    const Call& call = *call_;
    const bool spatial = call.metric != Metric::none;
    const Array<int64_t> positions = call.key_positions.template as<int64_t>();
    int64_t first = tile * kTile, last = lesser(first + kTile, call.keys(b));
    KeySpan span;
    span.total = greater<int64_t>(0, last - first);
    C* box = spatial ? start_box(b, 0, tile) : nullptr;
    for (int64_t j = first; j < last; ++j) {
      if (call.key_mask && !*call.key_mask.at(b, j)) continue;
      int64_t position = spatial ? 0 : positions ? *positions.at(b, j) : j;
      span.add(position, call.key_segments ? *call.key_segments.at(b, j) : 0,
               call.key_ranks ? *call.key_ranks.at(b, j) : INT64_MAX,
               call.key_unbiased && *call.key_unbiased.at(b, j));
      for (int64_t c = 0; spatial && c < call.C; ++c) {
        const C x = *call.key_positions.template as<C>().at(b, j, c);
        widen_box(box, c, x, x);
      }
    }
    return span;
  }

  C* own_box(int64_t b, int level, int64_t i) { return boxes_.data() + (b * nodes_ + node(level, i)) * 2 * call_->C; }

  C* start_box(int64_t b, int level, int64_t i) {
    C* box = own_box(b, level, i);
    for (int64_t c = 0; c < call_->C; ++c) box[c] = kInf<C>, box[call_->C + c] = -kInf<C>;
    return box;
  }
  void widen_box(C* box, int64_t c, C low, C high) const {
    box[c] = smaller_or_nan(box[c], low), box[call_->C + c] = larger_or_nan(box[call_->C + c], high);
  }
  void join_boxes(int64_t b, int level, int64_t i, int64_t first, int64_t last) {
    C* box = start_box(b, level, i);
    for (int64_t child = first; child < last; ++child) {
      const C* part = own_box(b, level - 1, child);
      for (int64_t c = 0; c < call_->C; ++c) widen_box(box, c, part[c], part[call_->C + c]);
    }
  }

  const Call* call_ = nullptr;
  int levels_ = 0;
  int64_t offset_[kMaxLevels] = {}, count_[kMaxLevels] = {};
  int64_t nodes_ = 0, items_ = 1;
  Buffer<KeySpan> spans_;
  Buffer<C> boxes_;
};

}  // namespace linbias::LINBIAS_VARIANT
