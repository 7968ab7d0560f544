// SPDX-License-Identifier: Apache-2.0
// From dot products to scores: bias and visibility of the pairs of one strip and one key tile.
//
// A hidden pair gets exactly -inf. The bias is slope * distance as one product of
// the exact distance, fused with the subtraction; never a base plus a ramp, which cancels on steep heads.
#pragma once

#include "rows.h"

namespace linbias::LINBIAS_VARIANT {

// Whether row r of the tile and key j see each other: the definition itself, pair by pair, in integers.
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

// The keys of one tile in the form that strips need.
template <class C>
struct KeyTile {
  using Int = typename Simd<C>::Int;

  int64_t first = 0;
  int count = 0;
  const KeySpan* span = nullptr;
  alignas(64) C relative[kTile];  // position - the row tile's origin
  bool exact = false;             // distances computed from `relative` are exact
  bool ready = false;             // the masks below are filled
  alignas(64) Int alive[kTile], sink[kTile], prefix[kTile], unbiased[kTile];
  alignas(64) Int segment[kTile];  // counted from the tile's lowest, if `segments_fit`
  Buffer<C> coordinates;          // (C, kTile) under a metric
  bool placed = false;

  void begin(const Call& call, const RowTile<C>& rows, const KeySpan& summary, int64_t index) {
    first = index * kTile;
    count = int(lesser<int64_t>(kTile, call.S - first));
    span = &summary;
    ready = placed = false;
    // |position - origin| of rows and keys together within the mantissa: every difference is an exact integer.
    constexpr int64_t limit = int64_t(1) << (Simd<C>::mantissa - 1);
    exact = call.metric == Metric::none && rows.compact && minus(span->high, rows.origin) <= limit &&
            minus(span->low, rows.origin) >= -limit;
    if (exact) place(call, rows);
  }

  // Masks by key, for tiles that are looked at pair by pair.
  void prepare(const Call& call, int64_t b) {
    if (ready) return;
    ready = true;
    for (int j = 0; j < kTile; ++j) alive[j] = j < count ? -1 : 0;
    if (call.key_mask)
      for (int j = 0; j < count; ++j) alive[j] = *call.key_mask.at(b, first + j) ? -1 : 0;
    std::memset(unbiased, 0, sizeof unbiased);
    if (call.key_unbiased)
      for (int j = 0; j < count; ++j) unbiased[j] = *call.key_unbiased.at(b, first + j) ? -1 : 0;
    if (call.key_ranks)
      for (int j = 0; j < kTile; ++j) {
        const int64_t rank = j < count ? *call.key_ranks.at(b, first + j) : INT64_MAX;
        sink[j] = rank < call.sinks ? -1 : 0, prefix[j] = rank < call.prefix ? -1 : 0;
      }
    if (call.key_segments && segments_fit())
      for (int j = 0; j < kTile; ++j)
        segment[j] = j < count ? own_segment(*call.key_segments.at(b, first + j)) : Int(-1);
    if (call.metric != Metric::none) read_coordinates(call, b);
  }

  bool segments_fit() const { return minus(span->segment_high, span->segment_low) <= int64_t(1) << 30; }
  // A segment in the numbers of `segment`; -1: no living key of the tile is in it.
  Int own_segment(int64_t number) const {
    return number < span->segment_low || number > span->segment_high ? Int(-1) : Int(number - span->segment_low);
  }

 private:
  void place(const Call& call, const RowTile<C>& rows) {
    if (span->consecutive()) {
      const C base = C(span->low - rows.origin);
      for (int j = 0; j < kTile; ++j) relative[j] = base + C(j);
    } else {
      const Array<int64_t> positions = call.key_positions.as<int64_t>();
      for (int j = 0; j < kTile; ++j) {
        const int64_t k = first + (j < count ? j : 0);
        relative[j] = C(minus(positions ? *positions.at(rows.b, k) : k, rows.origin));
      }
    }
  }

  void read_coordinates(const Call& call, int64_t b) {
    if (coordinates.size() == 0) coordinates.reset(kTile * call.C);
    const Array<C> positions = call.key_positions.as<C>();
    for (int64_t c = 0; c < call.C; ++c)
      for (int j = 0; j < kTile; ++j) coordinates[c * kTile + j] = j < count ? *positions.at(b, first + j, c) : C(0);
  }
};

// What one strip must look at: the pairs' own masks and distances where vectors of `relative` cannot give them.
template <class C>
struct PairScratch {
  alignas(64) uint8_t visible[kStrip * kTile];
  alignas(64) C distance[kStrip * kTile];  // signed (row - key) in one dimension, else the metric's
};

// How a strip's scores are formed; the first that applies.
enum class Form {
  bare,      // all visible, no bias
  biased,    // all visible, same slope on both sides, exact relative positions
  examined,  // anything else
};

template <class C>
inline Form form_of(const RowTile<C>& rows, const KeyTile<C>& keys, Sight seen, bool masked) {
  // The last tile may be partly beyond S: those columns must be hidden.
  if (seen != Sight::all || masked || keys.count < kTile) return Form::examined;
  if (!rows.biased) return Form::bare;
  return keys.exact && rows.same_sides && !rows.special && !keys.span->unbiased ? Form::biased : Form::examined;
}

// What attn_mask alone says about a strip and the tile.
template <class C>
inline Sight mask_sight(const Call& call, const RowTile<C>& rows, const KeyTile<C>& keys, int s) {
  const Array<uint8_t>& mask = call.attn_mask;
  bool none = true, all = true;
  for (int r = s * kStrip; r < s * kStrip + rows.strip_rows(s); ++r) {
    const uint8_t* row = mask.at(rows.b, rows.head[r], rows.query[r], keys.first);
    int count = 0;
    for (int j = 0; j < keys.count; ++j) count += row[j * mask.stride[3]] != 0;
    none = none && count == 0, all = all && count == keys.count;
  }
  return none ? Sight::none : all ? Sight::all : Sight::some;
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
  if (call.causal && keys.rank_low >= call.prefix)
    range.last = int(greater<int64_t>(0, lesser<int64_t>(count, minus(strip.high, keys.low) + 1)));
  if (keys.rank_low < call.sinks) return range;
  if (call.left != kUnlimited)
    range.first = int(greater<int64_t>(0, lesser<int64_t>(count, minus(minus(strip.low, keys.low), call.left))));
  if (call.right != kUnlimited) {
    int64_t ahead = minus(strip.high, keys.low);  // ahead + right + 1 without overflow
    int64_t last = ahead > count - call.right - 1 ? count : ahead + call.right + 1;
    range.last = int(greater<int64_t>(0, lesser<int64_t>(range.last, last)));
  }
  return range;
}

template <class C>
inline void metric_distances(const Call& call, const RowTile<C>& rows, const KeyTile<C>& keys, int row, C* out) {
  const C* own = rows.coordinates.data() + row * call.C;
  for (int j = 0; j < kTile; ++j) out[j] = 0;
  for (int64_t c = 0; c < call.C; ++c) {
    const C x = own[c];
    const C* other = keys.coordinates.data() + c * kTile;
    if (call.metric == Metric::euclidean)
      for (int j = 0; j < kTile; ++j) out[j] += (x - other[j]) * (x - other[j]);
    else
      for (int j = 0; j < kTile; ++j) out[j] += std::fabs(x - other[j]);
  }
  if (call.metric == Metric::euclidean)
    for (int j = 0; j < kTile; ++j) out[j] = std::sqrt(out[j]);
}

// Which keys of the current tile some strip sees.
template <class C>
struct SeenKeys {
  alignas(64) typename Simd<C>::Int keys[kTile];
  bool everywhere = false;  // some strip sees them all

  void clear() {
    everywhere = false;
    std::memset(keys, 0, sizeof keys);
  }
  LINBIAS_INLINE void add(int j, Mask<C> visible) {
    visible |= load_mask<C>(keys + j);
    std::memcpy(keys + j, &visible, sizeof visible);
  }

  // Whether some of the first `count` keys in reach of the active strips is visible to none of their rows.
  bool hides(const Range* range, int strips, uint32_t active, int count) const {
    for (int s = 0; s < strips && !everywhere; ++s)
      if (active >> s & 1)
        for (int j = range[s].first; j < lesser(range[s].last, count); ++j)
          if (keys[j] == 0) return true;
    return false;
  }

  // The tile's rows in `spare`, with zeros for keys that nobody sees: 0 * NaN would leak what does not exist.
  const C* only(const C* rows, int count, int64_t width, C* spare, int64_t* row) const {
    for (int j = 0; j < count; ++j) {
      const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(C);
      if (keys[j] != 0)
        std::memcpy(spare + j * width, rows + j * *row, bytes);
      else
        std::memset(spare + j * width, 0, bytes);
    }
    *row = width;
    return spare;
  }
};

// Fills what `examine` cannot derive from vectors: distances that are not exact there, visibility that is not a
// comparison of positions. Returns which of the two were filled.
struct Filled {
  bool distance, visible;
};

template <class C>
inline Filled fill_pairs(const Call& call, const RowTile<C>& rows, const KeyTile<C>& keys, int s, Sight seen,
                         bool masked, PairScratch<C>& scratch) {
  const bool spatial = call.metric != Metric::none;
  const bool far = !spatial && !keys.exact;
  const bool foreign = segments_differ(call, rows.strip[s], *keys.span) && !keys.segments_fit();
  const Filled filled{!keys.exact && rows.biased, masked || (seen != Sight::all && (far || foreign))};
  const Array<int64_t> positions = call.key_positions.as<int64_t>();
  for (int r = 0; r < rows.strip_rows(s); ++r) {
    const int row = s * kStrip + r;
    C* distance = scratch.distance + r * kTile;
    uint8_t* visible = scratch.visible + r * kTile;
    if (filled.distance && spatial) metric_distances(call, rows, keys, row, distance);
    if (filled.distance && !spatial)
      for (int j = 0; j < kTile; ++j) {
        const int64_t k = keys.first + (j < keys.count ? j : 0);
        distance[j] = C(minus(rows.position[row], positions ? *positions.at(rows.b, k) : k));
      }
    if (filled.visible)
      for (int j = 0; j < kTile; ++j) visible[j] = j < keys.count && pair_visible(call, rows, row, keys.first + j);
  }
  return filled;
}

// One vector of an examined row: `x` is the capped score; returns the score with bias, -inf where hidden.
template <class C>
struct Examiner {
  const Call& call;
  const RowTile<C>& rows;
  const KeyTile<C>& keys;
  const PairScratch<C>& scratch;
  Filled filled;
  bool biased, special, spatial, windowed, ranked, segmented;
  C left, right;
  typename Simd<C>::Int segment[kStrip] = {};  // of the strip's rows, in the tile's numbers

  Examiner(const Call& c, const RowTile<C>& r, const KeyTile<C>& k, const PairScratch<C>& p, int s, Filled f)
      : call(c), rows(r), keys(k), scratch(p), filled(f) {
    segmented = !filled.visible && segments_differ(call, rows.strip[s], *keys.span);
    for (int i = 0; segmented && i < rows.strip_rows(s); ++i)
      segment[i] = keys.own_segment(rows.segment[s * kStrip + i]);
    biased = rows.biased, special = rows.special;
    spatial = call.metric != Metric::none;
    windowed = call.left != kUnlimited || call.right != kUnlimited;
    ranked = bool(call.key_ranks);
    // Distances that are compared are below 2**mantissa, so a larger limit is no limit.
    constexpr int64_t most = int64_t(1) << Simd<C>::mantissa;
    left = C(lesser(call.left, most)), right = C(lesser(call.right, most));
  }

  // `r` counts within the strip, `row` within the tile; `seen` receives the visibility.
  LINBIAS_INLINE Vec<C> operator()(Vec<C> x, int r, int row, int j, Mask<C>& seen) const {
    const Vec<C> back = filled.distance ? load<C>(scratch.distance + r * kTile + j)
                                        : splat<C>(rows.relative[row]) - load<C>(keys.relative + j);
    seen = load_mask<C>(keys.alive + j);
    if (filled.visible) {
      seen &= load_mask_bytes<C>(scratch.visible + r * kTile + j);
    } else if (!spatial && keys.exact) {
      if (call.causal) {
        Mask<C> ok = back >= 0;
        if (ranked) ok |= load_mask<C>(keys.prefix + j);
        seen &= ok;
      }
      if (windowed) {
        Mask<C> ok = (back <= left) & (back >= -right);
        if (ranked) ok |= load_mask<C>(keys.sink + j);
        seen &= ok;
      }
    }
    if (segmented) seen &= load_mask<C>(keys.segment + j) == segment[r];
    if (biased) x = subtract_bias(x, back, row, j, seen);
    return seen ? x : splat<C>(-kInf<C>);
  }

 private:
  LINBIAS_INLINE Vec<C> subtract_bias(Vec<C> x, Vec<C> back, int row, int j, Mask<C>& seen) const {
    const Vec<C> distance = absolute<C>(back);
    Vec<C> slope = splat<C>(rows.past[row]);
    if (!rows.same_sides) slope = back >= 0 ? slope : splat<C>(rows.future[row]);
    Mask<C> none = load_mask<C>(keys.unbiased + j);
    if (special) {
      // inf * 0 is no bias, and an infinite bias hides its pair whatever the score.
      none |= distance == 0;
      Mask<C> infinite = slope * distance == kInf<C>;
      seen &= none | ~infinite;
    }
    slope = bits_and<C>(slope, ~none);
    Vec<C> product = bits_and<C>(distance, ~none);
    return x - slope * product;
  }
};

}  // namespace linbias::LINBIAS_VARIANT
