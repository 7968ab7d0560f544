// SPDX-License-Identifier: Apache-2.0
// The proof that a key tile cannot matter, and the account of what was skipped on its strength.
//
// For row i and a node of n keys at nearest distance d on a side with slope m >= 0 the weight of the node is at most
//     exp(min(|scale| |q_i| rho, softcap) - m d) * gamma,    rho the largest key norm of the node,
//     gamma = (1 - e^(-m n)) / (1 - e^(-m)) where the node's distances are distinct integers, else n.
// A strip skips a node only if, for each of its rows, what it has skipped so far plus this bound stays within
// tolerance times the sum over the keys it has visited. That sum only grows, so the promise holds in any order.
#pragma once

#include "rows.h"

namespace linbias::LINBIAS_VARIANT {

// log gamma for every head, level and side, and the norms of every node: shared by all tiles of a call.
template <class C>
class Bounds {
 public:
  bool active() const { return active_; }
  bool norms() const { return norms_.size() > 0; }
  C rho(int64_t b, int64_t g, int64_t node) const { return norms_[(b * G_ + g) * nodes_ + node]; }
  // Of head h of item b; side 0: past, 1: future. Level -1 is a panel of a tile.
  C log_gamma(int64_t b, int64_t h, int level, int side) const {
    return gamma_[(((items_ == 1 ? 0 : b) * H_ + h) * (levels_ + 1) + level + 1) * 2 + side];
  }
  // log of the keys of a node of this level.
  C log_count(int level) const { return log_count_[level + 1]; }
  // Turns |q| rho into a bound of |score|, its own rounding included.
  C norm_scale() const { return norm_scale_; }
  int levels() const { return levels_; }
  C softcap() const { return softcap_; }
  C tolerance() const { return tolerance_; }
  C log_tolerance() const { return log_tolerance_; }

  // Keys of a whole node of this level.
  static double keys_of(int level) {
    double n = level < 0 ? kPanel<C> : kTile;
    for (; level > 0; --level) n *= kFan;
    return n;
  }

  // Everything but the norms and gamma.
  void begin(const Call& call, const KeyTree<C>& tree) {
    // Within two tiles there is nothing to skip that would repay the account.
    active_ = call.tolerance > 0 && tree.count(0) > 2;
    G_ = call.G, H_ = call.H, nodes_ = tree.nodes(), levels_ = tree.levels();
    constexpr double eps = sizeof(C) == 4 ? 1.2e-7 : 2.3e-16;
    norm_scale_ = C(std::fabs(call.scale) * (1 + (2 * double(call.D) + 16) * eps));
    softcap_ = call.has_softcap ? C(std::fabs(call.softcap) * (1 + 16 * eps)) : kInf<C>;
    // A little less than asked: the weights that bounds are compared with carry rounding of their own.
    tolerance_ = C(call.tolerance * (1 - 1e-5));
    log_tolerance_ = C(std::log(call.tolerance));
  }

  // Norms of the tiles of one (b, g), then of the nodes above.
  void fill_tiles(const Call& call, const Codec<C>& codec, int64_t b, int64_t g, int64_t first, int64_t last) {
    const Source keys = codec.source(call, call.key, b, g);
    C* norms = norms_.data() + (b * G_ + g) * nodes_;
    for (int64_t t = first; t < last; ++t) {
      const int64_t end = lesser<int64_t>(call.keys(b), (t + 1) * kTile);
      norms[t] = 0;
      for (int64_t i = t * kTile, run; i < end; i += run) {
        const Rows part = keys.from(i, &run);
        run = lesser(run, end - i);
        const uint8_t* mask = call.key_mask ? call.key_mask.at(b, i) : nullptr;
        const C rho = codec.largest_norm(part, 0, run, call.D, mask, call.key_mask.stride[1]);
        norms[t] = larger_or_nan(norms[t], rho);
      }
    }
  }

  // Norms of the tiles from those that the caller keeps per block of `bounds_block` keys, or page.
  void take_tiles(const Call& call, int64_t b, int64_t g) {
    const Array<C> given = call.bound_norms.as<C>();
    C* norms = norms_.data() + (b * G_ + g) * nodes_;
    const int64_t keys = call.keys(b), block = call.bounds_block;
    for (int64_t t = 0; t * kTile < call.S; ++t) {
      const int64_t first = t * kTile / block, last = ceil_div(lesser<int64_t>(keys, (t + 1) * kTile), block);
      C rho = 0, wrong = 0;  // of small pages there are many, and no branch may hang on them
      for (int64_t k = first; k < last; ++k) {
        const C norm = call.page ? *given.at(call.page_of(b, k), g) : *given.at(b, g, k);
        rho = norm > rho ? norm : rho;
        wrong += norm - norm;  // 0; NaN of what is not finite, which is never skipped
      }
      norms[t] = rho + wrong;
    }
  }

  void join_levels(const KeyTree<C>& tree, int64_t b, int64_t g) {
    C* norms = norms_.data() + (b * G_ + g) * nodes_;
    for (int level = 1; level < levels_; ++level)
      for (int64_t i = 0; i < tree.count(level); ++i) {
        const int64_t first = i * kFan, last = lesser(first + kFan, tree.count(level - 1));
        C rho = norms[tree.node(level - 1, first)];
        for (int64_t k = first + 1; k < last; ++k) rho = larger_or_nan(rho, norms[tree.node(level - 1, k)]);
        norms[tree.node(level, i)] = rho;
      }
  }

  // What only calls that know norms read.
  void allocate(const Call& call) {
    norms_.reset(call.B * call.G * nodes_);
    if (active_) fill_gamma(call);
  }

 private:
  void fill_gamma(const Call& call) {
    const Array<C> slopes = call.slopes.as<C>(), later = call.future_slopes.as<C>();
    items_ = slopes.stride[0] == 0 && (!later || later.stride[0] == 0) ? 1 : call.B;
    gamma_.reset(items_ * H_ * (levels_ + 1) * 2);
    for (int level = -1; level < levels_; ++level) log_count_[level + 1] = C(std::log(keys_of(level)) + 4e-6);
    for (int64_t b = 0; b < items_; ++b)
      for (int64_t h = 0; h < H_; ++h)
        for (int side = 0; side < 2; ++side) {
          const double m = side && later ? double(*later.at(b, h)) : double(*slopes.at(b, h));
          for (int level = -1; level < levels_; ++level) {
            const double n = keys_of(level);
            const double gamma = m > 0 ? std::expm1(-m * n) / std::expm1(-m) : n;
            // 4e-6 covers the rounding of exp and of the few sums in `judge`.
            gamma_[((b * H_ + h) * (levels_ + 1) + level + 1) * 2 + side] = C(std::log(gamma) + 4e-6);
          }
        }
  }

  bool active_ = false;
  int64_t G_ = 0, H_ = 0, nodes_ = 0, items_ = 1;
  int levels_ = 0;
  C norm_scale_ = 0, softcap_ = 0, tolerance_ = 0, log_tolerance_ = 0;
  C log_count_[kMaxLevels + 1] = {};
  Buffer<C> norms_, gamma_;
};

// What judging reads of the rows of a tile, in forward and backward. Row r of strip s lies at [r * kStrips + s]: a
// vector holds one row of several strips, and all strips of a tile are judged together.
template <class C>
struct JudgedRows {
  static constexpr int N = kStrip * kStrips;
  static constexpr int at(int row) { return row % kStrip * kStrips + row / kStrip; }

  alignas(64) C norm[N];  // bounds of |scale| |q_i|; infinite where nothing may be skipped
  alignas(64) C position[N], past[N], future[N];
  C cap = 0;             // bound of a capped score
  bool looking = false;  // computed scores may prove a tile negligible
  bool judging = false;  // and so may norms

  // `norms[row]` bounds |q|.
  void arm_rows(const Call& call, const RowTile<C>& rows, const Bounds<C>& bounds, const C* norms) {
    const bool reaches_future = !call.causal || call.prefix > 0;
    bool some = false;
    for (int row = 0; row < rows.rows; ++row)
      some = some || rows.past[row] > 0 || (reaches_future && rows.future[row] > 0);
    looking = bounds.active() && some, judging = looking && bounds.norms();
    if (!bounds.norms()) return;
    constexpr C shrink = 1 - C(1e-6);  // the product slope * distance is rounded; the bound must not gain by it
    cap = bounds.softcap();
    for (int i = 0; i < N; ++i) norm[i] = position[i] = past[i] = future[i] = 0;
    for (int row = 0; row < rows.rows; ++row) {
      const int i = at(row);
      // A negative slope rewards distance; a slope of NaN says nothing.
      const bool bounded = rows.past[row] >= 0 && (!reaches_future || rows.future[row] >= 0);
      norm[i] = bounded ? norms[row] * bounds.norm_scale() : kInf<C>;
      position[i] = rows.relative[row];
      past[i] = rows.past[row] * shrink, future[i] = rows.future[row] * shrink;
    }
  }

  // A node of keys as the rows see it.
  struct Place {
    bool distinct;  // distances to one side are distinct integers, and every key gives bias
    C low, high;    // positions relative to the rows' origin
    C distance;     // the nearest, where positions do not tell it
  };
  static Place place(const RowTile<C>& rows, const KeySpan& keys, C distance) {
    return {keys.rising && !keys.unbiased && rows.compact, C(minus(keys.low, rows.origin)),
            C(minus(keys.high, rows.origin)), distance};
  }

  // What rows i, i + 1, ... of the vector can have in common with a node whose largest key norm is rho.
  struct Reach {
    Vec<C> score;          // the most that a key can score, bias included
    Vec<C> slope;          // the least on the node's side
    Mask<C> past, future;  // distances are distinct and the node lies wholly before, or after
  };
  LINBIAS_INLINE Reach reach(int i, const Place& keys, C rho) const {
    const Vec<C> mp = load<C>(past + i), mf = load<C>(future + i);
    Reach to{{}, mp < mf ? mp : mf, {}, {}};
    Vec<C> away = splat<C>(keys.distance);
    if (keys.distinct) {
      const Vec<C> p = load<C>(position + i), back = p - keys.high, ahead = keys.low - p;
      to.past = back >= 0, to.future = ahead >= 0;
      away = to.past ? back : to.future ? ahead : Vec<C>{};
      to.slope = to.past ? mp : mf;
    }
    to.score = limit(i, rho) - to.slope * away;
    return to;
  }

  // The most that rows i, i + 1, ... can score against a key of norm rho before the bias.
  LINBIAS_INLINE Vec<C> limit(int i, C rho) const {
    const Vec<C> content = load<C>(norm + i) * rho;
    if (cap == kInf<C>) return content;
    // A soft cap bounds what is finite, but a product that holds infinity may be NaN.
    return content < kInf<C> ? min_keep<C>(splat<C>(cap), content) : content;
  }

  // The strips for all of whose rows `fits(i)` holds, where vector i has one row of several strips.
  template <class Fits>
  LINBIAS_INLINE static uint32_t strips_where(const Fits& fits) {
    alignas(64) typename Simd<C>::Int all[kStrips];
#pragma GCC unroll 2
    for (int v = 0; v < kStrips; v += kLanes<C>) {
      Mask<C> ok = ~Mask<C>{};
#pragma GCC unroll 6
      for (int r = 0; r < kStrip; ++r) ok &= fits(r * kStrips + v);
      std::memcpy(all + v, &ok, sizeof ok);
    }
    uint32_t strips = 0;
    for (int s = 0; s < kStrips; ++s) strips |= uint32_t(all[s] & 1) << s;
    return strips;
  }
};

// The running softmax of a row tile and what its account has spent, laid out as JudgedRows.
template <class C>
struct RunningSums {
  static constexpr int N = kStrip * kStrips;
  alignas(64) C row_max[N];  // largest score visited; -inf before the first
  alignas(64) C row_sum[N];  // sum of exp(score - row_max) over what was visited
  alignas(64) C spent[N];    // sum of bounds of what was skipped, as exp(. - row_max)
};

template <class C>
struct Ledger : JudgedRows<C>, RunningSums<C> {
  using Base = JudgedRows<C>;
  using RunningSums<C>::row_max, RunningSums<C>::row_sum, RunningSums<C>::spent;
  using Base::at, Base::N, Base::looking, Base::judging;

  alignas(64) C gamma[kMaxLevels + 1][2][N];  // by level + 1

  void clear(const RowTile<C>& rows) {
    for (int i = 0; i < N; ++i) row_max[i] = -kInf<C>, row_sum[i] = 0, spent[i] = 0;
    // Rows that pad the last strip agree to any skip: their weight dwarfs every bound.
    constexpr C huge = C(sizeof(C) == 4 ? 1e30 : 1e300);
    for (int row = rows.rows; row < kRows; ++row) row_max[at(row)] = huge, row_sum[at(row)] = huge;
    looking = judging = false;
  }

  // Prepares judging; `norms[row]` bounds |q|.
  void arm(const Call& call, const RowTile<C>& rows, const Bounds<C>& all, const C* norms) {
    bounds = &all;
    this->arm_rows(call, rows, all, norms);
    if (!judging) return;
    for (int level = -1; level < all.levels(); ++level)
      for (int side = 0; side < 2; ++side) fill_gamma(rows, level, side);
  }

  // Of the strips in the node's mask, those that may skip its keys, none of whose norms exceeds rho; it is charged to
  // them.
  uint32_t judge(const RowTile<C>& rows, const KeySpan& keys, const Node<C>& node, C rho) {
    const typename Base::Place place = Base::place(rows, keys, node.distance);
    const C count = bounds->log_count(node.level), tolerance = bounds->tolerance();
    const auto& log_gamma = gamma[node.level + 1];
    alignas(64) C total[N];
    const uint32_t skip = node.mask & Base::strips_where([&](int i) __attribute__((always_inline)) -> Mask<C> {
      const typename Base::Reach to = this->reach(i, place, rho);
      Vec<C> log_n = to.past ? load<C>(log_gamma[0] + i) : load<C>(log_gamma[1] + i);
      log_n = (to.past | to.future) ? log_n : splat<C>(count);
      // A bound of NaN means a visit.
      const Vec<C> sum = load<C>(spent + i) + exp_held<C>(to.score + log_n - load<C>(row_max + i));
      store<C>(total + i, sum);
      return sum <= load<C>(row_sum + i) * tolerance;
    });
    for (int s = 0; s < kStrips; ++s)
      if (skip >> s & 1)
        for (int r = 0; r < kStrip; ++r) spent[r * kStrips + s] = total[r * kStrips + s];
    return skip;
  }

  // Strips whose scores against keys of norm `rho` exceed no row's maximum by more than exp can take in its stride:
  // they need not be rescaled. Rows without a maximum yet are not among them.
  uint32_t no_rescale(C rho) const {
    // Less than e^20 would make strips of ordinary keys look for a new maximum. Sums of values from 1e26 on may
    // overflow and are then done again, see ForwardWorker::redo.
    constexpr C most = 20;
    return Base::strips_where([&](int i) __attribute__((always_inline)) -> Mask<C> {
      return this->limit(i, rho) - load<C>(row_max + i) <= most;
    });
  }

  // Whether the second look at a strip may succeed at all: with scores around 0 before the bias, the bias alone must
  // nearly do. A guess that only saves work.
  bool worth_looking(const RowTile<C>& rows, int s, const KeySpan& keys) const {
    if (!looking) return false;
    const RowSpan& strip = rows.strip[s];
    const int64_t back = minus(strip.low, keys.high), ahead = minus(keys.low, strip.high);
        const C distance = C(greater<int64_t>(0, greater(back, ahead)));
    for (int r = 0; r < rows.strip_rows(s); ++r) {
      const int i = r * kStrips + s;
      const C slope = back >= ahead ? rows.past[s * kStrip + r] : rows.future[s * kStrip + r];
      // 4: log kTile, less the few units by which scores may all be lower than 0.
      if (!rows.spatial && !(row_max[i] + slope * distance > -bounds->log_tolerance() - C(4))) return false;
    }
    return true;
  }

  // The second look: `peak[r]` is the largest score of row r of strip s among `count` keys, all computed. Charges and
  // returns true if the strip may leave these keys out; a largest score does not see NaN, which `has_nan` looks for.
  template <class HasNan>
  bool settle_computed(int s, int strip_rows, const C* peak, int count, const HasNan& has_nan) {
    const C log_n = C(std::log(double(count)) + 4e-6);
    C total[kStrip];
    for (int r = 0; r < strip_rows; ++r) {
      const int i = r * kStrips + s;
      const C x = peak[r] + log_n - row_max[i];
      if (!(x < C(0))) return false;  // spares the exponential
      total[r] = spent[i] + exp_single(x);
      if (!(total[r] <= row_sum[i] * bounds->tolerance())) return false;
    }
    if (has_nan()) return false;
    for (int r = 0; r < strip_rows; ++r) spent[r * kStrips + s] = total[r];
    return true;
  }

 private:
  static C exp_single(C x) {
    C lane[kLanes<C>];
    store<C>(lane, exp_held<C>(splat<C>(x)));
    return lane[0];
  }

  void fill_gamma(const RowTile<C>& rows, int level, int side) {
    for (int row = 0; row < kRows; ++row) {
      // An unbiased row has slope 0 here, whatever its head's.
      const bool real = row < rows.rows && (side ? rows.future[row] : rows.past[row]) != 0;
      gamma[level + 1][side][at(row)] =
          real ? bounds->log_gamma(rows.b, rows.head[row], level, side) : bounds->log_count(level);
    }
  }

  const Bounds<C>* bounds = nullptr;
};

}  // namespace linbias::LINBIAS_VARIANT
