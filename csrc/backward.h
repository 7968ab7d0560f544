// SPDX-License-Identifier: Apache-2.0
// Backward: one worker takes the row tiles of a share of one (b, kv head) in order, and for each the key tiles that the
// accounts cannot prove negligible. Five products a tile pair, one pass:
//
//     S = Q K^T   dP = dO V^T   dV += P^T dO   dK += dS^T Q   dQ += dS K      dS = P (dP - rowsum(dO O) + dlse)
//
// dQ stays with the row tile. dK and dV are summed in memory that belongs to the share alone, so that the result does
// not depend on which worker did what.
#pragma once

#include "account.h"
#include "direct.h"
#include "shared.h"
#include "tile_cache.h"

namespace linbias::LINBIAS_VARIANT {

// What all workers of a call read.
template <class C>
struct BackShared : Shared<C> {
  const BackwardCall& back;
  Call crossed;        // key and value exchanged: its tile cache packs values as panels and keys as rows
  int64_t key_width;   // D rounded up to panels
  int shares = 1;      // parts into which the row tiles of one (b, kv head) are cut
  bool slopes_wanted;
  bool scores_wanted;  // dS is needed, not only dV

  BackShared(const Call& c, const Codec<C>& elements, const BackwardCall& b)
      : Shared<C>(c, elements),
        back(b),
        crossed(c),
        key_width(round_up(c.D, kPanel<C>)),
        slopes_wanted(b.grad_slopes || b.grad_future_slopes),
        scores_wanted(b.grad_query || b.grad_key || slopes_wanted) {
    crossed.key = c.value, crossed.value = c.key;
    crossed.D = c.V, crossed.V = c.D;
  }
};

// Where one share sums its dK and dV; rows are key_width and value_width apart. A tile holds something only once it is
// `touched`.
template <class C>
struct KeySums {
  C* key = nullptr;
  C* value = nullptr;
  uint8_t* touched = nullptr;
};

template <class C>
class BackwardWorker {
 public:
  void reset(const BackShared<C>& shared, int64_t slots) {
    shared_ = &shared, call_ = &shared.call;
    direct_ = call_->T * call_->group() <= kDirectRows;
    query_.reset(kRows * shared.key_width, true);
    grad_out_.reset(kRows * shared.value_width, true);
    grad_query_.reset(kRows * shared.key_width, true);
    weights_.reset(kRows * kTile, true);
    slants_.reset(kRows * kTile, true);
    gains_.reset(call_->has_softcap ? kStrip * kTile : 0);
    spare_.reset(greater(kTile * shared.key_width, shared.value_width));
    frontier_.reserve(shared.tree.nodes() + kFan);
    keys_panels_.reset(*call_, shared.codec, slots, true);
    values_panels_.reset(shared.crossed, shared.codec, slots, true);
    key_account_.reset(shared.tree);
  }

  // Row tiles [first, last) of (b, g). slope_sums: (group, 2) doubles, past and future, added to.
  void run(int64_t b, int64_t g, int64_t first, int64_t last, const KeySums<C>& sums, double* slope_sums) {
    sums_ = sums, slope_sums_ = slope_sums;
    keys_panels_.bind(*call_, b, g);
    values_panels_.bind(shared_->crossed, b, g);
    head_ = -1;
    for (int64_t tile = first; tile < last; ++tile) {
      begin(b, g, tile);
      pursue();
      finish();
    }
  }

 private:
  const KeySpan& span_of(int level, int64_t index) const { return shared_->tree.span(rows_.b, level, index); }

  void begin(int64_t b, int64_t g, int64_t tile) {
    rows_.fill(*call_, shared_->tiling, b, g, tile);
    // Slopes of 0 get a gradient too: their rows take the paths that know distances.
    rows_.biased = rows_.biased || shared_->slopes_wanted;
    if (rows_.head[0] != head_) key_account_.clear();
    head_ = rows_.head[0];
    started_ = 0;
    for (int r = 0; r < rows_.rows; ++r) read_row(r);
    account_.arm(*call_, rows_, shared_->bounds, norms_, lse_, shared_->slopes_wanted, shared_->shares);
  }

  void read_row(int r) {
    const BackwardCall& back = shared_->back;
    const int64_t b = rows_.b, h = rows_.head[r], i = rows_.query[r], D = call_->D, V = call_->V;
    C* query = query_.data() + r * shared_->key_width;
    C* grad = grad_out_.data() + r * shared_->value_width;
    gives_bias_[r] = !(call_->query_unbiased && *call_->query_unbiased.at(b, i));
    norms_[r] = delta_[r] = 0;
    const C lse = *back.lse.template as<C>().at(b, h, i);
    if (lse == -kInf<C>) {
      // A row that sees nothing: zeros, so that no content of it reaches a product.
      lse_[r] = kInf<C>;
      std::memset(query, 0, static_cast<std::size_t>(D) * sizeof(C));
      std::memset(grad, 0, static_cast<std::size_t>(V) * sizeof(C));
      return;
    }
    lse_[r] = lse;
    const Codec<C>& codec = shared_->codec;
    const void* row = call_->query.at(codec.bytes, b, h, i);
    const int64_t step = call_->query.stride[3];
    if (shared_->bounds.active()) norms_[r] = codec.norm_bound(row, step, D);
    codec.widen(row, step, D, C(call_->scale), query);
    if (back.grad_out) {
      codec.widen(back.grad_out.at(codec.bytes, b, h, i), back.grad_out.stride[3], V, C(1), grad);
      codec.widen(back.out.at(codec.bytes, b, h, i), back.out.stride[3], V, C(1), spare_.data());
      // In double: dS is a difference that keeps this sum's whole error.
      double sum = 0;
      for (int64_t d = 0; d < V; ++d) sum += double(grad[d]) * double(spare_[d]);
      delta_[r] = C(sum);
    } else {
      std::memset(grad, 0, static_cast<std::size_t>(V) * sizeof(C));
    }
    if (back.grad_lse) delta_[r] -= *back.grad_lse.template as<C>().at(b, h, i);
  }

  // Farthest nodes first: they are the cheapest to skip. Z is known, so the order of visits is free.
  void pursue() {
    const KeyTree<C>& tree = shared_->tree;
    const int top = tree.levels() - 1;
    frontier_.clear(false);
    expand(top, 0, tree.count(top), (uint32_t(1) << rows_.strips) - 1);
    while (!frontier_.empty()) {
      Node<C> node = frontier_.pop();
      if (account_.judging) {
        const C rho = shared_->bounds.rho(rows_.b, rows_.g, tree.node(node.level, node.index));
        node.mask &= ~account_.judge(rows_, key_account_, span_of(node.level, node.index), node, rho);
        if (node.mask == 0) continue;
      }
      const int64_t child = node.index * kFan;
      if (node.level == 0)
        visit(node.index, node.mask);
      else
        expand(node.level - 1, child, lesser(child + kFan, tree.count(node.level - 1)), node.mask);
    }
  }

  void expand(int level, int64_t first, int64_t last, uint32_t mask) {
    for (int64_t i = first; i < last; ++i) {
      if (sight(*call_, rows_.span, span_of(level, i)) == Sight::none) continue;
      frontier_.push({node_distance(*call_, rows_, shared_->tree, level, i), level, mask, i});
    }
  }

  // --- one key tile ---

  void visit(int64_t tile, uint32_t mask) {
    const KeySpan& span = span_of(0, tile);
    const Sight whole = sight(*call_, rows_.span, span);
    keys_.begin(*call_, rows_, span, tile);
    seen_.clear();
    uint32_t active = 0;
    for (int s = 0; s < rows_.strips; ++s)
      if (mask >> s & 1 && strip_terms(tile, s, whole)) active |= uint32_t(1) << s;
    if (active == 0) return;
    if (sums_.key || sums_.value) add_to_keys(tile, active);
    if (shared_->back.grad_query) add_to_queries(tile, active);
  }

  // P and dS of one strip, in weights_ and slants_; false if it contributes nothing.
  bool strip_terms(int64_t tile, int s, Sight whole) {
    const Sight seen = whole == Sight::all ? whole : sight(*call_, rows_.strip[s], *keys_.span);
    if (seen == Sight::none) return false;
    const Sight mask = call_->attn_mask ? mask_sight(*call_, rows_, keys_, s) : Sight::all;
    if (mask == Sight::none) return false;
    Range range{0, keys_.count};
    if (seen == Sight::some) range = visible_range(*call_, rows_.strip[s], *keys_.span, keys_.count);
    if (range.first >= range.last) return false;
    const int first = range.first / kPanel<C>, last = int(ceil_div(range.last, kPanel<C>));
    range_[s] = {first * kPanel<C>, last * kPanel<C>};
    score_product(tile, s);
    const bool masked = mask == Sight::some;
    switch (form_of(rows_, keys_, seen, masked)) {
      case Form::bare: return terms<Form::bare>(tile, s, seen, masked);
      case Form::biased: return terms<Form::biased>(tile, s, seen, masked);
      default: return terms<Form::examined>(tile, s, seen, masked);
    }
  }

  // Strip rows of `left` times the panels of one tile, over range_[s].
  void product(const C* panels, const Buffer<C>& left, int64_t left_row, int64_t inner, int s, Buffer<C>& result) {
    constexpr int W = kPanel<C>;
    const int64_t panel = inner * W;
    const int first = range_[s].first / W, last = range_[s].last / W;
    gemm<C, Into::zero>({left.data() + s * kStrip * left_row, left_row, 1}, {panels + first * panel, W, panel},
                        {result.data() + s * kStrip * kTile + first * W, kTile, W}, inner, rows_.strip_rows(s),
                        last - first);
  }

  // Q K^T as forward formed it, in the same order: a score that rounds otherwise no longer fits the saved lse.
  void score_product(int64_t tile, int s) {
    if (!direct_) return product(keys_panels_.keys(tile), query_, shared_->key_width, call_->D, s, weights_);
    const int64_t width = shared_->key_width;
    int64_t key_row = width;
    const C* keys = values_panels_.values(tile, &key_row);
    const int begin = range_[s].first, count = lesser(range_[s].last, keys_.count) - begin;
    C* scores = weights_.data() + s * kStrip * kTile + begin;
    direct_dots<C>(query_.data() + s * kStrip * width, width, rows_.strip_rows(s), keys + begin * key_row, key_row, count,
                   call_->D, scores, kTile, [](int, int) {});
  }

  template <Form F>
  bool terms(int64_t tile, int s, Sight seen, bool masked) {
    Filled filled{false, false};
    if constexpr (F == Form::examined) {
      keys_.prepare(*call_, rows_.b);
      filled = fill_pairs(*call_, rows_, keys_, s, seen, masked, pairs_);
    }
    if (!exponents<F>(tile, s, filled)) return false;
    // Without a gradient of the output no value has a part in dS, NaN included.
    if (shared_->scores_wanted && shared_->back.grad_out)
      product(values_panels_.keys(tile), grad_out_, shared_->value_width, call_->V, s, slants_);
    else
      std::memset(slants_.data() + s * kStrip * kTile, 0, sizeof(C) * kStrip * kTile);
    clear_outside(s);
    for (int r = 0; r < rows_.strip_rows(s); ++r) row_terms<F>(s, r, filled);
    if (F != Form::examined) seen_.everywhere = true;
    return true;
  }

  // weights_: from dot products to score - lse, -inf where hidden. False if that proves the strip negligible.
  template <Form F>
  bool exponents(int64_t tile, int s, Filled filled) {
    const int begin = range_[s].first, end = range_[s].last, strip_rows = rows_.strip_rows(s);
    const Examiner<C> examine(*call_, rows_, keys_, pairs_, s, filled);
    const bool capped = call_->has_softcap;
    const C cap = C(call_->softcap), sharpness = Shared<C>::sharpness(*call_);
    C peak[kStrip], most[kStrip];
    for (int r = 0; r < strip_rows; ++r) {
      const int row = s * kStrip + r;
      C* line = weights_.data() + row * kTile;
      C* gain = capped ? gains_.data() + r * kTile : nullptr;
      const Vec<C> position = splat<C>(rows_.relative[row]), slope = splat<C>(rows_.past[row]);
      const Vec<C> lse = splat<C>(lse_[row]);
      Vec<C> best = splat<C>(-kInf<C>);
      for (int j = begin; j < end; j += kLanes<C>) {
        Vec<C> x = load<C>(line + j);
        if (capped) {
          const Vec<C> t = tanh_lanes<C>(x * sharpness);
          store<C>(gain + j, C(1) - t * t);
          x = t * cap;
        }
        if constexpr (F == Form::biased) x -= slope * absolute<C>(position - load<C>(keys_.relative + j));
        if constexpr (F == Form::examined) {
          Mask<C> visible;
          x = examine(x, r, row, j, visible);
          seen_.add(j, visible);
        }
        store<C>(line + j, x - lse);
        best = max_keep<C>(x, best);
      }
      peak[r] = max_lanes<C>(best);
      most[r] = factor_of(row);
    }
    if (!account_.looking || has_nan(s)) return true;
    return !account_.settle_computed(key_account_, tile, s, strip_rows, peak, most, end - begin);
  }

  // 1 + m d_max of a row and the current tile, where slopes get a gradient.
  C factor_of(int row) const {
    if (!shared_->slopes_wanted || !gives_bias_[row]) return 1;
    if (!keys_.exact) return kInf<C>;
    const KeySpan& span = *keys_.span;
    const C p = rows_.relative[row];
    const C most = greater(std::fabs(p - C(span.low - rows_.origin)), std::fabs(p - C(span.high - rows_.origin)));
    return distance_factor(rows_.past[row], rows_.future[row], most);
  }

  // A peak is the largest number and does not see NaN, which must reach the gradients.
  bool has_nan(int s) const {
    Mask<C> nan = {};
    for (int r = 0; r < rows_.strip_rows(s); ++r)
      for (int j = range_[s].first; j < range_[s].last; j += kLanes<C>) {
        const Vec<C> x = load<C>(weights_.data() + (s * kStrip + r) * kTile + j);
        nan |= x != x;
      }
    for (int lane = 0; lane < kLanes<C>; ++lane)
      if (nan[lane]) return true;
    return false;
  }

  // Keys that the strip did not look at have no part in the sums over the tile.
  void clear_outside(int s) {
    const Range range = range_[s];
    for (int row = s * kStrip; row < s * kStrip + rows_.strip_rows(s); ++row)
      for (C* line : {weights_.data() + row * kTile, slants_.data() + row * kTile}) {
        for (int j = 0; j < range.first; ++j) line[j] = 0;
        for (int j = range.last; j < kTile; ++j) line[j] = 0;
      }
  }

  // weights_ row: exponents to P (with dropout, what it leaves). slants_ row: dP to dS, times the cap's derivative.
  template <Form F>
  void row_terms(int s, int r, Filled filled) {
    const int row = s * kStrip + r, begin = range_[s].first, end = range_[s].last;
    C* line = weights_.data() + row * kTile;
    C* slant = slants_.data() + row * kTile;
    const bool dropped = shared_->dropout.active(), capped = call_->has_softcap;
    const bool sloped = shared_->slopes_wanted && gives_bias_[row];
    alignas(64) C keep[kTile];
    if (dropped) shared_->dropout.template row<C>(rows_.b, rows_.head[row], rows_.query[row], keys_.first, keep);
    const Vec<C> delta = splat<C>(delta_[row]), lift = splat<C>(C(shared_->dropout.scale()));
    Vec<C> past = {}, future = {};
    for (int j = begin; j < end; j += kLanes<C>) {
      const Vec<C> x = load<C>(line + j);
      Vec<C> p = exp_lanes<C>(x), dp = load<C>(slant + j), kept = p;
      if (dropped) {
        // A dropped pair does not exist for the output, NaN included.
        const Mask<C> stays = load<C>(keep + j) != C(0);
        dp = bits_and<C>(dp * lift, stays), kept = bits_and<C>(p * lift, stays);
      }
      Vec<C> ds = p * (dp - delta);
      const Mask<C> visible = ~(x == -kInf<C>);
      if constexpr (F == Form::examined) ds = bits_and<C>(ds, visible);
      store<C>(line + j, kept);
      if (sloped) add_slope_terms<F>(ds, r, row, j, filled, past, future);
      if (capped) ds *= load<C>(gains_.data() + r * kTile + j);
      // Again: the cap's derivative at a hidden key may be NaN.
      if constexpr (F == Form::examined) ds = bits_and<C>(ds, visible);
      store<C>(slant + j, ds);
    }
    if (!sloped) return;
    double* sums = slope_sums_ + (rows_.head[row] - rows_.g * call_->group()) * 2;
    sums[0] -= double(sum_lanes<C>(past)), sums[1] -= double(sum_lanes<C>(future));
  }

  template <Form F>
  LINBIAS_INLINE void add_slope_terms(Vec<C> ds, int r, int row, int j, Filled filled, Vec<C>& past,
                                      Vec<C>& future) const {
    const Vec<C> back = filled.distance ? load<C>(pairs_.distance + r * kTile + j)
                                        : splat<C>(rows_.relative[row]) - load<C>(keys_.relative + j);
    Vec<C> term = ds * absolute<C>(back);
    // Outside the strip's range or hidden, ds is 0 and distances are finite.
    if constexpr (F == Form::examined) term = bits_and<C>(term, ~load_mask<C>(keys_.unbiased + j));
    const Mask<C> later = back < C(0);
    past += bits_and<C>(term, ~later), future += bits_and<C>(term, later);
  }

  // --- sums over tiles ---

  // dV += P^T dO and dK += dS^T Q, over runs of active strips.
  void add_to_keys(int64_t tile, uint32_t active) {
    const int64_t start = tile * kTile;
    C* key = sums_.key ? sums_.key + start * shared_->key_width : nullptr;
    C* value = sums_.value ? sums_.value + start * shared_->value_width : nullptr;
    if (!sums_.touched[tile]) {
      sums_.touched[tile] = 1;
      const std::size_t bytes = static_cast<std::size_t>(keys_.count) * sizeof(C);
      if (key) std::memset(key, 0, bytes * static_cast<std::size_t>(shared_->key_width));
      if (value) std::memset(value, 0, bytes * static_cast<std::size_t>(shared_->value_width));
    }
    for (int s = 0; s < rows_.strips;) {
      if (!(active >> s & 1)) {
        ++s;
        continue;
      }
      const int from = s;
      Range reach = range_[s];
      for (; s < rows_.strips && active >> s & 1; ++s)
        reach = {lesser(reach.first, range_[s].first), greater(reach.last, range_[s].last)};
      reach.last = lesser(reach.last, keys_.count);
      const int first_row = from * kStrip, count = lesser(s * kStrip, rows_.rows) - first_row;
      if (value && shared_->back.grad_out) transposed(weights_, grad_out_, shared_->value_width, first_row, count, reach, value);
      if (key) transposed(slants_, query_, shared_->key_width, first_row, count, reach, key);
    }
  }

  // sums (keys x width) += pairs^T (keys x rows) times right (rows x width), for keys in `reach`.
  void transposed(const Buffer<C>& pairs, const Buffer<C>& right, int64_t width, int first_row, int count, Range reach,
                  C* sums) {
    constexpr int W = kPanel<C>;
    const Right<C> b{right.data() + first_row * width, width, W};
    for (int j = reach.first; j < reach.last;) {
      const int left = reach.last - j, n = left >= kStrip ? kStrip : left >= 3 ? 3 : left;
      gemm<C, Into::add, false>({pairs.data() + first_row * kTile + j, 1, kTile}, b, {sums + j * width, width, W},
                                count, n, int(width / W));
      j += n;
    }
  }

  // dQ += dS K.
  void add_to_queries(int64_t tile, uint32_t active) {
    constexpr int W = kPanel<C>;
    const int64_t width = shared_->key_width;
    int64_t key_row = width;
    const C* keys = values_panels_.values(tile, &key_row);
    if (seen_.hides(range_, rows_.strips, active, keys_.count))
      keys = seen_.only(keys, keys_.count, width, spare_.data(), &key_row);
    for (int s = 0; s < rows_.strips; ++s) {
      if (!(active >> s & 1)) continue;
      const int begin = range_[s].first, n = lesser(range_[s].last, keys_.count) - begin;
      const Left<C> a{slants_.data() + s * kStrip * kTile + begin, kTile, 1};
      const Right<C> b{keys + begin * key_row, key_row, W};
      const Target<C> c{grad_query_.data() + s * kStrip * width, width, W};
      if (started_ >> s & 1)
        gemm<C, Into::add>(a, b, c, n, rows_.strip_rows(s), int(width / W));
      else
        gemm<C, Into::zero>(a, b, c, n, rows_.strip_rows(s), int(width / W));
      started_ |= uint32_t(1) << s;
    }
  }

  void finish() {
    if (!shared_->back.grad_query) return;
    const C factor = C(call_->scale);
    for (int row = 0; row < rows_.rows; ++row) {
      const bool empty = !(started_ >> (row / kStrip) & 1);
      const int64_t bytes = call_->D * shared_->codec.bytes;
      const int64_t index = (rows_.b * call_->H + rows_.head[row]) * call_->T + rows_.query[row];
      char* out = static_cast<char*>(shared_->back.grad_query) + index * bytes;
      if (empty)
        std::memset(out, 0, static_cast<std::size_t>(bytes));
      else
        shared_->codec.narrow(grad_query_.data() + row * shared_->key_width, call_->D, factor, out);
    }
  }

  const BackShared<C>* shared_ = nullptr;
  const Call* call_ = nullptr;
  bool direct_ = false;  // forward took dot products of few rows with keys where they lie
  KeySums<C> sums_;
  double* slope_sums_ = nullptr;
  int64_t head_ = -1;  // whose rows the key account is about
  RowTile<C> rows_;
  KeyTile<C> keys_;
  RowAccount<C> account_;
  KeyAccount<C> key_account_;
  PairScratch<C> pairs_;
  TileCache<C> keys_panels_, values_panels_;
  Frontier<C> frontier_;
  Buffer<C> query_, grad_out_, grad_query_, weights_, slants_, gains_, spare_;
  C norms_[kRows], lse_[kRows], delta_[kRows];
  bool gives_bias_[kRows];
  Range range_[kStrips];
  uint32_t started_ = 0;  // strips whose rows of grad_query_ hold something
  SeenKeys<C> seen_;
};

}  // namespace linbias::LINBIAS_VARIANT
