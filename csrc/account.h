// SPDX-License-Identifier: Apache-2.0
// The account of backward: what was skipped so far of every row and of every key, in shares of the rows' whole weight.
//
// Z_i is known from the saved lse. A strip skips a node of keys only if for each of its rows
//     spent_i + exp(u - m d - lse_i) * gamma * (1 + m d_max)              <= tolerance,
// and for the keys of the node, with e_i = exp(u - m d - lse_i) * (1 + m d_max),
//     charged_J + sum of e_i over the rows of the strip                   <= tolerance.
// The factor 1 + m d_max is there only when slopes get a gradient; in it m is the size of the larger slope, and a slope
// of 0 counts as 1, since its gradient is a sum over distances all the same. docs/proof.md derives what follows.
#pragma once

#include "ledger.h"

namespace linbias::LINBIAS_VARIANT {

// What the keys of each node were charged for the rows of one head. Charging a node charges every key below it, without
// visiting them: `peak` is the largest charge of any key below a node by the node and its descendants.
template <class C>
class KeyAccount {
 public:
  void reset(const KeyTree<C>& tree) {
    tree_ = &tree;
    own_.reset(tree.nodes());
    peak_.reset(tree.nodes());
  }
  void clear() {
    for (int64_t i = 0; i < own_.size(); ++i) own_[i] = peak_[i] = 0;
  }
  // The largest charge of any key of the node.
  C charged(int level, int64_t index) const {
    C total = peak_[tree_->node(level, index)];
    for (int up = level + 1; up < tree_->levels(); ++up) total += own_[tree_->node(up, index /= kFan)];
    return total;
  }
  void charge(int level, int64_t index, C amount) {
    own_[tree_->node(level, index)] += amount;
    C below = peak_[tree_->node(level, index)] += amount;
    for (int up = level + 1; up < tree_->levels(); ++up) {
      const int64_t node = tree_->node(up, index /= kFan);
      below += own_[node];
      if (!(below > peak_[node])) return;
      peak_[node] = below;
    }
  }

 private:
  const KeyTree<C>* tree_ = nullptr;
  Buffer<C> own_, peak_;
};

// 1 + m d_max of rows with these slopes, m the larger of their sizes: a negative slope's gradient is a sum over
// distances like any other, and no charge may be negative.
template <class V>
LINBIAS_INLINE V distance_factor(V past, V future, V most) {
  past = past < 0 ? -past : past, future = future < 0 ? -future : future;
  const V steepest = past < future ? future : past;
  return 1 + (steepest == 0 ? V{} + 1 : steepest) * most;
}

// The account of one row tile, and of the keys for all row tiles of its head so far.
template <class C>
struct Account : JudgedRows<C> {
  using Base = JudgedRows<C>;
  using Base::at, Base::N, Base::looking, Base::judging, Base::past, Base::future, Base::position;

  alignas(64) C spent[N];  // bound of the skipped share
  alignas(64) C lse[N];
  KeyAccount<C> keys;
  bool farther = false;  // slopes get a gradient: shares count 1 + m d_max times
  C tolerance = 0;       // of a row
  C key_tolerance = 0;   // of a key, among the rows that share an account

  // `norms[row]` bounds |q|, `row_lse[row]` is +inf for rows that see nothing.
  void arm(const Call& call, const RowTile<C>& rows, const Bounds<C>& bounds, const C* norms, const C* row_lse,
           bool slopes_wanted, int shares) {
    farther = slopes_wanted;
    this->arm_rows(call, rows, bounds, norms);
    if (!looking) return;
    tolerance = bounds.tolerance(), key_tolerance = bounds.tolerance() / C(shares);
    for (int i = 0; i < N; ++i) spent[i] = 0, lse[i] = kInf<C>;
    for (int row = 0; row < rows.rows; ++row) lse[at(row)] = row_lse[row];
  }

  // Of the strips in the node's mask, those that may skip its keys; their rows and its keys are charged.
  uint32_t judge(const RowTile<C>& rows, const KeySpan& span, const Node<C>& node, C rho) {
    const typename Base::Place place = Base::place(rows, span, node.distance);
    const Vec<C> n = splat<C>(C(Bounds<C>::keys_of(node.level)));
    alignas(64) C total[N], share[N];
    const uint32_t fit = node.mask & Base::strips_where([&](int i) __attribute__((always_inline)) -> Mask<C> {
      const typename Base::Reach to = this->reach(i, place, rho);
      Vec<C> one = exp_held<C>(to.score - load<C>(lse + i) + C(4e-6));
      if (farther) {
        const Vec<C> p = load<C>(position + i);
        const Vec<C> most = place.distinct ? max_keep<C>(absolute<C>(p - place.low), absolute<C>(p - place.high))
                                           : splat<C>(kInf<C>);
        one *= distance_factor(load<C>(past + i), load<C>(future + i), most);
      }
      const Vec<C> sum = load<C>(spent + i) + one * ((to.past | to.future) ? ranks(to.slope, n) : n);
      store<C>(share + i, one), store<C>(total + i, sum);
      return sum <= splat<C>(tolerance);
    });
    uint32_t skip = 0;
    C charge = 0;
    const C left = key_tolerance - keys.charged(node.level, node.index);
    for (int s = 0; s < kStrips; ++s) {
      if (!(fit >> s & 1)) continue;
      C more = 0;
      for (int r = 0; r < kStrip; ++r) more += share[r * kStrips + s];
      if (!(charge + more <= left)) continue;
      charge += more;
      skip |= uint32_t(1) << s;
      for (int r = 0; r < kStrip; ++r) spent[r * kStrips + s] = total[r * kStrips + s];
    }
    if (skip) keys.charge(node.level, node.index, charge);
    return skip;
  }

  // The second look at one strip: `peak[r]` is the largest score - lse of row r among `count` keys of the tile,
  // `most[r]` at least 1 + m d_max. Charges and returns true if the strip may leave them out.
  template <class HasNan>
  bool settle_computed(int64_t tile, int s, int strip_rows, const C* peak, const C* most, int count,
                       const HasNan& has_nan) {
    C total[kStrip], share_sum = 0;
    for (int r = 0; r < strip_rows; ++r) {
      const int i = r * kStrips + s;
      if (!(peak[r] < C(-1))) return false;  // spares the exponential
      const C share = std::exp(peak[r]) * most[r] * C(1 + 1e-5);
      total[r] = spent[i] + share * C(count);
      share_sum += share;
      if (!(total[r] <= tolerance)) return false;
    }
    if (!(keys.charged(0, tile) + share_sum <= key_tolerance) || has_nan()) return false;
    keys.charge(0, tile, share_sum);
    for (int r = 0; r < strip_rows; ++r) spent[r * kStrips + s] = total[r];
    return true;
  }

 private:
  // gamma: no more than n keys, nor than an endless geometric tail.
  static Vec<C> ranks(Vec<C> slope, Vec<C> n) {
    // 1 / (1 - e^-m) <= 1 + 1 / m.
    const Vec<C> tail = (C(1) + C(1) / slope) * C(1 + 1e-5);
    return ((slope > C(0)) & (tail < n)) ? tail : n;
  }
};

}  // namespace linbias::LINBIAS_VARIANT
