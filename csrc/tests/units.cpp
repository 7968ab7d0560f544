// SPDX-License-Identifier: Apache-2.0
// Units of the kernels against plain loops and known answers.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "direct.h"
#include "pack.h"
#include "philox.h"
#include "threads.h"
#include "walk.h"

using namespace linbias;
using namespace linbias::LINBIAS_VARIANT;

// Instrumented, a sample of the combinations must do.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LINBIAS_SPARSE 23
#else
#define LINBIAS_SPARSE 1
#endif

namespace {

template <class C>
C first_lane(Vec<C> v) {
  return v[0];
}

template <class C>
void exponential() {
  const double eps = sizeof(C) == 4 ? 1.2e-7 : 2.3e-16, low = sizeof(C) == 4 ? -87 : -707;
  for (int i = 0; i <= 200000; ++i) {
    const C x = C(low + (40 - low) * i / 200000);
    const double exact = std::exp(double(x)), found = first_lane<C>(exp_lanes<C>(splat<C>(x)));
    // The argument's own rounding in x * log2(e) grows with |x|.
    CHECK(std::fabs(found - exact) <= exact * eps * (2 + std::fabs(double(x))), "exp(%g) = %g, not %g", double(x), found, exact);
  }
  CHECK(first_lane<C>(exp_lanes<C>(splat<C>(0))) == 1, "exp(0)");
  CHECK(first_lane<C>(exp_lanes<C>(splat<C>(-kInf<C>))) == 0, "exp(-inf)");
  CHECK(first_lane<C>(exp_lanes<C>(splat<C>(-1e4))) == 0, "exp(-10000)");
  CHECK(first_lane<C>(exp_held<C>(splat<C>(-kInf<C>))) > 0, "a bound may not vanish");
  CHECK(std::isfinite(first_lane<C>(exp_held<C>(splat<C>(kInf<C>)))), "a bound may not overflow");
  // Every payload of NaN must survive, whatever bits a shift makes of it.
  for (int bit = 0; bit < Simd<C>::mantissa; ++bit) {
    typename Simd<C>::Int bits = (sizeof(C) == 4 ? 0x7f800000 : 0x7ff0000000000000) | typename Simd<C>::Int(1) << bit;
    C nan;
    std::memcpy(&nan, &bits, sizeof nan);
    CHECK(std::isnan(first_lane<C>(exp_lanes<C>(splat<C>(nan)))), "NaN with bit %d", bit);
    CHECK(std::isnan(first_lane<C>(exp_held<C>(splat<C>(nan)))), "NaN with bit %d in a bound", bit);
  }
  for (int i = -4000; i <= 4000; ++i) {
    const C x = C(i * 0.003);
    const double exact = std::tanh(double(x)), found = first_lane<C>(tanh_lanes<C>(splat<C>(x)));
    CHECK(std::fabs(found - exact) <= 8 * eps * std::fabs(exact), "tanh(%g) = %g, not %g", double(x), found, exact);
  }
}

// Rounded by vector as one by one: halfway cases, subnormals, overflow, NaN, by the bits of floats.
template <class X>
void by_vector(uint32_t high) {
  float in[64];
  X out[64];
  for (int i = 0; i < 64; ++i) {
    const uint32_t ends[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xfff, 0x1000, 0x1001};
    in[i] = from_bits(high << 16 | ends[i % 8]);
  }
  narrow_row<X, float>(in, 63, 1, out);
  for (int i = 0; i < 63; ++i) {
    X one;
    narrow(in[i], &one);
    CHECK(out[i].bits == one.bits || std::isnan(in[i]), "%g becomes %x by vector, %x alone", double(in[i]), out[i].bits, one.bits);
    CHECK(std::isnan(in[i]) == std::isnan(widen(out[i])), "%x is NaN by vector", out[i].bits);
  }
}

void half_types() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Half h{uint16_t(bits)};
    const Bf16 b{uint16_t(bits)};
    Half h_back;
    Bf16 b_back;
    narrow(widen(h), &h_back), narrow(widen(b), &b_back);
    if (!std::isnan(widen(h))) CHECK(h_back.bits == bits, "half %x comes back as %x", bits, h_back.bits);
    if (!std::isnan(widen(b))) CHECK(b_back.bits == bits, "bf16 %x comes back as %x", bits, b_back.bits);
    if (std::isnan(widen(h))) CHECK((h_back.bits & 0x7fff) > 0x7c00, "NaN half %x becomes %x", bits, h_back.bits);
    if (std::isnan(widen(b))) CHECK((b_back.bits & 0x7fff) > 0x7f80, "NaN bf16 %x becomes %x", bits, b_back.bits);
    Half row[64];
    std::fill(row, row + 64, h);
    const float lane = first_lane<float>(load_widened<float>(row));
    CHECK(lane == widen(h) || std::isnan(lane), "half %x by vector", bits);
    by_vector<Half>(bits), by_vector<Bf16>(bits);
  }
  // Ties go to even; the largest half is 65504 and 65520 is the first that rounds to infinity.
  const struct { float x; uint16_t bits; } known[] = {{65519.f, 0x7bff}, {65520.f, 0x7c00}, {1.00048828125f, 0x3c00},
      {1.00146484375f, 0x3c02}, {5.9604645e-8f, 1}, {2.9802322e-8f, 0}, {2.9802326e-8f, 1}, {-2.f, 0xc000}};
  for (const auto& pair : known) {
    Half h;
    narrow(pair.x, &h);
    CHECK(h.bits == pair.bits, "%g as half: %x, not %x", double(pair.x), h.bits, pair.bits);
  }
}

template <class X, class C>
void packing(Random& random) {
  for (int64_t D : {1, 7, 16, 33, 64, 80}) {
    for (int count : {1, 15, 16, 17, 63, 64}) {
      const int64_t row = D + random.between(0, 3);
      std::vector<X> in(size_t(count * row));
      for (auto& x : in) narrow(C(random.normal()), &x);
      std::vector<C> out(size_t(kTile * D), C(-1));
      pack_panels<X, C>({reinterpret_cast<const char*>(in.data()), row, 1, sizeof(X)}, 0, count, D, out.data());
      for (int j = 0; j < int(round_up(count, kPanel<C>)); ++j)
        for (int64_t d = 0; d < D; ++d) {
          const C found = out[size_t(j / kPanel<C> * D * kPanel<C> + d * kPanel<C> + j % kPanel<C>)];
          CHECK(found == (j < count ? C(widen(in[size_t(j * row + d)])) : C(0)), "key %d, element %d", j, int(d));
        }
    }
  }
}

template <class C>
void products(Random& random) {
  constexpr int W = kPanel<C>;
  for (int rows = 1; rows <= kStrip; ++rows)
    for (int panels = 1; panels <= 5; ++panels)
      for (int64_t K : {0, 1, 7, 64})
        for (bool transposed : {false, true}) {
          const int64_t ld = 9 + K;
          std::vector<C> a(size_t(kStrip * ld + K * kStrip)), b(size_t(K * panels * W)), c(size_t(kStrip * panels * W)), scale(kStrip);
          for (auto* v : {&a, &b, &c, &scale})
            for (auto& x : *v) x = C(random.between(-8, 8));  // small integers: every order of summation is exact
          const Left<C> left = transposed ? Left<C>{a.data(), 1, kStrip} : Left<C>{a.data(), ld, 1};
          for (Into into : {Into::zero, Into::add, Into::scaled}) {
            std::vector<C> found = c;
            const Right<C> right{b.data(), panels * W, W};
            const Target<C> target{found.data(), panels * W, W, scale.data()};
            if (transposed && into != Into::add) continue;
            if (transposed) gemm<C, Into::add, false>(left, right, target, K, rows, panels);
            else if (into == Into::zero) gemm<C, Into::zero>(left, right, target, K, rows, panels);
            else if (into == Into::add) gemm<C, Into::add>(left, right, target, K, rows, panels);
            else gemm<C, Into::scaled>(left, right, target, K, rows, panels);
            for (int i = 0; i < rows; ++i)
              for (int j = 0; j < panels * W; ++j) {
                C sum = into == Into::zero ? C(0) : c[size_t(i * panels * W + j)] * (into == Into::scaled ? scale[size_t(i)] : C(1));
                for (int64_t k = 0; k < K; ++k)
                  sum += left.data[i * left.row + k * left.inner] * b[size_t(k * panels * W + j)];
                CHECK(found[size_t(i * panels * W + j)] == sum, "rows %d panels %d K %d at %d, %d", rows, panels, int(K), i, j);
              }
          }
        }
}

template <class C>
void direct(Random& random) {
  for (int rows = 1; rows <= kStrip; ++rows)
    for (int count : {1, 2, 9, 64})
      for (int64_t D : {1, 5, 16, 67}) {
        std::vector<C> q(size_t(rows * D)), k(size_t(count * (D + 1))), found(size_t(rows * kTile));
        for (auto* v : {&q, &k})
          for (auto& x : *v) x = C(random.between(-8, 8));
        direct_dots<C>(q.data(), D, rows, k.data(), D + 1, count, D, found.data(), kTile, [](int, int) {});
        for (int i = 0; i < rows; ++i)
          for (int j = 0; j < count; ++j) {
            C sum = 0;
            for (int64_t d = 0; d < D; ++d) sum += q[size_t(i * D + d)] * k[size_t(j * (D + 1) + d)];
            CHECK(found[size_t(i * kTile + j)] == sum, "row %d, key %d", i, j);
          }
      }
}

// A bound of a norm may never lie below it, least of all where squares underflow or overflow.
template <class C>
void norms(Random& random) {
  const double least = sizeof(C) == 4 ? 1e-44 : 1e-320, most = sizeof(C) == 4 ? 1e37 : 1e306;
  for (double size = least; size < most; size *= 31)
    for (int64_t n : {1, 7, 64, 131}) {
      std::vector<C> x(static_cast<size_t>(n));
      long double sum = 0;
      for (auto& e : x) e = C(size * random.normal()), sum += static_cast<long double>(e) * e;
      const C bound = norm_bound<C, C>(x.data(), 1, n);
      CHECK(bound >= std::sqrt(sum), "norm of %d elements of size %g", int(n), size);
      CHECK(size < least * 1e6 || !(bound > std::sqrt(sum) * 15), "norm bound of size %g is loose", size);
      x[size_t(n / 2)] = C(NAN);
      CHECK(std::isnan(norm_bound<C, C>(x.data(), 1, n)), "NaN must show");
    }
}

void philox() {
  // The published answer for counter 0 and key 0.
  Call call;
  int64_t seed = 0;
  call.seed = &seed;
  const uint32_t words[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  for (int word = 0; word < 4; ++word)
    for (int below : {0, 1}) {
      // Kept exactly when the word reaches the threshold.
      call.dropout_p = (double(words[word]) + 1 - below) / 4294967296.0;
      alignas(64) float keep[kTile];
      Dropout(call).row<float>(0, 0, 0, 0, keep);
      CHECK(keep[word] == float(below), "word %d", word);
    }
}

void pool() {
  for (int threads : {1, 2, 5})
    for (int64_t tasks : {0, 1, 3, 1000}) {
      std::vector<std::atomic<int>> done(static_cast<size_t>(tasks));
      parallel(threads, tasks, [&](int64_t task, int worker) {
        CHECK(worker >= 0 && worker < threads, "worker %d of %d", worker, threads);
        ++done[size_t(task)];
      });
      for (auto& count : done) CHECK(count == 1, "a task ran %d times", int(count));
    }
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c)
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 200; ++repeat)
        parallel(3, int64_t(7), [&](int64_t task, int) { sum += task; });
    });
  for (auto& caller : callers) caller.join();
  CHECK(sum == 3 * 200 * 21, "callers at once: %d", int(sum));
}

// An exception reaches the caller once, after every task that had started, and the pool works on.
void throwing() {
  for (int threads : {1, 3})
    for (int64_t bad : {0, 5, 99}) {
      std::atomic<int> running{0};
      bool caught = false;
      try {
        parallel(threads, int64_t(100), [&](int64_t task, int) {
          ++running;
          if (task == bad) --running, throw std::bad_alloc();
          std::this_thread::yield();
          --running;
        });
      } catch (const std::bad_alloc&) {
        caught = true;
      }
      CHECK(caught && running == 0, "task %d throws, %d still run", int(bad), int(running));
      std::atomic<int> sum{0};
      parallel(threads, int64_t(10), [&](int64_t, int) { ++sum; });
      CHECK(sum == 10, "after an exception %d tasks run", int(sum));
    }
}

// A child of fork has none of the pool's threads and must not wait for them.
void forked() {
#if !defined(__SANITIZE_THREAD__)
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::atomic<int64_t> sum{0};
    parallel(3, int64_t(100), [&](int64_t task, int) { sum += task; });
    _exit(sum == 4950 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0, "child ended with %d", status);
#endif
}

// The rule of visibility at its other speeds against the definition, pair by pair, for every combination of what decides
// it: blocks (of a tile, of a strip, of superblocks), runs of keys, vectors.
template <class C>
struct Rule {
  static constexpr int64_t T = 9;
  int64_t S;
  Call call;
  std::vector<int64_t> query_place, key_place, query_segment, key_segment, ranks;
  std::vector<uint8_t> alive, mask, no_bias;
  C slope[2];

  // `n`: a number whose digits choose.
  Rule(int64_t keys, int n, Random& random) : S(keys), query_place(T), key_place(size_t(S)), query_segment(T), key_segment(size_t(S)), ranks(size_t(S)), alive(size_t(S)), mask(size_t(T * S)), no_bias(size_t(S)) {
    const auto digit = [&](int base) { const int d = n % base; n /= base; return d; };
    const int64_t limits[] = {kUnlimited, 0, 5, INT64_MAX - 1};
    call.B = call.H = call.G = 1, call.T = T, call.S = S, call.D = call.V = 1;
    call.causal = digit(2), call.left = limits[digit(4)], call.right = limits[digit(4)];
    const int ranked = digit(4), places = digit(6), segments = digit(4), masks = digit(4), slopes = digit(4);
    for (int64_t j = 0, r = 0; j < S; ++j) {
      alive[size_t(j)] = uint8_t(random.chance(masks & 1 ? .7 : .05) && j / 64 != 1), no_bias[size_t(j)] = uint8_t(j % 50 == 3);
      ranks[size_t(j)] = masks & 1 && !alive[size_t(j)] ? r : r++;
      const int64_t listed[] = {j, random.between(-40, 40), 3 * (S - j), INT64_MAX - S + 1 + j, INT64_MIN + j, (j - 60) * (int64_t(1) << 52)};
      key_place[size_t(j)] = listed[places];
      const int64_t parts[] = {0, j / 70, random.between(0, 2) * (int64_t(1) << 61), random.between(0, 1)};
      key_segment[size_t(j)] = parts[segments];
    }
    for (int64_t i = 0; i < T; ++i) {
      const int64_t near = key_place[size_t(random.between(0, S - 1))], far[] = {INT64_MIN, -1, INT64_MAX, 0};
      query_place[size_t(i)] = random.chance(.2) ? far[i % 4] : near;
      if (places == 0) query_place[size_t(i)] = 60 + i;
      query_segment[size_t(i)] = key_segment[size_t(random.between(0, S - 1))];
    }
    for (auto& bit : mask) bit = uint8_t(random.chance(.5));
    if (ranked & 1) call.sinks = 2;
    if (ranked & 2) call.prefix = 70;
    if (ranked) call.key_ranks = list(ranks);
    if (places) {
      call.query_positions.data = query_place.data(), call.key_positions.data = key_place.data();
      call.query_positions.stride[1] = call.key_positions.stride[1] = 1;
    }
    if (segments) call.query_segments = list(query_segment), call.key_segments = list(key_segment);
    if (masks & 1) call.key_mask = list(alive);
    if (masks & 2) call.attn_mask = list(mask), call.attn_mask.stride[2] = S, call.attn_mask.stride[3] = 1;
    if (slopes & 2) call.key_unbiased = list(no_bias);
    slope[0] = slopes & 1 ? kInf<C> : C(.5), slope[1] = slopes == 3 ? kInf<C> : C(.25);
    call.slopes.data = slope, call.future_slopes.data = slope + 1;
  }
  template <class X>
  static Array<X> list(const std::vector<X>& items) { return {items.data(), {0, 1, 0, 0}}; }

  // The definition, and the one exception: an infinite bias hides its pair.
  bool sees(const Call& c, const RowTile<C>& rows, int r, int64_t j) const {
    if (!pair_visible(c, rows, r, j)) return false;
    const int64_t place = c.key_positions ? key_place[size_t(j)] : j, at = rows.position[r];
    return place == at || (c.key_unbiased && no_bias[size_t(j)]) || slope[place > at] != kInf<C>;
  }

  void check(int number) const {
    KeyTree<C> tree;
    tree.build(call);
    const Tiling tiling(call);
    static RowTile<C> rows;
    static KeyTile<C> keys;
    static PairScratch<C> pairs;
    rows.fill(call, tiling, 0, 0, 0);
    Call unmasked = call;
    unmasked.attn_mask = {};
    int64_t size = kTile;
    for (int level = 0; level < tree.levels(); ++level, size *= kFan)
      for (int64_t t = 0; t < tree.count(level); ++t)
        for (int s = -1; s < rows.strips; ++s) {
          const RowSpan& span = s < 0 ? rows.span : rows.strip[s];
          const int first = s < 0 ? 0 : s * kStrip, last = s < 0 ? rows.rows : first + rows.strip_rows(s);
          const BlockVisibility block = block_visibility(call, span, tree.span(0, level, t));
          bool any = false, all = true;
          for (int r = first; r < last; ++r)
            for (int64_t j = t * size; j < std::min(S, (t + 1) * size); ++j) {
              any = any || sees(unmasked, rows, r, j), all = all && pair_visible(unmasked, rows, r, j);
            }
          CHECK(block != BlockVisibility::empty || !any, "rule %d: level %d, tile %d, strip %d is not empty", number, level, int(t), s);
          CHECK(block != BlockVisibility::full || all, "rule %d: level %d, tile %d, strip %d is not full", number, level, int(t), s);
          if (level == 0 && s >= 0) check_vectors(rows, keys, pairs, tree.span(0, 0, t), t, s, block, number);
        }
  }

  void check_vectors(const RowTile<C>& rows, KeyTile<C>& keys, PairScratch<C>& pairs, const KeySpan& span, int64_t t, int s,
                     BlockVisibility block, int number) const {
    if (block == BlockVisibility::empty) return;
    keys.begin(call, rows, span, t), keys.prepare(call, 0);
    const BlockVisibility mask = mask_visibility(call, rows, s, keys.first, keys.count);
    const Range range = visible_range(call, rows.strip[s], span, keys.count);
    const Filled filled = fill_pairs(call, rows, keys, s, block, mask == BlockVisibility::partial, pairs);
    const Examiner<C> examine(call, rows, keys, pairs, s, filled);
    for (int r = 0; r < rows.strip_rows(s); ++r)
      for (int j = 0; j < kTile; ++j) {
        const int row = s * kStrip + r, lane = j % kLanes<C>;
        const bool seen = j < keys.count && sees(call, rows, row, keys.first + j);
        CHECK(!seen || (j >= range.first && j < range.last), "rule %d: key %d of tile %d, row %d is out of range", number, j, int(t), row);
        CHECK(!seen || mask != BlockVisibility::empty, "rule %d: key %d of tile %d, row %d is masked", number, j, int(t), row);
        if (mask == BlockVisibility::empty) continue;
        Mask<C> found;
        const Vec<C> x = examine(Vec<C>{}, r, row, j - lane, found);
        CHECK((found[lane] != 0) == seen, "rule %d: key %d of tile %d, row %d by vector", number, j, int(t), row);
        CHECK((x[lane] == -kInf<C>) == !seen, "rule %d: score of key %d of tile %d, row %d", number, j, int(t), row);
      }
  }
};

template <class C>
void visibility(Random& random) {
  constexpr int combinations = 2 * 4 * 4 * 4 * 6 * 4 * 4 * 4;
  for (int n = 0; n < combinations; n += LINBIAS_SPARSE) Rule<C>(130, n, random).check(n);
  for (int n = 0; n < combinations; n += 211 * LINBIAS_SPARSE) Rule<C>(1100, n, random).check(n);
}

void heap(Random& random) {
  Frontier<float> frontier;
  frontier.reserve(300);
  frontier.clear(true);
  for (int i = 0; i < 200; ++i) frontier.push({float(random.between(0, 50)), 0, 1, i});
  float last = -1;
  for (int i = 0; i < 80; ++i) {
    const float distance = frontier.pop().distance;
    CHECK(distance >= last, "nearest first");
    last = distance;
  }
  frontier.reverse();
  for (last = 1e9f; !frontier.empty();) {
    const float distance = frontier.pop().distance;
    CHECK(distance <= last, "farthest first");
    last = distance;
  }
}

}  // namespace

int main() {
  Random random(1);
  exponential<float>(), exponential<double>();
  half_types();
  packing<float, float>(random), packing<double, double>(random), packing<Half, float>(random), packing<Bf16, float>(random);
  products<float>(random), products<double>(random);
  direct<float>(random), direct<double>(random);
  norms<float>(random), norms<double>(random);
  philox();
  heap(random);
  visibility<float>(random), visibility<double>(random);
  pool();
  throwing();
  forked();
  std::puts("ok");
}
