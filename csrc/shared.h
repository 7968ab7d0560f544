// SPDX-License-Identifier: Apache-2.0
// What all workers of one call read.
#pragma once

#include "ledger.h"
#include "philox.h"
#include "threads.h"

namespace linbias::LINBIAS_VARIANT {

// Row tiles this small read keys where they lie: a product of few rows does not repay packing.
constexpr int kDirectRows = 12;

template <class C>
struct Shared {
  const Call& call;
  const Codec<C>& codec;
  Tiling tiling;
  KeyTree<C> tree;
  Bounds<C> bounds;
  Dropout dropout;
  int64_t key_width, value_width;  // D and V rounded up to panels

  Shared(const Call& c, const Codec<C>& elements)
      : call(c), codec(elements), tiling(c), dropout(c), key_width(round_up(c.D, kPanel<C>)),
        value_width(round_up(c.V, kPanel<C>)) {}
  int64_t units() const { return call.B * call.G * tiling.tiles_per_unit; }
};

// (b, g) pairs by falling cost, to the power of two: heads that see far come first, so that the last tasks are short.
template <class C>
inline void order_heads(const Call& call, Buffer<int64_t>& order) {
  constexpr int kinds = 64;
  const int64_t heads = call.B * call.G, group = call.group();
  const Array<C> slopes = call.slopes.as<C>();
  order.reset(heads);
  Buffer<uint8_t> kind(heads);
  for (int64_t head = 0; head < heads; ++head) {
    double keys = 0;
    for (int64_t h = head % call.G * group; h < (head % call.G + 1) * group; ++h) {
      const double slope = double(*slopes.at(head / call.G, h));
      // 30: about the gap of logits that a tolerance of single precision leaves visible.
      keys += slope > 0 ? lesser(double(call.S), 30 / slope + kRows) : double(call.S);
    }
    kind[head] = uint8_t(lesser<double>(kinds - 1, std::log2(keys + 1)));
  }
  int64_t filled = 0;
  for (int k = kinds - 1; k >= 0; --k)
    for (int64_t head = 0; head < heads; ++head)
      if (kind[head] == k) order[filled++] = head;
}

// Packed tiles that all workers together may keep.
constexpr int64_t kCacheBytes = int64_t(32) << 20;

// Norms of all key tiles, by the caller's account of them where there is one. Reading every key costs what a decode
// step costs altogether, so a few rows are judged only by norms that are already there.
template <class C>
inline void measure_keys(Shared<C>& shared, bool few_rows) {
  const Call& call = shared.call;
  shared.bounds.begin(call, shared.tree);
  if (shared.tree.count(0) <= 2 || (few_rows && !call.bound_norms)) return;
  shared.bounds.allocate(call);
  constexpr int64_t chunk = 64;  // tiles a task
  const int64_t heads = call.B * call.G, chunks = ceil_div(shared.tree.count(0), chunk);
  if (!call.bound_norms)
    parallel(call.threads, heads * chunks, [&](int64_t task, int) {
      const int64_t head = task / chunks, first = task % chunks * chunk;
      const int64_t last = lesser(first + chunk, shared.tree.count(0));
      shared.bounds.fill_tiles(call, shared.codec, head / call.G, head % call.G, first, last);
    });
  parallel(int(lesser<int64_t>(call.threads, shared.tree.count(0) / 256 + 1)), heads, [&](int64_t head, int) {
    if (call.bound_norms) shared.bounds.take_tiles(call, head / call.G, head % call.G);
    shared.bounds.join_levels(shared.tree, head / call.G, head % call.G);
  });
}

}  // namespace linbias::LINBIAS_VARIANT
