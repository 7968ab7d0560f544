// SPDX-License-Identifier: Apache-2.0
// Row tiles: up to kRows query rows that read the same key/value head, in strips of kStrip.
//
// With many queries a tile holds consecutive queries of one head; with few (decode) it holds all queries of several
// heads of the group, so that a key block is read once for all of them. Everything per row is therefore an array.
#pragma once

#include <limits>

#include "gemm.h"
#include "spans.h"

namespace linbias::LINBIAS_VARIANT {

constexpr int kStrips = 16;
constexpr int kRows = kStrips * kStrip;

// How the rows of a call are cut into tiles; tile u of a (b, g) has rows of heads and queries [first, first + count).
struct Tiling {
  bool whole;  // a tile has all queries of its heads
  int64_t heads_per_tile = 1, queries_per_tile = 1, tiles_per_unit = 0;

  explicit Tiling(const Call& call) : whole(call.T * 2 <= kRows) {
    const int64_t T = call.T, group = call.group();
    if (T == 0) return;
    if (whole) {
      heads_per_tile = ceil_div(group, ceil_div(group, lesser<int64_t>(group, kRows / T)));
      queries_per_tile = T;
      tiles_per_unit = ceil_div(group, heads_per_tile);
    } else {
      queries_per_tile = round_up(ceil_div(T, ceil_div(T, kRows)), kStrip);
      tiles_per_unit = group * ceil_div(T, queries_per_tile);
    }
  }
  // Rows that a tile can have, in whole strips.
  int64_t capacity() const { return round_up(heads_per_tile * queries_per_tile, kStrip); }
};

template <class C>
struct RowTile {
  int64_t b = 0, g = 0;
  int rows = 0, strips = 0;
  int64_t head[kRows], query[kRows], position[kRows], segment[kRows];
  // 0 for a row that receives no bias.
  alignas(64) C past[kRows], future[kRows];
  // Position relative to `origin`.
  alignas(64) C relative[kRows];
  int64_t origin = 0;
  RowSpan span, strip[kStrips];
  bool spatial = false;   // rows have coordinates instead of positions
  bool compact = true;    // the tile's positions lie close together, so that `relative` is exact
  bool biased = false;    // some slope is not 0
  bool same_sides = true; // past and future slopes agree in every row
  bool special = false;   // some slope is infinite or NaN, or may overflow when multiplied by a distance
  Buffer<C> coordinates;  // (kRows, C) under a metric

  int strip_rows(int s) const { return lesser(kStrip, rows - s * kStrip); }

  // Gathers tile `tile` of (item, kv head).
  void fill(const Call& call, const Tiling& tiling, int64_t item, int64_t kv, int64_t tile) {
    b = item, g = kv, rows = 0;
    const int64_t group = call.group(), tiles = tiling.whole ? 1 : tiling.tiles_per_unit / group;  // of its heads
    const int64_t head_first = tile / tiles * tiling.heads_per_tile;
    const int64_t query_first = tile % tiles * tiling.queries_per_tile;
    const int64_t head_last = lesser(head_first + tiling.heads_per_tile, group);
    const int64_t query_last = lesser(query_first + tiling.queries_per_tile, call.T);
    for (int64_t h = head_first; h < head_last; ++h)
      for (int64_t i = query_first; i < query_last; ++i) head[rows] = kv * group + h, query[rows] = i, ++rows;
    strips = int(ceil_div(rows, kStrip));
    read_rows(call);
    summarise(call);
  }

 private:
  void read_rows(const Call& call) {
    spatial = call.metric != Metric::none;
    const Array<int64_t> positions = call.query_positions.as<int64_t>();
    biased = special = false, same_sides = true;
    C m = 0, f = 0;
    for (int r = 0; r < rows; ++r) {
      const int64_t i = query[r];
      if (r == 0 || head[r] != head[r - 1]) read_slopes(call, head[r], m, f);
      position[r] = spatial ? 0 : positions ? *positions.at(b, i) : call.keys(b) - call.T + i;
      segment[r] = call.query_segments ? *call.query_segments.at(b, i) : 0;
      const bool none = call.query_unbiased && *call.query_unbiased.at(b, i);
      past[r] = none ? C(0) : m, future[r] = none ? C(0) : f;
    }
    if (spatial) read_coordinates(call);
  }

  void read_slopes(const Call& call, int64_t h, C& m, C& f) {
    const Array<C> slopes = call.slopes.as<C>(), later = call.future_slopes.as<C>();
    m = *slopes.at(b, h), f = later && call.metric == Metric::none ? *later.at(b, h) : m;
    biased = biased || m != 0 || f != 0;
    // A distance in integers is below 2**63; coordinates may be as far apart as the type's range.
    const C most = call.metric == Metric::none ? std::numeric_limits<C>::max() / C(1e19) : C(0);
    special = special || !(std::fabs(m) <= most && std::fabs(f) <= most);
    same_sides = same_sides && m == f;
  }

  void read_coordinates(const Call& call) {
    if (coordinates.size() == 0) coordinates.reset(kRows * call.C);
    const Array<C> positions = call.query_positions.as<C>();
    for (int r = 0; r < rows; ++r)
      for (int64_t c = 0; c < call.C; ++c) coordinates[r * call.C + c] = *positions.at(b, query[r], c);
  }

  void summarise(const Call&) {
    span = RowSpan();
    for (int s = 0; s < strips; ++s) {
      strip[s] = RowSpan();
      for (int r = s * kStrip; r < s * kStrip + strip_rows(s); ++r) {
        bool past_inf = past[r] == kInf<C>, future_inf = future[r] == kInf<C>;
        strip[s].add(position[r], segment[r], past_inf, future_inf);
        span.add(position[r], segment[r], past_inf, future_inf);
      }
    }
    origin = span.low;
    compact = minus(span.high, span.low) <= int64_t(1) << (Simd<C>::mantissa - 2);
    for (int r = 0; r < strips * kStrip; ++r) relative[r] = r < rows ? C(minus(position[r], origin)) : C(0);
    for (int r = rows; r < strips * kStrip; ++r) past[r] = future[r] = 0;
  }
};

}  // namespace linbias::LINBIAS_VARIANT
