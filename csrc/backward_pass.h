// SPDX-License-Identifier: Apache-2.0
// Backward over all row tiles. The row tiles of one (b, kv head) are cut into shares, each a task; the worker that ends
// the last share of a head adds the shares' sums in their order. The result depends on the cut, never on the schedule.
#pragma once

#include "backward.h"
#include "passes.h"

namespace linbias::LINBIAS_VARIANT {

// Memory in which shares sum dK and dV: one slot for each head at work, of which there are never more than workers.
template <class C>
class SumPool {
 public:
  SumPool(const BackShared<C>& shared, int64_t slots) : shared_(shared) {
    const Call& call = shared.call;
    tiles_ = shared.tree.count(0);
    // The outputs themselves can hold the sums of a single share of their own type and width.
    in_place_ = shared.codec.plain && shared.shares == 1 && shared.key_width == call.D &&
                shared.value_width == call.V;
    key_size_ = shared.back.grad_key ? call.S * shared.key_width : 0;
    value_size_ = shared.back.grad_value ? call.S * shared.value_width : 0;
    touched_.reset(slots * shared.shares * tiles_);
    if (!in_place_) sums_.reset(slots * shared.shares * (key_size_ + value_size_));
    free_.reset(slots), slot_of_.reset(call.B * call.G), left_.reset(call.B * call.G);
    for (free_count_ = 0; free_count_ < slots; ++free_count_) free_[free_count_] = free_count_;
    for (int64_t i = 0; i < call.B * call.G; ++i) slot_of_[i] = -1, left_[i] = shared.shares;
  }

  // Where share `share` of head `head` (b * G + g) sums.
  KeySums<C> open(int64_t head, int share) {
    lock();
    if (slot_of_[head] < 0) {
      slot_of_[head] = free_[--free_count_];
      std::memset(touched(head, 0), 0, static_cast<std::size_t>(shared_.shares * tiles_));
    }
    unlock();
    return sums(head, share);
  }

  // Ends a share; the last one of a head writes its gradients.
  void close(int64_t head) {
    if (__atomic_sub_fetch(&left_[head], 1, __ATOMIC_ACQ_REL) > 0) return;
    const Call& call = shared_.call;
    for (int64_t tile = 0; tile < tiles_; ++tile) {
      write(head, tile, shared_.back.grad_key, &KeySums<C>::key, shared_.key_width, call.D);
      write(head, tile, shared_.back.grad_value, &KeySums<C>::value, shared_.value_width, call.V);
    }
    lock();
    free_[free_count_++] = slot_of_[head];
    unlock();
  }

 private:
  static constexpr int64_t kChunk = 64;  // columns summed at once

  uint8_t* touched(int64_t head, int share) {
    return touched_.data() + (slot_of_[head] * shared_.shares + share) * tiles_;
  }

  KeySums<C> sums(int64_t head, int share) {
    KeySums<C> result;
    result.touched = touched(head, share);
    C* base = sums_.data() + (in_place_ ? 0 : (slot_of_[head] * shared_.shares + share) * (key_size_ + value_size_));
    if (key_size_)
      result.key = in_place_ ? static_cast<C*>(shared_.back.grad_key) + head * key_size_ : base;
    if (value_size_)
      result.value = in_place_ ? static_cast<C*>(shared_.back.grad_value) + head * value_size_ : base + key_size_;
    return result;
  }

  void write(int64_t head, int64_t tile, void* gradient, C* KeySums<C>::*part, int64_t width, int64_t columns) {
    if (!gradient) return;
    const int64_t first = tile * kTile, last = lesser<int64_t>(first + kTile, shared_.call.S);
    const bool any_in_place = in_place_ && touched(head, 0)[tile];
    if (any_in_place) return;
    char* out = static_cast<char*>(gradient) + (head * shared_.call.S + first) * columns * shared_.codec.bytes;
    for (int64_t j = first; j < last; ++j, out += columns * shared_.codec.bytes)
      for (int64_t d = 0; d < columns; d += kChunk) {
        C total[kChunk] = {};
        const int64_t n = lesser(kChunk, columns - d);
        for (int share = 0; share < shared_.shares; ++share) {
          if (!touched(head, share)[tile]) continue;
          const C* sum = sums(head, share).*part + j * width + d;
          for (int64_t k = 0; k < n; ++k) total[k] += sum[k];
        }
        shared_.codec.narrow(total, n, C(1), out + d * shared_.codec.bytes);
      }
  }

  void lock() {
    while (__atomic_exchange_n(&locked_, true, __ATOMIC_ACQUIRE)) {
    }
  }
  void unlock() { __atomic_store_n(&locked_, false, __ATOMIC_RELEASE); }

  const BackShared<C>& shared_;
  int64_t tiles_ = 0, key_size_ = 0, value_size_ = 0, free_count_ = 0;
  bool in_place_ = false, locked_ = false;
  Buffer<C> sums_;
  Buffer<uint8_t> touched_;
  Buffer<int64_t> free_, slot_of_;
  Buffer<int> left_;
};

template <class C>
inline void write_slopes(const BackShared<C>& shared, const Buffer<double>& sums) {
  const Call& call = shared.call;
  const int64_t group = call.group(), share_size = group * 2;
  const bool apart = call.future_slopes && call.metric == Metric::none;
  for (int64_t head = 0; head < call.B * call.H; ++head) {
    double past = 0, future = 0;
    for (int share = 0; share < shared.shares; ++share) {
      const double* part = sums.data() + (head / group * shared.shares + share) * share_size + head % group * 2;
      past += part[0], future += part[1];
    }
    if (void* out = shared.back.grad_slopes) static_cast<C*>(out)[head] = C(apart ? past : past + future);
    if (void* out = shared.back.grad_future_slopes) static_cast<C*>(out)[head] = C(apart ? future : 0);
  }
}

template <class C>
inline void no_pairs(const Call& call, const Codec<C>& codec, const BackwardCall& back) {
  const auto clear = [](void* out, int64_t count, int64_t bytes) {
    if (out) std::memset(out, 0, static_cast<std::size_t>(count * bytes));
  };
  clear(back.grad_query, call.B * call.H * call.T * call.D, codec.bytes);
  clear(back.grad_key, call.B * call.G * call.S * call.D, codec.bytes);
  clear(back.grad_value, call.B * call.G * call.S * call.V, codec.bytes);
  clear(back.grad_slopes, call.B * call.H, sizeof(C));
  clear(back.grad_future_slopes, call.B * call.H, sizeof(C));
}

// Memory in which the shares of all heads at work sum dK and dV.
constexpr int64_t kSumBytes = int64_t(24) << 20;

// Enough shares that the last tasks to end leave few workers idle, as long as their sums are not much to keep: a
// single share of plain elements needs no memory but the gradients.
template <class C>
inline int shares_of(const BackShared<C>& shared) {
  const Call& call = shared.call;
  if (call.threads <= 1) return 1;
  const int64_t heads = call.B * call.G, at_work = lesser<int64_t>(call.threads, heads);
  const int64_t width = (shared.back.grad_key ? shared.key_width : 0) + (shared.back.grad_value ? shared.value_width : 0);
  const int64_t bytes = greater<int64_t>(1, at_work * call.S * width * int64_t(sizeof(C)));
  const int64_t useful = lesser(shared.tiling.tiles_per_unit, ceil_div(8 * call.threads, heads));
  return int(greater<int64_t>(1, lesser(lesser<int64_t>(useful, 8), kSumBytes / bytes)));
}

template <class C>
void backward_pass(const Call& call, const Codec<C>& codec, const BackwardCall& back) {
  if (call.B * call.H * call.T == 0 || call.S == 0) return no_pairs(call, codec, back);
  BackShared<C> shared(call, codec, back);
  shared.tree.build(call);
  measure_keys(shared, false);
  const int64_t heads = call.B * call.G, tiles = shared.tiling.tiles_per_unit;
  shared.shares = shares_of(shared);
  const int64_t tasks = heads * shared.shares;
  const int threads = int(lesser<int64_t>(call.threads, tasks));
  const int64_t tile_bytes = kTile * (2 * shared.key_width + 2 * shared.value_width) * int64_t(sizeof(C));
  const int64_t slots = greater<int64_t>(1, lesser(shared.tree.count(0), kCacheBytes / threads / tile_bytes));
  Objects<BackwardWorker<C>> workers(threads);
  for (int w = 0; w < threads; ++w) workers[w].reset(shared, slots);
  SumPool<C> pool(shared, lesser<int64_t>(threads, heads));
  Buffer<double> slope_sums(tasks * call.group() * 2, true);
  Buffer<int64_t> order;
  order_heads<C>(call, order);
  parallel(threads, tasks, [&](int64_t task, int worker) {
    const int64_t head = order[task / shared.shares], b = head / call.G, g = head % call.G;
    const int share = int(task % shared.shares);
    const int64_t first = tiles * share / shared.shares, last = tiles * (share + 1) / shared.shares;
    workers[worker].run(b, g, first, last, pool.open(head, share),
                        slope_sums.data() + (head * shared.shares + share) * call.group() * 2);
    pool.close(head);
  });
  write_slopes(shared, slope_sums);
}

}  // namespace linbias::LINBIAS_VARIANT
