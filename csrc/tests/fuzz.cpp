// SPDX-License-Identifier: Apache-2.0
// Random problems, shapes and strides, in every element type: forward against plain loops in double, backward against
// identities that its gradients must obey.
//
// Arrays are exactly as long as their last element needs, so that the address sanitizer sees any step beyond.
#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "pack.h"
#include "passes.h"
#include "philox.h"

using namespace linbias;
using namespace linbias::LINBIAS_VARIANT;

namespace {

// A tensor with random strides: gaps, swapped dimensions, broadcast.
template <class X>
struct Tensor {
  std::vector<X> data;
  Array<void> view;

  template <class F>
  void make(Random& random, std::vector<int64_t> shape, bool unit_last, F value, bool broadcast_first = false) {
    std::vector<int> order;
    for (int d = 0; d < int(shape.size()); ++d) order.push_back(d);
    const int fixed = unit_last ? 1 : 0;
    for (int d = int(shape.size()) - 1 - fixed; d > 0; --d) std::swap(order[size_t(d)], order[size_t(random.between(0, d))]);
    int64_t stride = 1, last = 0;
    for (int n = int(shape.size()) - 1; n >= 0; --n) {
      const int d = order[size_t(n)];
      if (d == 0 && broadcast_first) continue;
      if (!(fixed && n == int(shape.size()) - 1)) stride += random.between(0, 2);
      view.stride[d] = stride;
      last += stride * std::max<int64_t>(0, shape[size_t(d)] - 1);
      stride *= std::max<int64_t>(1, shape[size_t(d)]);
    }
    data.resize(size_t(last + 1));
    for (auto& x : data) x = value();
    view.data = data.data();
  }
  template <class Y>
  Array<Y> as() const { return view.as<Y>(); }
};

template <class X, class C>
struct Problem {
  Call call;
  Tensor<X> query, key, value, key_pool, value_pool;
  Tensor<C> slopes, future, query_place, key_place, norms;
  Tensor<int64_t> query_positions, key_positions, query_segments, key_segments, ranks, lengths, table;
  Tensor<uint8_t> key_mask, attn_mask, query_unbiased, key_unbiased;
  int64_t seed = 99;

  explicit Problem(Random& random) {
    call.B = random.between(1, 2), call.G = random.between(1, 3), call.H = call.G * random.between(1, 3);
    call.T = random.chance(.3) ? random.between(1, 4) : random.between(1, 230);
    call.S = random.chance(.1) ? random.between(4100, 4500) : random.between(1, 400);
    call.D = random.between(1, 70), call.V = random.between(1, 70);
    call.scale = 1 / std::sqrt(double(call.D));
    call.threads = int(random.between(1, 4));
    call.tolerance = random.chance(.2) ? 0 : random.chance(.5) ? 1e-3 : 1e-9;
    const bool plain_last = random.chance(.8);
    auto normal = [&] { X x; narrow(C(random.normal()), &x); return x; };
    query.make(random, {call.B, call.H, call.T, call.D}, plain_last, normal);
    key.make(random, {call.B, call.G, call.S, call.D}, plain_last, normal);
    value.make(random, {call.B, call.G, call.S, call.V}, plain_last, normal);
    call.query = query.view, call.key = key.view, call.value = value.view;
    auto slope = [&] {
      const double kinds[] = {0, .5, .02, 2, -.01, INFINITY};
      return C(kinds[random.between(0, 5)]);
    };
    slopes.make(random, {call.B, call.H}, false, slope, random.chance(.5));
    call.slopes = slopes.view;
    options(random, slope);
    if (random.chance(.3)) lengths.make(random, {call.B}, false, [&] { return random.between(-3, call.S + 3); }), rebind(call.key_lengths, lengths);
    if (random.chance(.3)) put_in_pages(random, plain_last);
  }

  // The same keys and values, in pages of any order; what no key lies in is NaN, and its entries lead anywhere.
  void put_in_pages(Random& random, bool plain_last) {
    call.page = random.chance(.3) ? 64 * random.between(1, 2) : random.between(1, 90);
    const int64_t stretches = (call.S + call.page - 1) / call.page;
    call.pages = call.B * stretches + random.between(0, 3);
    auto nothing = [] { X x; narrow(C(NAN), &x); return x; };
    key_pool.make(random, {call.pages, call.G, call.page, call.D}, plain_last, nothing);
    value_pool.make(random, {call.pages, call.G, call.page, call.V}, plain_last, nothing);
    std::vector<int64_t> free;
    for (int64_t n = 0; n < call.pages; ++n) free.push_back(n), std::swap(free[size_t(n)], free[size_t(random.between(0, n))]);
    int64_t entry = 0;
    table.make(random, {call.B, stretches}, false, [&] { return int64_t(0); });
    call.block_table = table.template as<int64_t>();
    for (int64_t b = 0; b < call.B; ++b)
      for (int64_t n = 0; n < stretches; ++n, ++entry) {
        int64_t& page = const_cast<int64_t&>(*call.block_table.at(b, n));
        page = n * call.page < call.keys(b) ? free[size_t(entry)] : random.chance(.5) ? -1 : int64_t(1) << 40;
        for (int64_t j = n * call.page; j < std::min(call.keys(b), (n + 1) * call.page); ++j)
          for (int64_t g = 0; g < call.G; ++g) {
            for (int64_t d = 0; d < call.D; ++d) copy(key, key_pool, b, g, j, page, d);
            for (int64_t d = 0; d < call.V; ++d) copy(value, value_pool, b, g, j, page, d);
          }
      }
    call.key = key_pool.view, call.value = value_pool.view;
  }
  void copy(const Tensor<X>& from, Tensor<X>& to, int64_t b, int64_t g, int64_t j, int64_t page, int64_t d) {
    const_cast<X&>(*to.template as<X>().at(page, g, j % call.page, d)) = *from.template as<X>().at(b, g, j, d);
  }

  template <class F>
  void options(Random& random, F slope) {
    const bool spatial = random.chance(.15), shared = random.chance(.5);
    if (spatial) {
      call.metric = random.chance(.5) ? Metric::euclidean : Metric::manhattan;
      call.C = random.between(1, 3);
      auto place = [&] { return C(random.between(0, 20)); };
      query_place.make(random, {call.B, call.T, call.C}, false, place, shared);
      key_place.make(random, {call.B, call.S, call.C}, false, place, shared);
      call.query_positions = query_place.view, call.key_positions = key_place.view;
    } else {
      one_dimensional(random, slope, shared);
    }
    auto bit = [&] { return uint8_t(random.chance(.8)); };
    if (random.chance(.25)) key_mask.make(random, {call.B, call.S}, false, bit, shared), rebind(call.key_mask, key_mask);
    if (random.chance(.25)) attn_mask.make(random, {call.B, call.H, call.T, call.S}, false, bit, shared), rebind(call.attn_mask, attn_mask);
    if (random.chance(.25)) {
      auto segment = [&] { return random.between(0, 1); };
      query_segments.make(random, {call.B, call.T}, false, segment), rebind(call.query_segments, query_segments);
      key_segments.make(random, {call.B, call.S}, false, segment), rebind(call.key_segments, key_segments);
    }
    if (random.chance(.2)) {
      auto rare = [&] { return uint8_t(random.chance(.1)); };
      query_unbiased.make(random, {call.B, call.T}, false, rare), rebind(call.query_unbiased, query_unbiased);
      key_unbiased.make(random, {call.B, call.S}, false, rare), rebind(call.key_unbiased, key_unbiased);
    }
    if (random.chance(.25)) call.has_softcap = true, call.softcap = 3;
    if (random.chance(.25)) call.dropout_p = .3, call.seed = &seed;
  }

  template <class F>
  void one_dimensional(Random& random, F slope, bool shared) {
    call.causal = random.chance(.5);
    if (random.chance(.3)) future.make(random, {call.B, call.H}, false, slope, shared), call.future_slopes = future.view;
    if (random.chance(.3)) call.left = random.between(0, call.S);
    if (random.chance(.2)) call.right = random.between(0, 20);
    if (random.chance(.3)) {
      call.sinks = random.between(0, 70), call.prefix = random.between(0, 70);
      ranks.make(random, {call.B, call.S}, false, [&] { return random.between(0, call.S); });
      rebind(call.key_ranks, ranks);
    }
    if (random.chance(.4)) {
      const int64_t start = random.chance(.2) ? int64_t(1) << random.between(20, 61) : 0;
      const int64_t spread = random.chance(.2) ? int64_t(1) << random.between(3, 30) : 300;
      auto position = [&] { return start + random.between(0, spread); };
      query_positions.make(random, {call.B, call.T}, false, position, shared);
      key_positions.make(random, {call.B, call.S}, false, position, shared);
      call.query_positions = query_positions.view, call.key_positions = key_positions.view;
    }
  }

  template <class Y>
  static void rebind(Array<Y>& array, const Tensor<Y>& tensor) { array = tensor.template as<Y>(); }

  double distance(int64_t b, int64_t i, int64_t j, bool* later) const {
    *later = false;
    if (call.metric != Metric::none) {
      double sum = 0;
      for (int64_t c = 0; c < call.C; ++c) {
        const double gap = double(*call.query_positions.as<C>().at(b, i, c)) - double(*call.key_positions.as<C>().at(b, j, c));
        sum += call.metric == Metric::euclidean ? gap * gap : std::fabs(gap);
      }
      return call.metric == Metric::euclidean ? std::sqrt(sum) : sum;
    }
    const int64_t back = this->back(b, i, j);
    *later = back < 0;
    return std::fabs(double(back));
  }

  int64_t back(int64_t b, int64_t i, int64_t j) const {
    if (!call.query_positions) return call.keys(b) - call.T + i - j;
    return *call.query_positions.as<int64_t>().at(b, i) - *call.key_positions.as<int64_t>().at(b, j);
  }

  bool visible(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (j >= call.keys(b) || (call.key_mask && !*call.key_mask.at(b, j))) return false;
    if (call.attn_mask && !*call.attn_mask.at(b, h, i, j)) return false;
    if (call.query_segments && *call.query_segments.at(b, i) != *call.key_segments.at(b, j)) return false;
    if (call.metric != Metric::none) return true;
    const int64_t r = call.key_ranks ? *call.key_ranks.at(b, j) : INT64_MAX, d = back(b, i, j);
    if (call.causal && d < 0 && r >= call.prefix) return false;
    return (d <= call.left && d >= -call.right) || r < call.sinks;
  }

  double score(int64_t b, int64_t h, int64_t i, int64_t j) const {
    double dot = 0;
    for (int64_t d = 0; d < call.D; ++d)
      dot += double(widen(*query.template as<X>().at(b, h, i, d))) * double(widen(*key.template as<X>().at(b, h / call.group(), j, d)));
    dot *= call.scale;
    if (call.has_softcap) dot = call.softcap * std::tanh(dot / call.softcap);
    bool later;
    const double away = distance(b, i, j, &later);
    if (away == 0 || (call.query_unbiased && *call.query_unbiased.at(b, i)) || (call.key_unbiased && *call.key_unbiased.at(b, j)))
      return dot;
    return dot - away * double(*(later && call.future_slopes ? call.future_slopes : call.slopes).template as<C>().at(b, h));
  }
};

template <class X>
Array<void> contiguous(const X* data, const std::vector<int64_t>& shape) {
  Array<void> array;
  array.data = data;
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) array.stride[d] = stride;
  return array;
}

// Sum of products of the elements of two (B, heads, tokens, width) arrays, and of their magnitudes.
template <class X>
struct Inner {
  double sum = 0, size = 0;

  Inner(const Array<void>& a, const Array<void>& b, std::vector<int64_t> n) {
    const Array<X> x = a.as<X>(), y = b.as<X>();
    for (int64_t i = 0; i < n[0]; ++i)
      for (int64_t j = 0; j < n[1]; ++j)
        for (int64_t k = 0; k < n[2]; ++k)
          for (int64_t l = 0; l < n[3]; ++l) {
            const double term = double(widen(*x.at(i, j, k, l))) * double(widen(*y.at(i, j, k, l)));
            sum += term, size += std::fabs(term);
          }
  }
};

// out is linear in v, so <dv, v> = <grad_out, out>; a score is bilinear, so <dq, q> = <dk, k>.
template <class X, class C>
void differentiate(Random& random, int number, const Problem<X, C>& p, const std::vector<X>& out, const std::vector<C>& lse, const std::vector<C>& lse_low) {
  const Call& call = p.call;
  const std::vector<int64_t> rows{call.B, call.H, call.T, call.V}, queries{call.B, call.H, call.T, call.D};
  const std::vector<int64_t> keys{call.B, call.G, call.S, call.D}, values{call.B, call.G, call.S, call.V};
  Tensor<X> grad_out;
  Tensor<C> grad_lse;
  grad_out.make(random, rows, random.chance(.8), [&] { X x; narrow(C(random.normal()), &x); return x; });
  grad_lse.make(random, {call.B, call.H, call.T}, false, [&] { return C(random.normal()); });
  std::vector<X> dq(size_t(call.B * call.H * call.T * call.D)), dk(size_t(call.B * call.G * call.S * call.D));
  std::vector<X> dv(size_t(call.B * call.G * call.S * call.V));
  std::vector<C> slopes(size_t(call.B * call.H)), future(slopes.size());
  BackwardCall back;
  back.out = contiguous(out.data(), rows), back.lse = contiguous(lse.data(), {call.B, call.H, call.T});
  back.lse_low = contiguous(lse_low.data(), {call.B, call.H, call.T});
  back.grad_out = grad_out.view;
  if (random.chance(.5)) back.grad_lse = grad_lse.view;
  back.grad_query = dq.data(), back.grad_key = dk.data(), back.grad_value = dv.data();
  if (random.chance(.5)) back.grad_slopes = slopes.data(), back.grad_future_slopes = future.data();
  backward_pass(call, codec_of<X>(), back);
  const double unit = std::is_same<X, Half>::value ? 1e-3 : sizeof(X) == 2 ? 8e-3 : sizeof(X) == 4 ? 1e-5 : 1e-14;
  const Inner<X> by_value(contiguous(dv.data(), values), p.value.view, values), by_out(grad_out.view, back.out, rows);
  // What forward skips of a row weighs at most `tolerance`, and so does what backward skips; |v| stays below 6.
  double skipped = 0;
  for (const X& g : grad_out.data) skipped += 4 * call.tolerance * std::fabs(double(widen(g))) * 6 / (1 - call.dropout_p);
  CHECK(std::fabs(by_value.sum - by_out.sum) <= 4 * unit * (by_value.size + by_out.size) + skipped + unit,
        "problem %d: <dv, v> = %g, <grad_out, out> = %g", number, by_value.sum, by_out.sum);
  const Inner<X> by_query(contiguous(dq.data(), queries), call.query, queries), by_key(contiguous(dk.data(), keys), p.key.view, keys);
  CHECK(std::fabs(by_query.sum - by_key.sum) <= 4 * unit * (by_query.size + by_key.size) + unit,
        "problem %d: <dq, q> = %g, <dk, k> = %g", number, by_query.sum, by_key.sum);
}

template <class X>
void compare(Random& random, int number) {
  using C = typename Accumulator<X>::type;
  const Problem<X, C> p(random);
  const Call& call = p.call;
  const size_t rows = size_t(call.B * call.H * call.T);
  std::vector<X> out(rows * size_t(call.V));
  std::vector<C> lse(rows), lse_low(rows), skipped(rows);
  std::vector<int64_t> computed(size_t(call.B * call.H), 0);
  forward_pass(call, codec_of<X>(), {out.data(), lse.data(), lse_low.data(), skipped.data(), computed.data()});
  differentiate(random, number, p, out, lse, lse_low);
  const Dropout dropout(call);
  const double eps = sizeof(C) == 4 ? 1.2e-7 : 2.3e-16, unit = sizeof(X) == 2 ? (std::is_same<X, Half>::value ? 1e-3 : 8e-3) : eps;
  std::vector<double> score(size_t(call.S));
  for (int64_t b = 0; b < call.B; ++b)
    for (int64_t h = 0; h < call.H; ++h)
      for (int64_t i = 0; i < call.T; i += random.between(1, 9)) {
        double top = -INFINITY, weight = 0, most = 0, steepest = 0;
        for (int64_t j = 0; j < call.S; ++j) {
          score[size_t(j)] = p.visible(b, h, i, j) ? p.score(b, h, i, j) : -INFINITY;
          top = std::max(top, score[size_t(j)]);
        }
        for (double s : score) weight += s == -INFINITY ? 0 : std::exp(s - top);
        const size_t row = size_t((b * call.H + h) * call.T + i);
        if (top == -INFINITY) {
          CHECK(lse[row] == -kInf<C>, "problem %d: a row that sees nothing has lse %g", number, double(lse[row]));
          for (int64_t d = 0; d < call.V; ++d) CHECK(widen(out[row * size_t(call.V) + size_t(d)]) == 0, "problem %d: and an output", number);
          continue;
        }
        // Rounding: each score by its dot product and bias, then the sums over S keys.
        steepest = std::max(std::fabs(top), 1.0);
        const double rounding = eps * (4 * double(call.D) + double(call.S) + 16) * steepest;
        const double skip = 2 * call.tolerance / (1 - call.dropout_p);
        CHECK(std::fabs(lse[row] - (top + std::log(weight))) <= rounding + 2 * call.tolerance,
              "problem %d: lse %g, not %g", number, double(lse[row]), top + std::log(weight));
        CHECK(skipped[row] >= 0 && skipped[row] <= call.tolerance, "problem %d: skipped %g", number, double(skipped[row]));
        std::vector<double> exact(size_t(call.V), 0);
        alignas(64) C keep[kTile];
        for (int64_t j = 0; j < call.S; ++j) {
          if (dropout.active() && j % kTile == 0) dropout.row<C>(b, h, i, j, keep);
          if (score[size_t(j)] == -INFINITY) continue;
          for (int64_t d = 0; d < call.V; ++d) {
            const double v = double(widen(*p.value.template as<X>().at(b, h / call.group(), j, d)));
            most = std::max(most, std::fabs(v));
            if (!dropout.active() || keep[j % kTile] != 0) exact[size_t(d)] += std::exp(score[size_t(j)] - top) / weight * v * dropout.scale();
          }
        }
        for (int64_t d = 0; d < call.V; ++d) {
          const double found = double(widen(out[row * size_t(call.V) + size_t(d)]));
          CHECK(std::fabs(found - exact[size_t(d)]) <= (rounding * dropout.scale() + unit + skip) * most,
                "problem %d: B%d H%d G%d T%d S%d D%d V%d threads %d: out[%d,%d,%d,%d] = %g, not %g", number, int(call.B), int(call.H), int(call.G),
                int(call.T), int(call.S), int(call.D), int(call.V), call.threads, int(b), int(h), int(i), int(d), found, exact[size_t(d)]);
        }
      }
}

}  // namespace

int main(int argc, char** argv) {
  const int problems = argc > 1 ? std::atoi(argv[1]) : 120;
  for (int number = 0; number < problems; ++number) {
    Random random{std::uint64_t(number)};
    switch (number % 4) {
      case 0: compare<float>(random, number); break;
      case 1: compare<double>(random, number); break;
      case 2: compare<Bf16>(random, number); break;
      default: compare<Half>(random, number); break;
    }
  }
  std::puts("ok");
}
