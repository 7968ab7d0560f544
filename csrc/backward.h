// SPDX-License-Identifier: Apache-2.0
// Backward: one worker takes the row tiles of a share of one (b, kv head) in order, and for each the key tiles that the
// accounts cannot prove negligible. Five products a tile pair, one pass:
//
//     S = Q K^T   dP = dO V^T   dV += P^T dO   dK += dS^T Q   dQ += dS K      dS = P (dP - rowsum(dO O) + dlse)
//     P = exp((score - lse) - lse_low)
//
// dQ stays with the row tile. dK and dV are summed in memory that belongs to the share alone, so that the result does
// not depend on which worker did what.
#pragma once

#include "account.h"
#include "walk.h"

namespace linbias::LINBIAS_VARIANT {

// What all workers of a call read.
template <class C>
struct BackShared : Shared<C> {
  const BackwardCall& back;
  int shares = 1;      // parts into which the row tiles of one (b, kv head) are cut
  bool slopes_wanted;
  bool scores_wanted;  // dS is needed, not only dV

  BackShared(const Call& c, const Codec<C>& elements, const BackwardCall& b)
      : Shared<C>(c, elements),
        back(b),
        slopes_wanted(b.grad_slopes || b.grad_future_slopes),
        scores_wanted(b.grad_query || b.grad_key || slopes_wanted) {}
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
class BackwardWorker : Walk<C> {
  using Base = Walk<C>;
  using Base::call_, Base::rows_, Base::keys_, Base::seen_, Base::range_, Base::pairs_, Base::norms_;
  using Base::key_cache_, Base::value_cache_, Base::query_row, Base::spare_;
  template <Form F>
  using Line = typename Base::template Line<F>;

 public:
  void reset(const BackShared<C>& shared, int64_t slots) {
    Base::reset(shared, slots, as_rows | as_panels, as_panels);
    shared_ = &shared;
    const int64_t rows = shared.tiling.capacity();
    grad_out_.reset(rows * shared.value_width, true);
    grad_query_.reset(rows * shared.key_width, true);
    ds_.reset(rows * kTile, true);
    dcap_.reset(shared.call.has_softcap ? kStrip * kTile : 0);
    account_.keys.reset(shared.tree);
  }

  // Row tiles [first, last) of (b, g). slope_sums: (group, 2) doubles, past and future, added to.
  void run(int64_t b, int64_t g, int64_t first, int64_t last, const KeySums<C>& sums, double* slope_sums) {
    sums_ = sums, slope_sums_ = slope_sums;
    head_ = -1;
    for (int64_t tile = first; tile < last; ++tile) {
      begin(b, g, tile);
      // Farthest nodes first: they are the cheapest to skip. Z is known, so the order of visits is free.
      Base::start(false);
      Base::spend(account_, [&](const Node<C>& node) { visit(node); });
      finish();
    }
  }

 private:
  void begin(int64_t b, int64_t g, int64_t tile) {
    Base::begin_rows(b, g, tile);
    // Slopes of 0 get a gradient too: their rows take the paths that know distances.
    rows_.biased = rows_.biased || shared_->slopes_wanted;
    if (rows_.head[0] != head_) account_.keys.clear();
    head_ = rows_.head[0];
    started_ = 0;
    for (int r = 0; r < rows_.rows; ++r) read_row(r);
    account_.arm(*call_, rows_, shared_->bounds, norms_, lse_, shared_->slopes_wanted, shared_->shares);
  }

  void read_row(int r) {
    const BackwardCall& back = shared_->back;
    const int64_t b = rows_.b, h = rows_.head[r], i = rows_.query[r], V = call_->V;
    C* grad = grad_out_.data() + r * shared_->value_width;
    gives_bias_[r] = !(call_->query_unbiased && *call_->query_unbiased.at(b, i));
    norms_[r] = delta_[r] = 0;
    const C lse = *back.lse.template as<C>().at(b, h, i);
    if (lse == -kInf<C>) {
      // A fully masked row: zeros, so that no content of it reaches a product.
      lse_[r] = kInf<C>, lse_low_[r] = 0;
      std::memset(query_row(r), 0, static_cast<std::size_t>(call_->D) * sizeof(C));
      std::memset(grad, 0, static_cast<std::size_t>(V) * sizeof(C));
      return;
    }
    lse_[r] = lse, lse_low_[r] = *back.lse_low.template as<C>().at(b, h, i);
    const Codec<C>& codec = shared_->codec;
    Base::read_query(r, shared_->bounds.active());
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

  // --- one key tile ---

  void visit(const Node<C>& node) {
    const int64_t tile = node.index;
    Base::begin_keys(Base::span_of(0, tile), tile);
    uint32_t active = 0;
    for (int s = 0; s < rows_.strips; ++s)
      if (node.mask >> s & 1 && strip_terms(tile, s)) active |= uint32_t(1) << s;
    if (active == 0) return;
    if (sums_.key || sums_.value) add_to_keys(tile, active);
    if (shared_->back.grad_query)
      Base::add_products(ds_row(0), key_cache_, tile, active, shared_->key_width, grad_query_.data(), started_,
                         [](int) -> const C* { return nullptr; });
  }

  // P and dS of one strip, in p_ and ds_; false if it contributes nothing.
  bool strip_terms(int64_t tile, int s) {
    const Form form = Base::meet(s);
    if (form == Form::hidden) return false;
    Base::dot_products(tile, s, [](int, int) {});
    switch (form) {
      case Form::bare: return terms<Form::bare>(tile, s);
      case Form::biased: return terms<Form::biased>(tile, s);
      default: return terms<Form::examined>(tile, s);
    }
  }

  template <Form F>
  bool terms(int64_t tile, int s) {
    const Line<F> line(*this, s);
    const int begin = Base::columns(s).first, end = Base::columns(s).last, strip_rows = rows_.strip_rows(s);
    C peak[kStrip], most[kStrip];
    for (int r = 0; r < strip_rows; ++r) {
      exponents(line, s, r, begin, end, &peak[r]);
      most[r] = factor_of(s * kStrip + r);
    }
    if (account_.looking && account_.settle_computed(tile, s, strip_rows, peak, most, end - begin,
                                                     [&] { return Base::has_nan(s); }))
      return false;
    // Without a gradient of the output no value has a part in dS, NaN included.
    if (shared_->scores_wanted && shared_->back.grad_out)
      Base::product(grad_row(s * kStrip), shared_->value_width, value_cache_.panels(tile), call_->V, s,
                    ds_row(s * kStrip));
    else
      std::memset(ds_row(s * kStrip), 0, sizeof(C) * kTile * std::size_t(strip_rows));
    clear_outside(s, begin, end);
    for (int r = 0; r < strip_rows; ++r) row_terms(line, s, r, begin, end);
    return true;
  }

  // p_ row: from dot products to score - lse - lse_low, -inf where hidden.
  template <Form F>
  void exponents(const Line<F>& line, int s, int r, int begin, int end, C* peak) {
    const int row = s * kStrip + r;
    C* p = p_row(row);
    C* dcap = call_->has_softcap ? dcap_.data() + r * kTile : nullptr;
    const Vec<C> lse = splat<C>(lse_[row]), low = splat<C>(lse_low_[row]);
    const auto score = line.along(r);
    Vec<C> best = splat<C>(-kInf<C>);
    for (int j = begin; j < end; j += kLanes<C>) {
      const Vec<C> own = score(load<C>(p + j), j, dcap ? dcap + j : nullptr);
      Vec<C> x = own - lse - low;
      // A row whose lse is infinite or NaN must not show in keys that are hidden from it.
      if constexpr (F == Form::examined) x = own == -kInf<C> ? own : x;
      store<C>(p + j, x);
      best = max_keep<C>(x, best);
    }
    *peak = max_lanes<C>(best);
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

  // Keys that the strip did not look at have no part in the sums over the tile.
  void clear_outside(int s, int begin, int end) {
    for (int row = s * kStrip; row < s * kStrip + rows_.strip_rows(s); ++row)
      for (C* line : {p_row(row), ds_row(row)}) {
        for (int j = 0; j < begin; ++j) line[j] = 0;
        for (int j = end; j < kTile; ++j) line[j] = 0;
      }
  }

  // p_ row: exponents to P (with dropout, what it leaves). ds_ row: dP to dS, times the cap's derivative.
  template <Form F>
  void row_terms(const Line<F>& line, int s, int r, int begin, int end) {
    const int row = s * kStrip + r;
    C* p_line = p_row(row);
    C* ds_line = ds_row(row);
    const bool dropped = shared_->dropout.active(), capped = call_->has_softcap;
    const bool sloped = shared_->slopes_wanted && gives_bias_[row];
    alignas(64) C keep[kTile];
    if (dropped) shared_->dropout.template row<C>(rows_.b, rows_.head[row], rows_.query[row], keys_.first, keep);
    const Vec<C> delta = splat<C>(delta_[row]), lift = splat<C>(C(shared_->dropout.scale()));
    Vec<C> past = {}, future = {};
    for (int j = begin; j < end; j += kLanes<C>) {
      const Vec<C> x = load<C>(p_line + j);
      Vec<C> p = exp_lanes<C>(x), dp = load<C>(ds_line + j), kept = p;
      if (dropped) {
        // A dropped pair does not exist for the output, NaN included.
        const Mask<C> stays = load<C>(keep + j) != C(0);
        dp = bits_and<C>(dp * lift, stays), kept = bits_and<C>(p * lift, stays);
      }
      Vec<C> ds = p * (dp - delta);
      const Mask<C> visible = ~(x == -kInf<C>);
      if constexpr (F == Form::examined) ds = bits_and<C>(ds, visible);
      store<C>(p_line + j, kept);
      if (sloped) add_slope_terms(line, ds, visible, r, j, past, future);
      if (capped) ds *= load<C>(dcap_.data() + r * kTile + j);
      // Again: the cap's derivative at a hidden key may be NaN.
      if constexpr (F == Form::examined) ds = bits_and<C>(ds, visible);
      store<C>(ds_line + j, ds);
    }
    if (!sloped) return;
    double* sums = slope_sums_ + (rows_.head[row] - rows_.g * call_->group()) * 2;
    sums[0] -= double(sum_lanes<C>(past)), sums[1] -= double(sum_lanes<C>(future));
  }

  template <Form F>
  LINBIAS_INLINE void add_slope_terms(const Line<F>& line, Vec<C> ds, Mask<C> visible, int r, int j, Vec<C>& past,
                                      Vec<C>& future) const {
    const Vec<C> back = line.examine.back(r, line.strip * kStrip + r, j);
    Vec<C> term = ds * absolute<C>(back);
    // ds is 0 where hidden, but a hidden key may stand at NaN.
    if constexpr (F == Form::examined) term = bits_and<C>(term, visible & ~load_mask<C>(keys_.unbiased + j));
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
      const int64_t rows = lesser<int64_t>(kTile, call_->S - tile * kTile);  // those that no key is in too
      const std::size_t bytes = static_cast<std::size_t>(rows) * sizeof(C);
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
      if (value && shared_->back.grad_out)
        transposed(p_row(first_row), grad_row(first_row), shared_->value_width, count, reach, value);
      if (key) transposed(ds_row(first_row), query_row(first_row), shared_->key_width, count, reach, key);
    }
  }

  // sums (keys x width) += pairs^T (keys x rows) times right (rows x width), for keys in `reach`.
  void transposed(const C* pairs, const C* right, int64_t width, int count, Range reach, C* sums) {
    constexpr int W = kPanel<C>;
    const Right<C> b{right, width, W};
    for (int j = reach.first; j < reach.last;) {
      const int left = reach.last - j, n = left >= kStrip ? kStrip : left >= 3 ? 3 : left;
      gemm<C, Into::add, false>({pairs + j, 1, kTile}, b, {sums + j * width, width, W},
                                count, n, int(width / W));
      j += n;
    }
  }

  void finish() {
    if (!shared_->back.grad_query) return;
    for (int row = 0; row < rows_.rows; ++row)
      Base::write_row(shared_->back.grad_query, row, grad_query_.data() + row * shared_->key_width, call_->D,
                      C(call_->scale), !(started_ >> (row / kStrip) & 1));
  }

  C* p_row(int row) { return Base::score_row(row); }
  C* ds_row(int row) { return ds_.data() + row * kTile; }
  C* grad_row(int row) { return grad_out_.data() + row * shared_->value_width; }

  const BackShared<C>* shared_ = nullptr;
  KeySums<C> sums_;
  double* slope_sums_ = nullptr;
  int64_t head_ = -1;  // whose rows the keys' account is about
  Account<C> account_;
  Buffer<C> grad_out_, grad_query_, ds_, dcap_;
  C lse_[kRows], lse_low_[kRows], delta_[kRows];
  bool gives_bias_[kRows];
  uint32_t started_ = 0;  // strips whose rows of grad_query_ hold something
};

}  // namespace linbias::LINBIAS_VARIANT
