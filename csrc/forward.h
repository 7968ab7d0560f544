// SPDX-License-Identifier: Apache-2.0
// Forward: one worker takes row tiles one by one, visits key tiles nearest first, skips what the ledger proves.
#pragma once

#include "walk.h"

namespace linbias::LINBIAS_VARIANT {

// What one account of a row tile came to.
template <class C>
struct Partial : RunningSums<C> {
  int64_t computed[kStrips];
  uint32_t started = 0;
  Buffer<C> out;
};

template <class C>
class ForwardWorker : Walk<C> {
  using Base = Walk<C>;
  using Base::call_, Base::shared_, Base::rows_, Base::keys_, Base::seen_, Base::range_, Base::frontier_, Base::direct_;
  using Base::key_cache_, Base::value_cache_, Base::norms_, Base::score_row;
  template <Form F>
  using Line = typename Base::template Line<F>;

 public:
  void reset(const Shared<C>& shared, const ForwardResult& result, int64_t slots, bool direct) {
    Base::reset(shared, slots, direct ? as_rows : as_panels, as_rows);
    result_ = result;
    out_.reset(shared.tiling.capacity() * shared.value_width);
    survivors_.reset(shared.tree.count(0));
  }

  // All of row tile `unit`: its rows of out, lse and skipped.
  void run(int64_t unit) {
    begin(unit);
    plan();
    visit_survivors();
    finish(unit);
  }

  // The same in three steps, where there are fewer row tiles than threads: the nearest tiles and the plan; parts of
  // what is left, each with an account of its own; their sum. Every account keeps its promise, so the sum does.
  void run_plan(int64_t unit, Partial<C>& partial, Node<C>* survivors, int64_t* count) {
    begin(unit);
    plan();
    for (int64_t i = 0; i < survived_; ++i) survivors[i] = survivors_[i];
    *count = survived_;
    save(partial);
  }
  void run_part(int64_t unit, Partial<C>& partial, const Node<C>* survivors, int64_t count, int64_t part,
                int64_t parts) {
    begin(unit);
    survived_ = 0;
    for (int64_t i = part; i < count; i += parts) survivors_[survived_++] = survivors[i];
    visit_survivors();
    save(partial);
  }
  void run_merge(int64_t unit, const Partial<C>* partials, int64_t count) {
    begin(unit);
    for (int row = 0; row < rows_.rows; ++row) merge_row(row, partials, count);
    for (int64_t p = 0; p < count; ++p)
      for (int s = 0; s < rows_.strips; ++s) computed_[s] += partials[p].computed[s];
    started_ = Base::all_strips();
    finish(unit);
  }

 private:
  void begin(int64_t unit) {
    const int64_t per = shared_->tiling.tiles_per_unit, bg = unit / per;
    Base::begin_rows(bg / call_->G, bg % call_->G, unit % per);
    ledger_.clear(rows_);
    started_ = 0;
    next_tile_ = -1;
    for (int s = 0; s < rows_.strips; ++s) computed_[s] = 0;
    for (int r = 0; r < rows_.rows; ++r) Base::read_query(r, shared_->bounds.norms());
    ledger_.arm(*call_, rows_, shared_->bounds, norms_);
  }

  // Visits the nearest tiles, whose weight pays for the rest; then charges that rest farthest first. What cannot be
  // charged is left in survivors_, farthest first.
  void plan() {
    survived_ = 0;
    Base::start(true);
    int beyond = 0;
    const auto far = [&](const Node<C>& next) { return !ledger_.judging || (next.distance > 0 && beyond > 0); };
    Base::descend(far, [](const Node<C>&) { return uint32_t(0); }, [&](const Node<C>& node) {
      beyond += node.distance > 0;
      visit(node);
    });
    frontier_.reverse();
    Base::spend(ledger_, [&](const Node<C>& node) { survivors_[survived_++] = node; });
  }

  // Nearest first. Each visit adds weight, which may pay for the farthest of them.
  void visit_survivors() {
    int64_t far = 0;
    for (int64_t near = survived_ - 1; near >= far; --near) {
      for (; far < near; ++far) {
        survivors_[far].mask &= ~Base::charge(ledger_, survivors_[far]);
        if (survivors_[far].mask != 0) break;
      }
      Node<C>& node = survivors_[near];
      node.mask &= ~Base::charge(ledger_, node);
      next_tile_ = near > far ? survivors_[near - 1].index : -1;
      if (node.mask != 0) visit(node);
    }
  }

  // --- one key tile ---

  void visit(const Node<C>& node) {
    Base::begin_keys(Base::span_of(0, node.index), node.index);
    const bool judged = shared_->bounds.norms() && room_ == 1;
    no_rescale_ = judged ? ledger_.no_rescale(shared_->bounds.rho(rows_.b, rows_.g, node.index)) : 0;
    trim(node);
    uint32_t active = 0;
    for (int s = 0; s < rows_.strips; ++s)
      if (node.mask >> s & 1 && score_strip(node.index, s)) active |= uint32_t(1) << s;
    if (active)
      Base::add_products(score_row(0), value_cache_, node.index, active, shared_->value_width, out_.data(), started_,
                         [&](int s) { return rescaled_[s] ? scale_ + s * kStrip : nullptr; });
  }

  // Strips at the edge of their reach need only the near panels of a tile: charges the others, farthest first.
  void trim(const Node<C>& node) {
    const KeySpan& span = *keys_.span;
    const bool past = rows_.span.low > span.high, future = rows_.span.high < span.low;
    if (!ledger_.judging || !span.consecutive() || !(past || future)) return;
    const C rho = shared_->bounds.rho(rows_.b, rows_.g, node.index);
    Node<C> panel{0, -1, node.mask, node.index};
    KeySpan keys = span;
    const int panels = int(ceil_div(keys_.count, kPanel<C>));
    for (int n = 0; n < panels && panel.mask; ++n) {
      const int p = past ? n : panels - 1 - n;
      keys.low = span.low + p * kPanel<C>;
      keys.high = span.low + lesser(keys_.count, (p + 1) * kPanel<C>) - 1;
      panel.mask = ledger_.judge(rows_, keys, panel, rho);
      for (int s = 0; s < rows_.strips; ++s)
        if (panel.mask >> s & 1) (past ? range_[s].first : range_[s].last) = past ? (p + 1) * kPanel<C> : p * kPanel<C>;
    }
  }

  // Scores, weights and sums of one strip; false if it contributes nothing to out.
  bool score_strip(int64_t tile, int s) {
    const Form form = Base::meet(s);
    if (form == Form::hidden) return false;
    const int begin = Base::columns(s).first, end = Base::columns(s).last;
    const bool look = ledger_.worth_looking(rows_, s, *keys_.span);
    if (!direct_) value_cache_.prefetch(tile, s * kTile / kStrips, (s + 1) * kTile / kStrips);
    Base::dot_products(tile, s, [&](int first, int last) __attribute__((always_inline)) {
      // Values that the second look is likely to leave out are not worth the memory traffic.
      if (!look) value_cache_.prefetch(tile, begin + first, begin + last);
      if (next_tile_ >= 0) key_cache_.prefetch(next_tile_, begin + first, begin + last);
    });
    computed_[s] += lesser(keys_.count, end) - begin;
    switch (form) {
      case Form::bare: return online_softmax<Form::bare>(s, begin, end, look);
      case Form::biased: return online_softmax<Form::biased>(s, begin, end, look);
      default: return online_softmax<Form::examined>(s, begin, end, look);
    }
  }

  // From dot products to weights; the second look; the running softmax.
  template <Form F>
  bool online_softmax(int s, int begin, int end, bool look) {
    const Line<F> line(*this, s);
    if (!look && no_rescale_ >> s & 1) {
      weigh_unscaled(s, begin, end, line);
    } else {
      C peak[kStrip] = {};
      score_lines(s, begin, end, line, peak);
      if (look && ledger_.settle_computed(s, rows_.strip_rows(s), peak, end - begin, [&] { return Base::has_nan(s); }))
        return false;
      weigh_rescaled(s, begin, end, peak);
    }
    if (shared_->dropout.active()) drop(s, begin, end);
    if (room_ != 1) make_room(s, begin, end);
    return true;
  }

  // Scores in place of dot products; the largest of each row.
  template <Form F>
  void score_lines(int s, int begin, int end, const Line<F>& line, C* peak) {
    for (int r = 0; r < rows_.strip_rows(s); ++r) {
      C* scores = score_row(s * kStrip + r);
      const auto score = line.along(r);
      Vec<C> best = splat<C>(-kInf<C>);
      for (int j = begin; j < end; j += kLanes<C>) {
        const Vec<C> x = score(load<C>(scores + j), j);
        store<C>(scores + j, x);
        best = max_keep<C>(x, best);
      }
      peak[r] = max_lanes<C>(best);
    }
  }

  // Weights in place of dot products, relative to the row maxima as they are.
  template <Form F>
  void weigh_unscaled(int s, int begin, int end, const Line<F>& line) {
    rescaled_[s] = false;
    for (int r = 0; r < rows_.strip_rows(s); ++r)
      weigh_row(s, r, begin, end, ledger_.row_max[r * kStrips + s], line.along(r));
  }

  void weigh_rescaled(int s, int begin, int end, const C* peak) {
    C base[kStrip] = {};
    rescale_strip(s, peak, base);
    for (int r = 0; r < rows_.strip_rows(s); ++r)
      weigh_row(s, r, begin, end, base[r], [](Vec<C> x, int) __attribute__((always_inline)) { return x; });
  }

  template <class Score>
  LINBIAS_INLINE void weigh_row(int s, int r, int begin, int end, C base, const Score& score) {
    C* scores = score_row(s * kStrip + r);
    const Vec<C> shift = splat<C>(base);
    Vec<C> sum = {};
    for (int j = begin; j < end; j += kLanes<C>) {
      const Vec<C> w = exp_lanes<C>(score(load<C>(scores + j), j) - shift);
      sum += w;
      store<C>(scores + j, w);
    }
    ledger_.row_sum[r * kStrips + s] += sum_lanes<C>(sum);
  }

  // Raises the row maxima of a strip to its peaks, rescales what was summed before. base: what scores are relative to.
  void rescale_strip(int s, const C* peak, C* base) {
    constexpr int width = kLanes<C> > 8 ? kLanes<C> : 8;
    C shrink[width] = {};
    bool same = true;
    for (int r = 0; r < rows_.strip_rows(s); ++r) {
      const C old = ledger_.row_max[r * kStrips + s], most = peak[r] > old ? peak[r] : old;
      base[r] = most == -kInf<C> ? C(0) : most;
      shrink[r] = old - base[r];
      ledger_.row_max[r * kStrips + s] = most;
      same = same && old == most;
    }
    C* scale = scale_ + s * kStrip;
    rescaled_[s] = !same;
    if (same) return;
    for (int v = 0; v < width; v += kLanes<C>) store<C>(shrink + v, exp_lanes<C>(load<C>(shrink + v)));
    for (int r = 0; r < rows_.strip_rows(s); ++r) {
      scale[r] = shrink[r];
      ledger_.row_sum[r * kStrips + s] *= shrink[r];
      ledger_.spent[r * kStrips + s] *= shrink[r];
    }
  }

  void drop(int s, int begin, int end) {
    alignas(64) C keep[kTile];
    for (int r = 0; r < rows_.strip_rows(s); ++r) {
      const int row = s * kStrip + r;
      shared_->dropout.template row<C>(rows_.b, rows_.head[row], rows_.query[row], keys_.first, keep);
      C* line = score_row(row);
      // A dropped weight is 0 even where it is NaN: the pair does not exist for the output.
      for (int j = begin; j < end; ++j) line[j] = keep[j] != 0 ? line[j] : C(0);
    }
  }

  void make_room(int s, int begin, int end) {
    for (int r = s * kStrip; r < s * kStrip + rows_.strip_rows(s); ++r)
      for (int j = begin; j < end; ++j) score_row(r)[j] *= room_;
  }

  // --- results ---

  void save(Partial<C>& partial) {
    if (partial.out.size() == 0) partial.out.reset(out_.size());
    static_cast<RunningSums<C>&>(partial) = ledger_;
    std::memcpy(partial.computed, computed_, sizeof computed_);
    partial.started = started_;
    std::memcpy(partial.out.data(), out_.data(), std::size_t(rows_.rows * shared_->value_width) * sizeof(C));
  }

  void merge_row(int row, const Partial<C>* partials, int64_t count) {
    const int64_t width = shared_->value_width;
    const int i = Ledger<C>::at(row);
    C row_max = -kInf<C>, row_sum = 0, spent = 0;
    C* out = out_.data() + row * width;
    for (int64_t p = 0; p < count; ++p) row_max = greater(row_max, partials[p].row_max[i]);
    for (int64_t d = 0; d < width; ++d) out[d] = 0;
    for (int64_t p = 0; p < count; ++p) {
      const Partial<C>& part = partials[p];
      // Nothing seen. Not so a part whose scores are NaN: its sum is NaN, and it has no maximum.
      if (part.row_sum[i] == 0) continue;
      const C factor = part.row_max[i] == -kInf<C> ? C(1) : std::exp(part.row_max[i] - row_max);
      row_sum += part.row_sum[i] * factor, spent += part.spent[i] * factor;
      if (!(part.started >> (row / kStrip) & 1)) continue;
      for (int64_t d = 0; d < width; ++d) out[d] += part.out[row * width + d] * factor;
    }
    ledger_.row_max[i] = row_max, ledger_.row_sum[i] = row_sum, ledger_.spent[i] = spent;
  }

  void finish(int64_t unit) {
    int64_t pairs = 0;
    for (int row = 0; row < rows_.rows; ++row) {
      const int i = Ledger<C>::at(row);
      const C row_sum = ledger_.row_sum[i];
      const bool fully_masked = row_sum == 0, empty = fully_masked || !(started_ >> (row / kStrip) & 1);
      Base::write_row(result_.out, row, out_.data() + row * shared_->value_width, call_->V,
                      C(shared_->dropout.scale()) / row_sum / room_, empty);
      if (room_ != 1 || result_.out_only()) continue;  // the rest is written, or not wanted
      write_lse(Base::place(row), ledger_.row_max[i], row_sum);
      static_cast<C*>(result_.skipped)[Base::place(row)] = fully_masked ? C(0) : ledger_.spent[i] / row_sum;
      pairs += computed_[row / kStrip];
      if (row + 1 < rows_.rows && rows_.head[row + 1] == rows_.head[row]) continue;
      __atomic_fetch_add(result_.computed + rows_.b * call_->H + rows_.head[row], pairs, __ATOMIC_RELAXED);
      pairs = 0;
    }
    if (room_ == 1 && overflowed()) redo(unit);
  }

  // Weights are at most e^20 and S of them are summed, so values near the end of the range may overflow. The outputs of
  // such a tile are made again, with weights of at most 1 / S.
  void redo(int64_t unit) {
    for (int64_t keys = call_->S; keys > 0; keys /= 2) room_ /= 2;
    run(unit);
    room_ = 1;
  }

  // Or values are not finite.
  bool overflowed() const {
    Mask<C> finite = ~Mask<C>{};
    for (int row = 0; row < rows_.rows; ++row)
      if (started_ >> (row / kStrip) & 1)
        for (int64_t d = 0; d < shared_->value_width; d += kLanes<C>)
          finite &= absolute<C>(load<C>(out_.data() + row * shared_->value_width + d)) < kInf<C>;
    for (int lane = 0; lane < kLanes<C>; ++lane)
      if (!finite[lane]) return true;
    return false;
  }

  // log(row_sum) + row_max in two numbers, the first of which is the sum, rounded. In double, and for double with the
  // rounding of the sum itself (Knuth's TwoSum), so that backward finds the weights that forward had.
  void write_lse(int64_t index, C row_max, C row_sum) const {
    const double a = double(row_max), b = std::log(double(row_sum)), sum = a + b, of_b = sum - a;
    const C lse = C(sum), low = C((sum - double(lse)) + ((a - (sum - of_b)) + (b - of_b)));
    static_cast<C*>(result_.lse)[index] = row_sum == 0 ? -kInf<C> : lse;
    static_cast<C*>(result_.lse_low)[index] = std::fabs(lse) < kInf<C> && row_sum != 0 ? low : C(0);
  }

  ForwardResult result_;
  Ledger<C> ledger_;
  Buffer<Node<C>> survivors_;
  int64_t survived_ = 0;
  int64_t next_tile_ = -1;  // the tile to be visited after this one, as far as known
  Buffer<C> out_;
  C scale_[kRows] = {};
  C room_ = 1;  // what weights are multiplied by, a power of 2
  bool rescaled_[kStrips];
  int64_t computed_[kStrips];
  uint32_t started_ = 0;     // strips whose rows of out_ hold something
  uint32_t no_rescale_ = 0;  // strips that need no new maximum for the current tile
};

}  // namespace linbias::LINBIAS_VARIANT
