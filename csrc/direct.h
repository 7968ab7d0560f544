// SPDX-License-Identifier: Apache-2.0
// Dot products of a few rows with keys where they lie: decode reads each key once and packs nothing.
#pragma once

#include "gemm.h"

namespace linbias::LINBIAS_VARIANT {

// scores[r * score_row + j] = <query row r, key j> for R rows and J keys, held in R * J sums.
template <class C, int R, int J>
LINBIAS_INLINE void direct_block(const C* query, int64_t query_row, const C* keys, int64_t key_row, int64_t D,
                                 C* scores, int64_t score_row) {
  constexpr int L = kLanes<C>;
  Vec<C> acc[R][J];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) acc[r][j] = Vec<C>{};
  int64_t d = 0;
  for (; d + L <= D; d += L) {
    Vec<C> key[J];
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) key[j] = load<C>(keys + j * key_row + d);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<C> q = load<C>(query + r * query_row + d);
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j) acc[r][j] += q * key[j];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) {
      C sum = sum_lanes<C>(acc[r][j]);
      for (int64_t rest = d; rest < D; ++rest) sum += query[r * query_row + rest] * keys[j * key_row + rest];
      scores[r * score_row + j] = sum;
    }
}

// `ahead(first, last)` is called before keys [first, last) are multiplied, to ask for memory that is needed next.
template <class C, int R, class Ahead>
inline void direct_rows(const C* query, int64_t query_row, const C* keys, int64_t key_row, int count, int64_t D,
                        C* scores, int64_t score_row, const Ahead& ahead) {
  // Enough sums at once to hide the latency of the products.
  constexpr int J = R == 1 ? 8 : R == 2 ? 4 : 2;
  int j = 0;
  for (; j + J <= count; j += J) {
    ahead(j, j + J);
    direct_block<C, R, J>(query, query_row, keys + j * key_row, key_row, D, scores + j, score_row);
  }
  for (; j < count; ++j)
    direct_block<C, R, 1>(query, query_row, keys + j * key_row, key_row, D, scores + j, score_row);
}

// The same for R <= rows <= kStrip and any count of keys.
template <class C, int R = 1, class Ahead>
inline void direct_dots(const C* query, int64_t query_row, int rows, const C* keys, int64_t key_row, int count,
                        int64_t D, C* scores, int64_t score_row, const Ahead& ahead) {
  if constexpr (R < kStrip)
    if (rows > R)
      return direct_dots<C, R + 1>(query, query_row, rows, keys, key_row, count, D, scores, score_row, ahead);
  direct_rows<C, R>(query, query_row, keys, key_row, count, D, scores, score_row, ahead);
}

}  // namespace linbias::LINBIAS_VARIANT
