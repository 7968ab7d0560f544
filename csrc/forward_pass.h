// SPDX-License-Identifier: Apache-2.0
// Forward over all row tiles: norms first, then the tiles, shared among threads.
#pragma once

#include "forward.h"
#include "passes.h"

namespace linbias::LINBIAS_VARIANT {

template <class C>
inline void no_keys(const Call& call, const Codec<C>& codec, const ForwardResult& result) {
  const int64_t rows = call.B * call.H * call.T;
  std::memset(result.out, 0, static_cast<std::size_t>(rows * call.V * codec.bytes));
  if (result.out_only()) return;
  for (int64_t i = 0; i < rows; ++i) {
    static_cast<C*>(result.lse)[i] = -kInf<C>;
    static_cast<C*>(result.lse_low)[i] = 0;
    static_cast<C*>(result.skipped)[i] = 0;
  }
}

// One task a row tile: heads by falling cost, and within a head the tiles that may see most first.
template <class C>
inline void run_tiles(const Shared<C>& shared, Objects<ForwardWorker<C>>& workers) {
  const Call& call = shared.call;
  const int64_t per = shared.tiling.tiles_per_unit;
  Buffer<int64_t> order;
  const bool ordered = workers.size() > 1;
  if (ordered) order_heads<C>(call, order);
  parallel(int(workers.size()), shared.units(), [&](int64_t task, int worker) {
    const int64_t head = ordered ? order[task / per] : task / per;
    workers[worker].run(head * per + per - 1 - task % per);
  });
}

// Fewer row tiles than threads and many keys: the keys of a tile are shared out.
template <class C>
inline void run_parts(const Shared<C>& shared, Objects<ForwardWorker<C>>& workers) {
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

template <class C>
void forward_pass(const Call& call, const Codec<C>& codec, const ForwardResult& result) {
  for (int64_t i = 0; i < call.B * call.H && !result.out_only(); ++i) result.computed[i] = 0;
  if (call.B * call.H * call.T == 0) return;
  if (call.S == 0) return no_keys(call, codec, result);
  Shared<C> shared(call, codec);
  shared.tree.build(call);
  const bool direct = call.T * call.group() <= kDirectRows;
  measure_keys(shared, direct);
  const int64_t units = shared.units(), tiles = shared.tree.count(0);
  // Splitting keys costs a second start and a merge: worth it from a few thousand keys on.
  const bool split = units < call.threads && tiles >= 64;
  const int threads = split ? call.threads : int(lesser<int64_t>(call.threads, units));
  const int64_t tile_bytes = kTile * (call.D + shared.value_width) * int64_t(sizeof(C));
  int64_t slots = lesser(tiles, kCacheBytes / threads / greater<int64_t>(1, tile_bytes));
  slots = direct ? 1 : greater<int64_t>(1, slots);
  Objects<ForwardWorker<C>> workers(threads);
  for (int w = 0; w < threads; ++w) workers[w].reset(shared, result, slots, direct);
  if (split)
    run_parts(shared, workers);
  else
    run_tiles(shared, workers);
}

}  // namespace linbias::LINBIAS_VARIANT
