// SPDX-License-Identifier: Apache-2.0
// Dropout: Philox4x32-10 (Salmon et al., SC 2011) of (seed; j / 4, i, h, b), word j % 4 for pair (b, h, i, j).
// Any backend, tiling and pass can therefore recompute whether a pair was kept.
#pragma once

#include "spans.h"

namespace linbias::LINBIAS_VARIANT {

class Dropout {
 public:
  explicit Dropout(const Call& call) : active_(call.dropout_p > 0) {
    if (!active_) return;
    uint64_t seed = static_cast<uint64_t>(*call.seed);
    key_[0] = uint32_t(seed), key_[1] = uint32_t(seed >> 32);
    threshold_ = static_cast<uint64_t>(call.dropout_p * 4294967296.0);
    scale_ = call.dropout_p < 1 ? 1.0 / (1.0 - call.dropout_p) : 0.0;
  }

  bool active() const { return active_; }
  // What kept weights are multiplied by.
  double scale() const { return scale_; }

  // keep[0..kTile): 0 or 1 for the pairs of query i with keys first .. first + kTile - 1; first is a multiple of kTile.
  template <class C>
  void row(int64_t b, int64_t h, int64_t i, int64_t first, C* keep) const {
    constexpr int n = kTile / 4;
    uint32_t c0[n], c1[n], c2[n], c3[n];
    for (int k = 0; k < n; ++k) c0[k] = uint32_t(first / 4 + k), c1[k] = uint32_t(i), c2[k] = uint32_t(h), c3[k] = uint32_t(b);
    uint32_t k0 = key_[0], k1 = key_[1];
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
      for (int k = 0; k < n; ++k) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * c0[k], p1 = uint64_t(0xCD9E8D57u) * c2[k];
        c0[k] = uint32_t(p1 >> 32) ^ c1[k] ^ k0, c1[k] = uint32_t(p1);
        c2[k] = uint32_t(p0 >> 32) ^ c3[k] ^ k1, c3[k] = uint32_t(p0);
      }
    for (int k = 0; k < n; ++k) {
      keep[4 * k + 0] = C(c0[k] >= threshold_), keep[4 * k + 1] = C(c1[k] >= threshold_);
      keep[4 * k + 2] = C(c2[k] >= threshold_), keep[4 * k + 3] = C(c3[k] >= threshold_);
    }
  }

 private:
  bool active_;
  uint32_t key_[2] = {0, 0};
  uint64_t threshold_ = 0;
  double scale_ = 1.0;
};

}  // namespace linbias::LINBIAS_VARIANT
