// SPDX-License-Identifier: Apache-2.0
// How a row tile walks the key tree: which node comes next, what the account proves negligible, which is visited.
#pragma once

#include <algorithm>

#include "scores.h"

namespace linbias::LINBIAS_VARIANT {

// The nearest distance between the rows of a tile and a node, in the units that slopes multiply.
template <class C>
inline C node_distance(const Call& call, const RowTile<C>& rows, const KeyTree<C>& tree, int level, int64_t index) {
  const KeySpan& keys = tree.span(rows.b, level, index);
  if (keys.unbiased) return 0;  // some of its keys are as near as any to every row
  if (call.metric == Metric::none) {
    const int64_t back = minus(rows.span.low, keys.high), ahead = minus(keys.low, rows.span.high);
    return C(greater<int64_t>(0, greater(back, ahead)));
  }
  const C* box = tree.box(rows.b, level, index);
  // Nobody knows how far a key at NaN is: nearer than any bound allows to skip.
  for (int64_t c = 0; c < call.C; ++c)
    if (box[c] != box[c]) return -kInf<C>;
  C least = kInf<C>;
  for (int r = 0; r < rows.rows; ++r) {
    C distance = 0;
    for (int64_t c = 0; c < call.C; ++c) {
      const C x = rows.coordinates[r * call.C + c];
      const C gap = greater(C(0), greater(box[c] - x, x - box[call.C + c]));
      distance += call.metric == Metric::euclidean ? gap * gap : gap;
    }
    least = lesser(least, distance);
  }
  return call.metric == Metric::euclidean ? std::sqrt(least) : least;
}

// A heap of nodes over storage of fixed size.
template <class C>
class Frontier {
 public:
  void reserve(int64_t capacity) { nodes_.reset(capacity); }
  bool empty() const { return size_ == 0; }
  void clear(bool nearest_first) { size_ = 0, after_.nearest = nearest_first; }
  const Node<C>& peek() const { return nodes_[0]; }

  void push(const Node<C>& node) {
    nodes_[size_++] = node;
    std::push_heap(nodes_.data(), nodes_.data() + size_, after_);
  }
  Node<C> pop() {
    std::pop_heap(nodes_.data(), nodes_.data() + size_--, after_);
    return nodes_[size_];
  }
  // The same nodes in the opposite order.
  void reverse() {
    after_.nearest = !after_.nearest;
    std::make_heap(nodes_.data(), nodes_.data() + size_, after_);
  }

 private:
  struct After {
    bool nearest = true;
    bool operator()(const Node<C>& a, const Node<C>& b) const {
      if (a.distance != b.distance) return nearest ? a.distance > b.distance : a.distance < b.distance;
      return a.index < b.index;  // any fixed order: results must not depend on history
    }
  };

  Buffer<Node<C>> nodes_;
  int64_t size_ = 0;
  After after_;
};

// A row tile on its way through the key tiles.
template <class C>
class Walk : protected Scores<C> {
 protected:
  using Scores<C>::call_, Scores<C>::shared_, Scores<C>::rows_;

  void reset(const Shared<C>& shared, int64_t slots, int key_packings, int value_packings) {
    Scores<C>::reset(shared, slots, key_packings, value_packings);
    frontier_.reserve(shared.tree.nodes() + kFan);
  }

  const KeySpan& span_of(int level, int64_t index) const { return shared_->tree.span(rows_.b, level, index); }
  uint32_t all_strips() const { return (uint32_t(1) << rows_.strips) - 1; }

  // At the roots of the tree.
  void start(bool nearest_first) {
    frontier_.clear(nearest_first);
    const int roots = shared_->tree.levels() - 1;
    expand(roots, 0, shared_->tree.count(roots), all_strips());
  }

  // Takes node after node until `done(next)`: the strips in `judge(node)` need not see it; what is left of a tile goes
  // to `take`, what is left of a superblock to its children.
  template <class Done, class Judge, class Take>
  void descend(const Done& done, const Judge& judge, const Take& take) {
    while (!frontier_.empty() && !done(frontier_.peek())) {
      Node<C> node = frontier_.pop();
      node.mask &= ~judge(node);
      if (node.mask == 0) continue;
      const int64_t child = node.index * kFan;
      if (node.level == 0)
        take(node);
      else
        expand(node.level - 1, child, lesser(child + kFan, shared_->tree.count(node.level - 1)), node.mask);
    }
  }

  // The strips to which the account can charge a node.
  template <class Account>
  uint32_t charge(Account& account, const Node<C>& node) const {
    if (!account.judging) return 0;
    const C rho = shared_->bounds.rho(rows_.b, rows_.g, shared_->tree.node(node.level, node.index));
    return account.judge(rows_, span_of(node.level, node.index), node, rho);
  }

  // All nodes that are left, less what the account can be charged for.
  template <class Account, class Take>
  void spend(Account& account, const Take& take) {
    descend([](const Node<C>&) { return false; }, [&](const Node<C>& node) { return charge(account, node); }, take);
  }

  Frontier<C> frontier_;

 private:
  void expand(int level, int64_t first, int64_t last, uint32_t mask) {
    for (int64_t i = first; i < last; ++i)
      if (block_visibility(*call_, rows_.span, span_of(level, i)) != BlockVisibility::empty)
        frontier_.push({node_distance(*call_, rows_, shared_->tree, level, i), level, mask, i});
  }
};

}  // namespace linbias::LINBIAS_VARIANT
