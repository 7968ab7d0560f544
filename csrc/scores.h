// SPDX-License-Identifier: Apache-2.0
// Scores of one row tile against one key tile, as both passes need them: dot products, cap, bias and visibility.
//
// A hidden pair gets exactly -inf. The bias is slope * distance as one product of the exact distance, fused with the
// subtraction; never a base plus a ramp, which cancels on steep heads. Backward must form every score as forward did,
// to the last bit: one that rounds otherwise no longer fits the saved lse.
#pragma once

#include "direct.h"
#include "shared.h"
#include "tile_cache.h"
#include "visibility.h"

namespace linbias::LINBIAS_VARIANT {

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

  void begin(const Call& call, const RowTile<C>& rows, const KeySpan& summary, int64_t index) {
    first = index * kTile;
    count = int(lesser<int64_t>(kTile, call.keys(rows.b) - first));
    span = &summary;
    ready = false;
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
  hidden,    // nothing is visible
  bare,      // all visible, no bias
  biased,    // all visible, same slope on both sides, exact relative positions
  examined,  // anything else
};

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
inline Filled fill_pairs(const Call& call, const RowTile<C>& rows, const KeyTile<C>& keys, int s, BlockVisibility seen,
                         bool masked, PairScratch<C>& scratch) {
  const bool spatial = call.metric != Metric::none;
  const bool far = !spatial && !keys.exact;
  const bool foreign = segments_differ(call, rows.strip[s], *keys.span) && !keys.segments_fit();
  const Filled filled{!keys.exact && rows.biased, masked || (seen != BlockVisibility::full && (far || foreign))};
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

  // How far the keys are before the row, or how far apart under a metric. `r` counts within the strip, `row` within the
  // tile.
  LINBIAS_INLINE Vec<C> back(int r, int row, int j) const {
    return filled.distance ? load<C>(scratch.distance + r * kTile + j)
                           : splat<C>(rows.relative[row]) - load<C>(keys.relative + j);
  }

  // `seen` receives the visibility.
  LINBIAS_INLINE Vec<C> operator()(Vec<C> x, int r, int row, int j, Mask<C>& seen) const {
    const Vec<C> back = this->back(r, row, j);
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

// What both passes keep of the row tile and the key tile at work.
template <class C>
class Scores {
 protected:
  void reset(const Shared<C>& shared, int64_t slots, int key_packings, int value_packings) {
    shared_ = &shared, call_ = &shared.call;
    direct_ = call_->T * call_->group() <= kDirectRows;
    const int64_t rows = shared.tiling.capacity();
    query_.reset(rows * shared.key_width, true);
    scores_.reset(rows * kTile, true);
    spare_.reset(kTile * greater(shared.key_width, shared.value_width));
    // Keys that only dot products read need no padding, so that more of them are used in place.
    const int64_t key_row = key_packings & as_panels ? shared.key_width : call_->D;
    key_cache_.reset(*call_, shared.codec, call_->key, call_->D, key_row, slots, key_packings);
    value_cache_.reset(*call_, shared.codec, call_->value, call_->V, shared.value_width, slots, value_packings);
  }

  void begin_rows(int64_t b, int64_t g, int64_t tile) {
    rows_.fill(*call_, shared_->tiling, b, g, tile);
    key_cache_.bind(b, g), value_cache_.bind(b, g);
  }

  // Row r of the query times scale, and the bound of its norm.
  void read_query(int r, bool judged) {
    const Codec<C>& codec = shared_->codec;
    const void* row = call_->query.at(codec.bytes, rows_.b, rows_.head[r], rows_.query[r]);
    if (judged) norms_[r] = codec.norm_bound(row, call_->query.stride[3], call_->D);
    codec.widen(row, call_->query.stride[3], call_->D, C(call_->scale), query_row(r));
  }
  C* query_row(int r) { return query_.data() + r * shared_->key_width; }
  C* score_row(int row) { return scores_.data() + row * kTile; }

  void begin_keys(const KeySpan& span, int64_t tile) {
    whole_ = block_visibility(*call_, rows_.span, span);
    keys_.begin(*call_, rows_, span, tile);
    seen_.clear();
    for (int s = 0; s < rows_.strips; ++s) range_[s] = {0, keys_.count};
  }

  // How strip s meets the tile; narrows range_[s] to what it can see.
  Form meet(int s) {
    using B = BlockVisibility;
    const B seen = whole_ == B::full ? whole_ : block_visibility(*call_, rows_.strip[s], *keys_.span);
    if (seen == B::empty) return Form::hidden;
    const B mask = mask_visibility(*call_, rows_, s, keys_.first, keys_.count);
    if (mask == B::empty) return Form::hidden;
    if (seen == B::partial) {
      const Range visible = visible_range(*call_, rows_.strip[s], *keys_.span, keys_.count);
      range_[s] = {greater(range_[s].first, visible.first), lesser(range_[s].last, visible.last)};
    }
    if (range_[s].first >= range_[s].last) return Form::hidden;
    strip_seen_ = seen, masked_ = mask == B::partial;
    // The last tile may be partly beyond S: those columns must be hidden.
    if (seen != B::full || masked_ || keys_.count < kTile) return Form::examined;
    if (!rows_.biased) return Form::bare;
    return keys_.exact && rows_.same_sides && !rows_.special && !keys_.span->unbiased ? Form::biased : Form::examined;
  }

  // range_[s] in whole panels.
  Range panels(int s) const {
    return {range_[s].first / kPanel<C>, int(ceil_div(range_[s].last, kPanel<C>))};
  }
  Range columns(int s) const { return {panels(s).first * kPanel<C>, panels(s).last * kPanel<C>}; }

  // Strip rows of `left`, `inner` wide, times panels of a tile.
  void product(const C* left, int64_t left_row, const C* panels_of, int64_t inner, int s, C* result) {
    constexpr int W = kPanel<C>;
    const Range to = panels(s);
    gemm<C, Into::zero>({left, left_row, 1}, {panels_of + to.first * inner * W, W, inner * W},
                        {result + to.first * W, kTile, W}, inner, rows_.strip_rows(s), to.last - to.first);
  }

  // Dot products of strip s into scores_. `ahead` is told which keys are multiplied next, where they are read in place.
  template <class Ahead>
  void dot_products(int64_t tile, int s, const Ahead& ahead) {
    const int64_t width = shared_->key_width, D = call_->D;
    const C* query = query_row(s * kStrip);
    C* scores = score_row(s * kStrip);
    if (!direct_) return product(query, width, key_cache_.panels(tile), D, s, scores);
    const Range to = columns(s);
    const int rows = rows_.strip_rows(s), last = lesser(to.last, keys_.count);
    key_cache_.each_stretch(tile, to.first, last, false, [&](const C* keys, int64_t row, int at, int n) {
      const int before = at - to.first;
      direct_dots<C>(query, width, rows, keys, row, n, D, scores + at, kTile,
                     [&](int i, int j) __attribute__((always_inline)) { ahead(before + i, before + j); });
    });
    // Columns beyond the last key are hidden later, whatever they hold; they must hold something.
    for (int r = 0; r < rows; ++r)
      for (int j = last; j < to.last; ++j) scores[r * kTile + j] = 0;
  }

  // From dot products to scores, vector by vector.
  template <Form F>
  struct Line {
    Scores& own;
    const int strip;
    const bool capped;
    const C cap;
    const C sharpness;  // 1 / cap, held in range; folded into the query it could take elements out of it
    const Filled filled;
    const Examiner<C> examine;

    Line(Scores& scores, int s)
        : own(scores), strip(s), capped(scores.call_->has_softcap), cap(C(scores.call_->softcap)),
          sharpness(C(lesser(1 / scores.call_->softcap, sizeof(C) == 4 ? 3e38 : 1e308))), filled(fill(scores, s)),
          examine(*scores.call_, scores.rows_, scores.keys_, scores.pairs_, s, filled) {}

    static Filled fill(Scores& scores, int s) {
      if (F != Form::examined) {
        scores.seen_.everywhere = true;
        return {false, false};
      }
      const Call& call = *scores.call_;
      scores.keys_.prepare(call, scores.rows_.b);
      return fill_pairs(call, scores.rows_, scores.keys_, s, scores.strip_seen_, scores.masked_, scores.pairs_);
    }

    // The scores of row r: from the dot products of vector j; `slope`, where given, receives the cap's derivative.
    LINBIAS_INLINE auto along(int r) const {
      const int row = strip * kStrip + r;
      const Vec<C> past = splat<C>(own.rows_.past[row]), place = splat<C>(own.rows_.relative[row]);
      return [this, r, row, past, place](Vec<C> x, int j, C* slope = nullptr) __attribute__((always_inline)) {
        if (capped) {
          const Vec<C> t = tanh_lanes<C>(x * sharpness);
          if (slope) store<C>(slope, C(1) - t * t);
          x = t * cap;
        }
        if constexpr (F == Form::biased) x -= past * absolute<C>(place - load<C>(own.keys_.relative + j));
        if constexpr (F == Form::examined) {
          Mask<C> visible;
          x = examine(x, r, row, j, visible);
          own.seen_.add(j, visible);
        }
        return x;
      };
    }
  };

  // A largest score does not see NaN, which must reach the results.
  bool has_nan(int s) {
    Mask<C> nan = {};
    for (int r = s * kStrip; r < s * kStrip + rows_.strip_rows(s); ++r)
      for (int j = columns(s).first; j < columns(s).last; j += kLanes<C>) {
        const Vec<C> x = load<C>(score_row(r) + j);
        nan |= x != x;
      }
    for (int lane = 0; lane < kLanes<C>; ++lane)
      if (nan[lane]) return true;
    return false;
  }

  // sums (rows x width) += pairs (rows x keys) times the tile's rows, for the strips in `active`; `started` tells whose
  // sums hold something, which `scale(s)` multiplies first unless it is null.
  template <class Scale>
  void add_products(const C* pairs, TileCache<C>& cache, int64_t tile, uint32_t active, int64_t width, C* sums,
                    uint32_t& started, const Scale& scale) {
    constexpr int W = kPanel<C>;
    const C* shown = nullptr;  // the tile's rows, copied
    if (seen_.hides(range_, rows_.strips, active, keys_.count)) {
      int64_t row;
      const C* right = cache.rows(tile, &row);
      shown = seen_.only(right, keys_.count, width, spare_.data(), &row);
    }
    for (int s = 0; s < rows_.strips; ++s) {
      if (!(active >> s & 1)) continue;
      const int first = range_[s].first, last = range_[s].last, strip_rows = rows_.strip_rows(s);
      const C* factor = scale(s);
      const auto add = [&](const C* right, int64_t row, int at, int n) __attribute__((always_inline)) {
        const Left<C> a{pairs + s * kStrip * kTile + at, kTile, 1};
        const Right<C> b{right, row, W};
        const Target<C> c{sums + s * kStrip * width, width, W, factor};
        if (!(started >> s & 1))
          gemm<C, Into::zero>(a, b, c, n, strip_rows, int(width / W));
        else if (factor)
          gemm<C, Into::scaled>(a, b, c, n, strip_rows, int(width / W));
        else
          gemm<C, Into::add>(a, b, c, n, strip_rows, int(width / W));
        started |= uint32_t(1) << s, factor = nullptr;
      };
      if (shown)
        add(shown + first * width, width, first, last - first);
      else
        cache.each_stretch(tile, first, last, !direct_, add);
    }
  }

  // Row `row` of a (B, H, T, n) result: `sum` times factor, rounded, or zeros.
  void write_row(void* result, int row, const C* sum, int64_t n, C factor, bool empty) const {
    const int64_t bytes = n * shared_->codec.bytes;
    char* out = static_cast<char*>(result) + place(row) * bytes;
    if (empty)
      std::memset(out, 0, std::size_t(bytes));
    else
      shared_->codec.narrow(sum, n, factor, out);
  }
  int64_t place(int row) const { return (rows_.b * call_->H + rows_.head[row]) * call_->T + rows_.query[row]; }

  const Shared<C>* shared_ = nullptr;
  const Call* call_ = nullptr;
  bool direct_ = false;
  RowTile<C> rows_;
  KeyTile<C> keys_;
  SeenKeys<C> seen_;
  PairScratch<C> pairs_;
  Range range_[kStrips];  // keys of the tile that a strip may see and has not skipped
  BlockVisibility whole_ = BlockVisibility::empty, strip_seen_ = BlockVisibility::empty;
  bool masked_ = false;
  TileCache<C> key_cache_, value_cache_;
  Buffer<C> query_, spare_, scores_;  // scores_: dot products, then scores, then what a pass makes of them
  C norms_[kRows];
};

}  // namespace linbias::LINBIAS_VARIANT
