// SPDX-License-Identifier: Apache-2.0
// Which node of the key tree comes next: nearest first while visiting, farthest first while charging.
#pragma once

#include "pairs.h"

namespace linbias::LINBIAS_VARIANT {

template <class C>
struct Node {
  C distance;     // nearest distance to any row of the tile
  int level;
  uint32_t mask;  // strips that still need it
  int64_t index;
};

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

// A binary heap over storage of fixed size.
template <class C>
class Frontier {
 public:
  void reserve(int64_t capacity) { nodes_.reset(capacity); }
  bool empty() const { return size_ == 0; }
  int64_t size() const { return size_; }
  void clear(bool nearest_first) { size_ = 0, nearest_ = nearest_first; }

  void push(const Node<C>& node) {
    int64_t i = size_++;
    for (; i > 0 && before(node, nodes_[(i - 1) / 2]); i = (i - 1) / 2) nodes_[i] = nodes_[(i - 1) / 2];
    nodes_[i] = node;
  }

  Node<C> pop() {
    const Node<C> first = nodes_[0], last = nodes_[--size_];
    sink(0, last);
    return first;
  }
  const Node<C>& peek() const { return nodes_[0]; }

  // The same nodes in the opposite order.
  void reverse() {
    nearest_ = !nearest_;
    for (int64_t i = size_ / 2 - 1; i >= 0; --i) sink(i, nodes_[i]);
  }

 private:
  bool before(const Node<C>& a, const Node<C>& b) const {
    if (a.distance != b.distance) return nearest_ ? a.distance < b.distance : a.distance > b.distance;
    return a.index > b.index;  // any fixed order: results must not depend on history
  }
  void sink(int64_t i, const Node<C> node) {
    for (int64_t child; (child = 2 * i + 1) < size_; i = child) {
      if (child + 1 < size_ && before(nodes_[child + 1], nodes_[child])) ++child;
      if (!before(nodes_[child], node)) break;
      nodes_[i] = nodes_[child];
    }
    if (size_ > 0) nodes_[i] = node;
  }

  Buffer<Node<C>> nodes_;
  int64_t size_ = 0;
  bool nearest_ = true;
};

}  // namespace linbias::LINBIAS_VARIANT
