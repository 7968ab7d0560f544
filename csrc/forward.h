// SPDX-License-Identifier: Apache-2.0
// Forward: one worker takes row tiles one by one, visits key tiles nearest first, skips what the ledger proves.
#pragma once

#include "direct.h"
#include "frontier.h"
#include "shared.h"
#include "tile_cache.h"

namespace linbias::LINBIAS_VARIANT {

// What one account of a row tile came to.
template <class C>
struct Partial {
  C top[kRows], weight[kRows], spent[kRows];
  int64_t computed[kStrips];
  uint32_t started = 0;
  Buffer<C> out;
};

template <class C>
class ForwardWorker {
 public:
  void reset(const Shared<C>& shared, const ForwardResult& result, int64_t slots, bool direct) {
    shared_ = &shared, call_ = &shared.call, result_ = result;
    const int64_t rows = tile_capacity(*call_, shared.tiling);
    query_.reset(rows * call_->D);
    scores_.reset(rows * kTile);
    out_.reset(rows * shared.value_width);
    spare_.reset(kTile * shared.value_width);
    direct_ = direct;
    const bool keys_in_place = shared.codec.plain && call_->key.stride[3] == 1;
    spare_keys_.reset(direct && !keys_in_place ? kTile * call_->D : 0);
    frontier_.reserve(shared.tree.nodes() + kFan);
    survivors_.reset(shared.tree.count(0));
    cache_.reset(*call_, shared.codec, slots, !direct);
  }

  // All of row tile `unit`: its rows of out, lse and skipped.
  void run(int64_t unit) {
    begin(unit);
    plan();
    pursue();
    finish();
  }

  // The same in three steps, where there are fewer row tiles than threads: the nearest tiles and the plan; parts of what
  // is left, each with an account of its own; their sum. Every account keeps its promise, so the sum does.
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
    pursue();
    save(partial);
  }
  void run_merge(int64_t unit, const Partial<C>* partials, int64_t count) {
    begin(unit);
    for (int row = 0; row < rows_.rows; ++row) merge_row(row, partials, count);
    for (int64_t p = 0; p < count; ++p)
      for (int s = 0; s < rows_.strips; ++s) computed_[s] += partials[p].computed[s];
    started_ = (uint32_t(1) << rows_.strips) - 1;
    finish();
  }

 private:
  const KeySpan& span_of(int level, int64_t index) const { return shared_->tree.span(rows_.b, level, index); }

  void begin(int64_t unit) {
    const int64_t per = shared_->tiling.tiles_per_unit;
    const int64_t b = unit / per / call_->G, g = unit / per % call_->G;
    rows_.fill(*call_, shared_->tiling, b, g, unit % per);
    cache_.bind(*call_, b, g);
    ledger_.clear(rows_);
    started_ = 0;
    spare_tile_ = next_tile_ = -1;
    for (int s = 0; s < rows_.strips; ++s) computed_[s] = 0;
    read_query();
    ledger_.arm(*call_, rows_, shared_->tree, shared_->bounds, norms_);
  }

  // Query rows times scale.
  void read_query() {
    const Codec<C>& codec = shared_->codec;
    const int64_t step = call_->query.stride[3];
    const int64_t D = call_->D;
    const bool judged = shared_->bounds.norms();
    for (int r = 0; r < rows_.rows; ++r) {
      const void* row = call_->query.at(codec.bytes, rows_.b, rows_.head[r], rows_.query[r]);
      if (judged) norms_[r] = codec.norm_bound(row, step, D);
      codec.widen(row, step, D, C(call_->scale), query_.data() + r * D);
    }
    const int64_t padding = rows_.strips * kStrip - rows_.rows;
    std::memset(query_.data() + rows_.rows * D, 0, static_cast<std::size_t>(padding * D) * sizeof(C));
  }

  void expand(Frontier<C>& frontier, int level, int64_t first, int64_t last, uint32_t mask) {
    for (int64_t i = first; i < last; ++i) {
      if (sight(*call_, rows_.span, span_of(level, i)) == Sight::none) continue;
      frontier.push({node_distance(*call_, rows_, shared_->tree, level, i), level, mask, i});
    }
  }

  void expand_node(Frontier<C>& frontier, const Node<C>& node, uint32_t mask) {
    const int64_t first = node.index * kFan;
    expand(frontier, node.level - 1, first, lesser(first + kFan, shared_->tree.count(node.level - 1)), mask);
  }

  // Visits the nearest tiles, whose weight pays for the rest; then charges that rest farthest first. What cannot be
  // charged is left in survivors_, farthest first.
  void plan() {
    const KeyTree<C>& tree = shared_->tree;
    const uint32_t everyone = (uint32_t(1) << rows_.strips) - 1;
    survived_ = 0;
    frontier_.clear(true);
    const int top = tree.levels() - 1;
    expand(frontier_, top, 0, tree.count(top), everyone);
    int beyond = 0;
    while (ledger_.judging && !frontier_.empty() && (frontier_.peek().distance <= 0 || beyond < 1)) {
      const Node<C> node = frontier_.pop();
      if (node.level > 0) {
        expand_node(frontier_, node, node.mask);
        continue;
      }
      beyond += node.distance > 0;
      visit(node.index, node.mask);
    }
    frontier_.reverse();
    while (!frontier_.empty()) {
      Node<C> node = frontier_.pop();
      node.mask &= ~judge(node);
      if (node.mask == 0) continue;
      if (node.level > 0)
        expand_node(frontier_, node, node.mask);
      else
        survivors_[survived_++] = node;
    }
  }

  uint32_t judge(const Node<C>& node) {
    if (!ledger_.judging) return 0;
    const C rho = shared_->bounds.rho(rows_.b, rows_.g, shared_->tree.node(node.level, node.index));
    return ledger_.judge(rows_, shared_->bounds, span_of(node.level, node.index), node.level, rho, node.distance,
                         node.mask);
  }

  // Visits the survivors nearest first. Each visit adds weight, which may pay for the farthest of them.
  void pursue() {
    int64_t far = 0;
    for (int64_t near = survived_ - 1; near >= far; --near) {
      for (; far < near; ++far) {
        survivors_[far].mask &= ~judge(survivors_[far]);
        if (survivors_[far].mask != 0) break;
      }
      Node<C>& node = survivors_[near];
      node.mask &= ~judge(node);
      next_tile_ = near > far ? survivors_[near - 1].index : -1;
      if (node.mask != 0) visit(node.index, node.mask);
    }
  }

  // --- one key tile ---

  void visit(int64_t tile, uint32_t mask) {
    const KeySpan& span = span_of(0, tile);
    const Sight whole = sight(*call_, rows_.span, span);
    keys_.begin(*call_, rows_, span, tile);
    calm_ = 0;
    if (shared_->bounds.norms())
      calm_ = ledger_.calm_strips(shared_->bounds.rho(rows_.b, rows_.g, tile));
    trim(tile, mask);
    seen_.clear();
    uint32_t active = 0;
    for (int s = 0; s < rows_.strips; ++s)
      if (mask >> s & 1 && score_strip(tile, s, whole)) active |= uint32_t(1) << s;
    if (active) accumulate(tile, active);
  }

  // Strips at the edge of their reach need only the near panels of a tile: charges the others, farthest first.
  void trim(int64_t tile, uint32_t mask) {
    for (int s = 0; s < rows_.strips; ++s) kept_[s] = {0, keys_.count};
    const KeySpan& span = *keys_.span;
    const bool past = rows_.span.low > span.high, future = rows_.span.high < span.low;
    if (!ledger_.judging || !span.consecutive() || !(past || future)) return;
    const C rho = shared_->bounds.rho(rows_.b, rows_.g, tile);
    KeySpan panel = span;
    const int panels = int(ceil_div(keys_.count, kPanel<C>));
    for (int n = 0; n < panels && mask; ++n) {
      const int p = past ? n : panels - 1 - n;
      panel.low = span.low + p * kPanel<C>;
      panel.high = lesser(span.high, panel.low + kPanel<C> - 1);
      mask = ledger_.judge(rows_, shared_->bounds, panel, -1, rho, C(0), mask);
      for (int s = 0; s < rows_.strips; ++s)
        if (mask >> s & 1) (past ? kept_[s].first : kept_[s].last) = past ? (p + 1) * kPanel<C> : p * kPanel<C>;
    }
  }

  // Scores, weights and sums of one strip; false if it contributes nothing to out.
  bool score_strip(int64_t tile, int s, Sight whole) {
    const Sight seen = whole == Sight::all ? whole : sight(*call_, rows_.strip[s], *keys_.span);
    if (seen == Sight::none) return false;
    const Sight mask = call_->attn_mask ? mask_sight(*call_, rows_, keys_, s) : Sight::all;
    if (mask == Sight::none) return false;
    Range range = kept_[s];
    if (seen == Sight::some) {
      const Range visible = visible_range(*call_, rows_.strip[s], *keys_.span, keys_.count);
      range = {greater(range.first, visible.first), lesser(range.last, visible.last)};
    }
    if (range.first >= range.last) return false;
    range_[s] = range;
    if (!direct_) cache_.prefetch_values(tile, s * kTile / kStrips, (s + 1) * kTile / kStrips);
    const int first = range.first / kPanel<C>, last = int(ceil_div(range.last, kPanel<C>));
    const bool look = ledger_.worth_looking(shared_->bounds, rows_, s, *keys_.span);
    dot_products(tile, s, first, last, look);
    computed_[s] += lesser(keys_.count, last * kPanel<C>) - first * kPanel<C>;
    const bool masked = mask == Sight::some;
    switch (form_of(rows_, keys_, seen, masked)) {
      case Form::bare: return soften<Form::bare>(s, first, last, seen, masked, look);
      case Form::biased: return soften<Form::biased>(s, first, last, seen, masked, look);
      default: return soften<Form::examined>(s, first, last, seen, masked, look);
    }
  }

  void dot_products(int64_t tile, int s, int first, int last, bool look) {
    constexpr int W = kPanel<C>;
    const int64_t D = call_->D;
    const C* query = query_.data() + s * kStrip * D;
    C* scores = scores_.data() + s * kStrip * kTile + first * W;
    if (direct_) return direct_products(tile, query, rows_.strip_rows(s), first * W, last * W, scores, look);
    const C* keys = cache_.keys(tile) + first * D * W;
    gemm<C, Into::zero>({query, D, 1}, {keys, W, D * W}, {scores, kTile, W}, D, rows_.strip_rows(s), last - first);
  }

  void direct_products(int64_t tile, const C* query, int rows, int begin, int end, C* scores, bool look) {
    const Rows& all = cache_.key_rows();
    const int64_t D = call_->D;
    const int count = lesser(end, keys_.count) - begin;
    const auto ahead = [&](int first, int last) __attribute__((always_inline)) {
      // Values that the second look is likely to leave out are not worth the memory traffic.
      if (!look) cache_.prefetch_values(tile, begin + first, begin + last);
      if (next_tile_ >= 0) cache_.prefetch_keys(next_tile_, begin + first, begin + last);
    };
    if (spare_keys_.size() == 0) {
      const C* keys = reinterpret_cast<const C*>(all.at(tile * kTile + begin));
      direct_dots<C>(query, D, rows, keys, all.row, count, D, scores, kTile, ahead);
    } else {
      if (spare_tile_ != tile) shared_->codec.pack_rows(all, tile * kTile, keys_.count, D, D, spare_keys_.data());
      spare_tile_ = tile;
      direct_dots<C>(query, D, rows, spare_keys_.data() + begin * D, D, count, D, scores, kTile, ahead);
    }
    // Columns beyond the last key are hidden later, whatever they hold; they must hold something.
    for (int r = 0; r < rows; ++r)
      for (int j = count; j < end - begin; ++j) scores[r * kTile + j] = 0;
  }

  // The scores of one row of a strip, vector by vector: cap, bias and visibility.
  template <Form F>
  struct Line {
    ForwardWorker& worker;
    const Examiner<C> examine;
    const int strip;
    const bool capped;
    const C cap, sharpness;

    Line(ForwardWorker& w, int s, Filled filled)
        : worker(w), examine(*w.call_, w.rows_, w.keys_, w.pairs_, s, filled), strip(s), capped(w.call_->has_softcap),
          cap(C(w.call_->softcap)), sharpness(Shared<C>::sharpness(*w.call_)) {}

    // Vector j of row r, whose dot products are x.
    LINBIAS_INLINE Vec<C> operator()(Vec<C> x, int r, int j) const {
      const int row = strip * kStrip + r;
      if (capped) x = tanh_lanes<C>(x * sharpness) * cap;
      if constexpr (F == Form::biased)
        x -= worker.rows_.past[row] * absolute<C>(worker.rows_.relative[row] - load<C>(worker.keys_.relative + j));
      if constexpr (F == Form::examined) {
        Mask<C> visible;
        x = examine(x, r, row, j, visible);
        worker.seen_.add(j, visible);
      }
      return x;
    }
  };

  // From dot products to weights; the second look; the running softmax.
  template <Form F>
  bool soften(int s, int first, int last, Sight seen, bool masked, bool look) {
    const int begin = first * kPanel<C>, end = last * kPanel<C>;
    Filled filled{false, false};
    if constexpr (F == Form::examined) {
      keys_.prepare(*call_, rows_.b);
      filled = fill_pairs(*call_, rows_, keys_, s, seen, masked, pairs_);
    } else {
      seen_.everywhere = true;
    }
    const Line<F> line(*this, s, filled);
    if (!look && calm_ >> s & 1) {
      weigh_calm(s, begin, end, line);
    } else {
      C peak[kStrip] = {};
      score_lines(s, begin, end, line, peak);
      if (look && second_look(s, begin, end, peak)) return false;
      weigh(s, begin, end, peak);
    }
    if (shared_->dropout.active()) drop(s, begin, end);
    return true;
  }

  // Scores in place of dot products; the largest of each row.
  template <Form F>
  void score_lines(int s, int begin, int end, const Line<F>& line, C* peak) {
    C* scores = scores_.data() + s * kStrip * kTile;
    for (int r = 0; r < rows_.strip_rows(s); ++r) {
      Vec<C> best = splat<C>(-kInf<C>);
      for (int j = begin; j < end; j += kLanes<C>) {
        const Vec<C> x = line(load<C>(scores + r * kTile + j), r, j);
        store<C>(scores + r * kTile + j, x);
        best = max_keep<C>(x, best);
      }
      peak[r] = max_lanes<C>(best);
    }
  }

  // Weights in place of dot products, relative to the tops as they are.
  template <Form F>
  void weigh_calm(int s, int begin, int end, const Line<F>& line) {
    C* scores = scores_.data() + s * kStrip * kTile;
    rescaled_[s] = false;
    for (int r = 0; r < rows_.strip_rows(s); ++r) {
      const Vec<C> top = splat<C>(ledger_.top[r * kStrips + s]);
      Vec<C> sum = {};
      for (int j = begin; j < end; j += kLanes<C>) {
        const Vec<C> w = exp_lanes<C>(line(load<C>(scores + r * kTile + j), r, j) - top);
        sum += w;
        store<C>(scores + r * kTile + j, w);
      }
      ledger_.weight[r * kStrips + s] += sum_lanes<C>(sum);
    }
  }

  // Whether the scores just computed prove that the strip may leave these keys out.
  bool second_look(int s, int begin, int end, const C* peak) {
    C total[kStrip];
    const int strip_rows = rows_.strip_rows(s);
    if (!ledger_.fits_computed(shared_->bounds, s, strip_rows, peak, end - begin, total)) return false;
    // A peak is the largest number and does not see NaN, which must reach the output.
    const C* scores = scores_.data() + s * kStrip * kTile;
    Mask<C> nan = {};
    for (int r = 0; r < strip_rows; ++r)
      for (int j = begin; j < end; j += kLanes<C>) {
        const Vec<C> x = load<C>(scores + r * kTile + j);
        nan |= x != x;
      }
    for (int lane = 0; lane < kLanes<C>; ++lane)
      if (nan[lane]) return false;
    ledger_.charge_strip(s, strip_rows, total);
    return true;
  }

  void weigh(int s, int begin, int end, const C* peak) {
    constexpr int L = kLanes<C>;
    const int strip_rows = rows_.strip_rows(s);
    C* scores = scores_.data() + s * kStrip * kTile;
    C base[kStrip] = {};
    rescale_strip(s, peak, base);
    for (int r = 0; r < strip_rows; ++r) {
      C* line = scores + r * kTile;
      Vec<C> sum = {};
      const Vec<C> shift = splat<C>(base[r]);
      for (int j = begin; j < end; j += L) {
        const Vec<C> w = exp_lanes<C>(load<C>(line + j) - shift);
        sum += w;
        store<C>(line + j, w);
      }
      ledger_.weight[r * kStrips + s] += sum_lanes<C>(sum);
    }
  }

  // Raises the tops of a strip to its peaks and rescales what was summed before. base: what scores are relative to.
  void rescale_strip(int s, const C* peak, C* base) {
    constexpr int width = kLanes<C> > 8 ? kLanes<C> : 8;
    C shrink[width] = {};
    bool same = true;
    for (int r = 0; r < rows_.strip_rows(s); ++r) {
      const C old = ledger_.top[r * kStrips + s], top = peak[r] > old ? peak[r] : old;
      base[r] = top == -kInf<C> ? C(0) : top;
      shrink[r] = old - base[r];
      ledger_.top[r * kStrips + s] = top;
      same = same && old == top;
    }
    C* scale = scale_ + s * kStrip;
    rescaled_[s] = !same;
    if (same) return;
    for (int v = 0; v < width; v += kLanes<C>) store<C>(shrink + v, exp_lanes<C>(load<C>(shrink + v)));
    for (int r = 0; r < rows_.strip_rows(s); ++r) {
      scale[r] = shrink[r];
      ledger_.weight[r * kStrips + s] *= shrink[r];
      ledger_.spent[r * kStrips + s] *= shrink[r];
    }
  }

  void drop(int s, int begin, int end) {
    alignas(64) C keep[kTile];
    for (int r = 0; r < rows_.strip_rows(s); ++r) {
      const int row = s * kStrip + r;
      shared_->dropout.template row<C>(rows_.b, rows_.head[row], rows_.query[row], keys_.first, keep);
      C* line = scores_.data() + row * kTile;
      // A dropped weight is 0 even where it is NaN: the pair does not exist for the output.
      for (int j = begin; j < end; ++j) line[j] = keep[j] != 0 ? line[j] : C(0);
    }
  }

  // out += weights * values, for the strips in `active`.
  void accumulate(int64_t tile, uint32_t active) {
    constexpr int W = kPanel<C>;
    const int64_t width = shared_->value_width;
    int64_t value_row = width;
    const C* values = cache_.values(tile, &value_row);
    if (seen_.hides(range_, rows_.strips, active, keys_.count))
      values = seen_.only(values, keys_.count, width, spare_.data(), &value_row);
    for (int s = 0; s < rows_.strips; ++s) {
      if (!(active >> s & 1)) continue;
      const Range range = range_[s];
      const Left<C> a{scores_.data() + s * kStrip * kTile + range.first, kTile, 1};
      const Right<C> b{values + range.first * value_row, value_row, W};
      const Target<C> c{out_.data() + s * kStrip * width, width, W, scale_ + s * kStrip};
      const int n = range.last - range.first, strip_rows = rows_.strip_rows(s), panels = int(width / W);
      if (!(started_ >> s & 1))
        gemm<C, Into::zero>(a, b, c, n, strip_rows, panels);
      else if (rescaled_[s])
        gemm<C, Into::scaled>(a, b, c, n, strip_rows, panels);
      else
        gemm<C, Into::add>(a, b, c, n, strip_rows, panels);
      started_ |= uint32_t(1) << s;
    }
  }

  // --- results ---

  void save(Partial<C>& partial) {
    const int64_t width = shared_->value_width;
    if (partial.out.size() == 0) partial.out.reset(out_.size());
    for (int row = 0; row < rows_.rows; ++row) {
      const int i = Ledger<C>::at(row);
      partial.top[row] = ledger_.top[i], partial.weight[row] = ledger_.weight[i], partial.spent[row] = ledger_.spent[i];
    }
    for (int s = 0; s < rows_.strips; ++s) partial.computed[s] = computed_[s];
    partial.started = started_;
    std::memcpy(partial.out.data(), out_.data(), static_cast<std::size_t>(rows_.rows * width) * sizeof(C));
  }

  void merge_row(int row, const Partial<C>* partials, int64_t count) {
    const int64_t width = shared_->value_width;
    C top = -kInf<C>, weight = 0, spent = 0;
    C* out = out_.data() + row * width;
    for (int64_t p = 0; p < count; ++p) top = greater(top, partials[p].top[row]);
    for (int64_t d = 0; d < width; ++d) out[d] = 0;
    for (int64_t p = 0; p < count; ++p) {
      const Partial<C>& part = partials[p];
      // Nothing seen. Not so a part whose scores are NaN: it has a weight, of NaN, and no top.
      if (part.weight[row] == 0) continue;
      const C factor = part.top[row] == -kInf<C> ? C(1) : std::exp(part.top[row] - top);
      weight += part.weight[row] * factor, spent += part.spent[row] * factor;
      if (!(part.started >> (row / kStrip) & 1)) continue;
      const C* sum = part.out.data() + row * width;
      for (int64_t d = 0; d < width; ++d) out[d] += sum[d] * factor;
    }
    const int i = Ledger<C>::at(row);
    ledger_.top[i] = top, ledger_.weight[i] = weight, ledger_.spent[i] = spent;
  }

  void finish() {
    const int64_t T = call_->T, H = call_->H, width = shared_->value_width;
    for (int row = 0; row < rows_.rows; ++row) {
      const int i = Ledger<C>::at(row);
      const C weight = ledger_.weight[i];
      const bool blind = weight == 0;
      const int64_t index = (rows_.b * H + rows_.head[row]) * T + rows_.query[row];
      const bool empty = blind || !(started_ >> (row / kStrip) & 1);
      write_row(out_.data() + row * width, C(shared_->dropout.scale()) / weight, empty, index);
      static_cast<C*>(result_.lse)[index] = blind ? -kInf<C> : ledger_.top[i] + std::log(weight);
      static_cast<C*>(result_.skipped)[index] = blind ? C(0) : ledger_.spent[i] / weight;
    }
    count_pairs();
  }

  void write_row(const C* sum, C factor, bool empty, int64_t index) const {
    const int64_t V = call_->V, bytes = V * shared_->codec.bytes;
    char* out = static_cast<char*>(result_.out) + index * bytes;
    if (empty)
      std::memset(out, 0, static_cast<std::size_t>(bytes));
    else
      shared_->codec.narrow(sum, V, factor, out);
  }

  void count_pairs() const {
    int64_t* computed = result_.computed + rows_.b * call_->H;
    int64_t pairs = 0;
    for (int row = 0; row < rows_.rows; ++row) {
      pairs += computed_[row / kStrip];
      if (row + 1 < rows_.rows && rows_.head[row + 1] == rows_.head[row]) continue;
      __atomic_fetch_add(computed + rows_.head[row], pairs, __ATOMIC_RELAXED);
      pairs = 0;
    }
  }

  const Shared<C>* shared_ = nullptr;
  const Call* call_ = nullptr;
  ForwardResult result_;
  RowTile<C> rows_;
  KeyTile<C> keys_;
  Ledger<C> ledger_;
  PairScratch<C> pairs_;
  TileCache<C> cache_;
  Frontier<C> frontier_;
  Buffer<Node<C>> survivors_;
  int64_t survived_ = 0, spare_tile_ = -1;
  int64_t next_tile_ = -1;  // the tile to be visited after this one, as far as known
  bool direct_ = false;
  Buffer<C> query_, scores_, out_, spare_, spare_keys_;
  C norms_[kRows];
  C scale_[kRows] = {};
  bool rescaled_[kStrips];
  Range range_[kStrips], kept_[kStrips];
  int64_t computed_[kStrips];
  uint32_t started_ = 0;  // strips whose rows of out_ hold something
  SeenKeys<C> seen_;
  uint32_t calm_ = 0;  // strips that need no new top for the current tile
};

}  // namespace linbias::LINBIAS_VARIANT
