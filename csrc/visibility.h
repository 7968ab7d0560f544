// SPDX-License-Identifier: Apache-2.0
// Which keys a query sees: the rule pair by pair, and what summaries prove of it for a block of pairs or a run of keys,
// so that only what a mask really cuts is evaluated pair by pair. Examiner (scores.h) is the rule by vector, for the hot
// path; csrc/tests/units.cpp holds them all against `pair_visible`.
#pragma once

#include "rows.h"

namespace linbias::LINBIAS_VARIANT {

// `empty` and `full` are proven, `partial` means look at each pair.
enum class BlockVisibility { empty, partial, full };

// Whether row r of the tile and key j see each other: the definition itself, in integers.
template <class C>
inline bool pair_visible(const Call& call, const RowTile<C>& tile, int r, int64_t j) {
  const int64_t b = tile.b;
  if (call.key_mask && !*call.key_mask.at(b, j)) return false;
  if (call.query_segments && tile.segment[r] != *call.key_segments.at(b, j)) return false;
  if (call.attn_mask && !*call.attn_mask.at(b, tile.head[r], tile.query[r], j)) return false;
  if (call.metric != Metric::none) return true;
  const Array<int64_t> positions = call.key_positions.as<int64_t>();
  const int64_t back = minus(tile.position[r], positions ? *positions.at(b, j) : j);
  const int64_t rank = call.key_ranks ? *call.key_ranks.at(b, j) : INT64_MAX;
  if (call.causal && back < 0 && rank >= call.prefix) return false;
  const bool within =
      (call.left == kUnlimited || back <= call.left) && (call.right == kUnlimited || back >= -call.right);
  return within || rank < call.sinks;
}

// What rows see of keys, attn_mask apart; a slope of infinity hides what it biases.
inline BlockVisibility block_visibility(const Call& call, const RowSpan& rows, const KeySpan& keys) {
  if (keys.alive == 0) return BlockVisibility::empty;
  bool all = keys.alive == keys.total;
  if (call.query_segments) {
    if (rows.segment_high < keys.segment_low || keys.segment_high < rows.segment_low) return BlockVisibility::empty;
    all = all && lesser(rows.segment_low, keys.segment_low) == greater(rows.segment_high, keys.segment_high);
  }
  if (call.metric != Metric::none) return all ? BlockVisibility::full : BlockVisibility::partial;
  const int64_t back_least = minus(rows.low, keys.high), back_most = minus(rows.high, keys.low);
  if (call.causal) {
    if (back_most < 0 && keys.rank_low >= call.prefix) return BlockVisibility::empty;
    all = all && (back_least >= 0 || keys.rank_high < call.prefix);
  }
  if (call.left != kUnlimited || call.right != kUnlimited) {
    const bool past_out = call.left != kUnlimited && back_least > call.left;
    const bool future_out = call.right != kUnlimited && back_most < -call.right;
    if ((past_out || future_out) && keys.rank_low >= call.sinks) return BlockVisibility::empty;
    const bool within = (call.left == kUnlimited || back_most <= call.left) &&
                        (call.right == kUnlimited || back_least >= -call.right);
    all = all && (within || keys.rank_high < call.sinks);
  }
  if (!keys.unbiased) {
    if (rows.past_infinite && back_least > 0) return BlockVisibility::empty;
    if (rows.future_infinite && back_most < 0) return BlockVisibility::empty;
  }
  return all ? BlockVisibility::full : BlockVisibility::partial;
}

// What attn_mask alone says about the rows of strip s and `count` keys from `first`.
template <class C>
inline BlockVisibility mask_visibility(const Call& call, const RowTile<C>& rows, int s, int64_t first, int count) {
  const Array<uint8_t>& mask = call.attn_mask;
  if (!mask) return BlockVisibility::full;
  bool none = true, all = true;
  for (int r = s * kStrip; r < s * kStrip + rows.strip_rows(s); ++r) {
    const uint8_t* row = mask.at(rows.b, rows.head[r], rows.query[r], first);
    int seen = 0;
    for (int j = 0; j < count; ++j) seen += row[j * mask.stride[3]] != 0;
    none = none && seen == 0, all = all && seen == count;
  }
  return none ? BlockVisibility::empty : all ? BlockVisibility::full : BlockVisibility::partial;
}

// Whether a strip and a tile may hold pairs of different segments.
inline bool segments_differ(const Call& call, const RowSpan& strip, const KeySpan& keys) {
  return call.query_segments && lesser(strip.segment_low, keys.segment_low) !=
                                    greater(strip.segment_high, keys.segment_high);
}

// The keys [first, last) of the tile that can be visible to the strip, from positions alone.
struct Range {
  int first, last;
};

inline Range visible_range(const Call& call, const RowSpan& strip, const KeySpan& keys, int count) {
  Range range{0, count};
  if (call.metric != Metric::none || !keys.consecutive()) return range;
  const int64_t ahead = minus(strip.high, keys.low);  // may be the largest number there is
  if (call.causal && keys.rank_low >= call.prefix)
    range.last = ahead >= count ? count : int(greater<int64_t>(0, ahead + 1));
  if (keys.rank_low < call.sinks) return range;
  if (call.left != kUnlimited)
    range.first = int(greater<int64_t>(0, lesser<int64_t>(count, minus(minus(strip.low, keys.low), call.left))));
  if (call.right != kUnlimited) {
    const int64_t last = ahead > count - call.right - 1 ? count : ahead + call.right + 1;
    range.last = int(greater<int64_t>(0, lesser<int64_t>(range.last, last)));
  }
  return range;
}

}  // namespace linbias::LINBIAS_VARIANT
