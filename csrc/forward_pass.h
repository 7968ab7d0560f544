// SPDX-License-Identifier: Apache-2.0
// Forward over all row tiles: norms first, then the tiles, shared among threads.
#pragma once

#include "forward.h"
#include "threads.h"

namespace linbias::LINBIAS_VARIANT {

// Packed tiles that all workers together may keep.
constexpr int64_t kCacheBytes = int64_t(32) << 20;

// Norms of all key tiles, by the caller's account of them where there is one. Reading every key costs what a decode
// step costs altogether, so a few rows are judged only by norms that are already there.
template <class X, class C>
inline void measure_keys(Shared<X, C>& shared, bool few_rows) {
  const Call& call = shared.call;
  shared.bounds.begin(call, shared.tree);
  if (shared.tree.count(0) <= 2 || (few_rows && !call.bound_norms)) return;
  shared.bounds.allocate_norms(call);
  constexpr int64_t chunk = 64;  // tiles a task
  const int64_t heads = call.B * call.G, chunks = ceil_div(shared.tree.count(0), chunk);
  if (!call.bound_norms)
    parallel(call.threads, heads * chunks, [&](int64_t task, int) {
      const int64_t head = task / chunks, first = task % chunks * chunk;
      const int64_t last = lesser(first + chunk, shared.tree.count(0));
      shared.bounds.template fill_tiles<X>(call, head / call.G, head % call.G, first, last);
    });
  parallel(int(lesser<int64_t>(call.threads, shared.tree.count(0) / 256 + 1)), heads, [&](int64_t head, int) {
    if (call.bound_norms) shared.bounds.take_tiles(call, head / call.G, head % call.G);
    shared.bounds.join_levels(shared.tree, head / call.G, head % call.G);
  });
}

template <class X, class C>
inline void no_keys(const Call& call, const ForwardResult& result) {
  const int64_t rows = call.B * call.H * call.T;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < call.V; ++d) narrow(C(0), static_cast<X*>(result.out) + i * call.V + d);
    static_cast<C*>(result.lse)[i] = -kInf<C>;
    static_cast<C*>(result.skipped)[i] = 0;
  }
}

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

// One task a row tile: heads by falling cost, and within a head the tiles that may see most first.
template <class X, class C>
inline void run_tiles(const Shared<X, C>& shared, Objects<ForwardWorker<X, C>>& workers) {
  const Call& call = shared.call;
  const int64_t per = shared.tiling.tiles_per_unit;
  Buffer<int64_t> order;
  order_heads<C>(call, order);
  parallel(int(workers.size()), shared.units(), [&](int64_t task, int worker) {
    workers[worker].run(order[task / per] * per + per - 1 - task % per);
  });
}

// Fewer row tiles than threads and many keys: the keys of a tile are shared out.
template <class X, class C>
inline void run_parts(const Shared<X, C>& shared, Objects<ForwardWorker<X, C>>& workers) {
  const int64_t units = shared.units(), tiles = shared.tree.count(0), parts = ceil_div(workers.size(), units);
  Objects<Partial<C>> partials(units * (parts + 1));
  Buffer<Node<C>> survivors(units * tiles);
  Buffer<int64_t> counts(units);
  const int threads = int(workers.size());
  parallel(threads, units, [&](int64_t unit, int worker) {
    workers[worker].run_plan(unit, partials[unit * (parts + 1)], survivors.data() + unit * tiles, &counts[unit]);
  });
  parallel(threads, units * parts, [&](int64_t task, int worker) {
    const int64_t unit = task / parts, part = task % parts;
    workers[worker].run_part(unit, partials[unit * (parts + 1) + 1 + part], survivors.data() + unit * tiles,
                             counts[unit], part, parts);
  });
  parallel(threads, units, [&](int64_t unit, int worker) {
    workers[worker].run_merge(unit, &partials[unit * (parts + 1)], parts + 1);
  });
}

template <class X>
inline void forward_pass(const Call& call, const ForwardResult& result) {
  using C = typename Accumulator<X>::type;
  if (call.B * call.H * call.T == 0) return;
  if (call.S == 0) return no_keys<X, C>(call, result);
  Shared<X, C> shared(call);
  shared.tree.build(call);
  const bool direct = call.T * call.group() <= ForwardWorker<X, C>::kDirectRows;
  measure_keys(shared, direct);
  const int64_t units = shared.units(), tiles = shared.tree.count(0);
  // Splitting keys costs a second start and a merge: worth it from a few thousand keys on.
  const bool split = units < call.threads && tiles >= 64;
  const int threads = split ? call.threads : int(lesser<int64_t>(call.threads, units));
  const int64_t tile_bytes = kTile * (call.D + shared.value_width) * int64_t(sizeof(C));
  int64_t slots = lesser(tiles, kCacheBytes / threads / greater<int64_t>(1, tile_bytes));
  slots = direct ? 1 : greater<int64_t>(1, slots);
  Objects<ForwardWorker<X, C>> workers(threads);
  for (int w = 0; w < threads; ++w) workers[w].reset(shared, result, slots, direct);
  if (split)
    run_parts(shared, workers);
  else
    run_tiles(shared, workers);
}

}  // namespace linbias::LINBIAS_VARIANT
