// SPDX-License-Identifier: Apache-2.0
// The one matrix product all passes use: a strip of kStrip rows times panels of kPanel columns, held in registers.
#pragma once

#include "simd.h"

namespace linbias::LINBIAS_VARIANT {

// Rows of a strip: 6 rows by one cache line of columns fill the 16 registers of AVX2.
constexpr int kStrip = 6;

// How a product meets what is already in C.
enum class Into { zero, add, scaled };

// An operand broadcast element by element: a(i, k) = data[i * row + k * inner].
template <class C>
struct Left {
  const C* data;
  int64_t row, inner;
};

// An operand read panel by panel: b(k, p, lane) = data[k * row + p * panel + lane].
template <class C>
struct Right {
  const C* data;
  int64_t row, panel;
};

// c(i, p, lane) = data[i * row + p * panel + lane]; `scale[i]` multiplies row i first under Into::scaled.
template <class C>
struct Target {
  C* data;
  int64_t row, panel;
  const C* scale = nullptr;
};

template <class C, int R, int P, Into M, bool UnitInner>
LINBIAS_INLINE void gemm_block(Left<C> a, Right<C> b, Target<C> c, int64_t K) {
  constexpr int N = kPanelVecs<C>, L = kLanes<C>;
  Vec<C> acc[R][P * N];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < P * N; ++j) acc[i][j] = Vec<C>{};
  const C* low = a.data;                                   // rows 0..2
  const C* high = a.data + (R > 3 ? 3 * a.row : 0);        // rows 3..5, so that every address is base + 0|1|2 * row
  const C* right = b.data;
  const int64_t inner = UnitInner ? 1 : a.inner;
  for (int64_t k = 0; k < K; ++k) {
    Vec<C> column[P * N];
#pragma GCC unroll 16
    for (int j = 0; j < P * N; ++j) column[j] = load<C>(right + (j / N) * b.panel + (j % N) * L);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const C x = i < 3 ? low[i * a.row] : high[(i - 3) * a.row];
#pragma GCC unroll 16
      for (int j = 0; j < P * N; ++j) acc[i][j] += x * column[j];
    }
    low += inner;
    high += inner;
    right += b.row;
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < P * N; ++j) {
      C* place = c.data + i * c.row + (j / N) * c.panel + (j % N) * L;
      // What is there comes last: a sum of short sums rounds less than one long chain.
      if constexpr (M == Into::add) acc[i][j] += load<C>(place);
      if constexpr (M == Into::scaled) acc[i][j] += load<C>(place) * c.scale[i];
      store<C>(place, acc[i][j]);
    }
}

// Panels taken at once by R rows: as many accumulators as the registers hold beside the operands.
template <class C, int R>
constexpr int panels_at_once() {
  int most = (LINBIAS_REGISTERS - 4) / (R * kPanelVecs<C>);
  return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

template <class C, int R, Into M, bool UnitInner>
inline void gemm_rows(Left<C> a, Right<C> b, Target<C> c, int64_t K, int panels) {
  constexpr int P = panels_at_once<C, R>();
  // Narrow registers: 6 rows at once would spill, so the strip is done in halves.
  if constexpr (R > 3 && R * kPanelVecs<C> > LINBIAS_REGISTERS - 3) {
    gemm_rows<C, 3, M, UnitInner>(a, b, c, K, panels);
    gemm_rows<C, R - 3, M, UnitInner>({a.data + 3 * a.row, a.row, a.inner}, b,
                                      {c.data + 3 * c.row, c.row, c.panel, c.scale ? c.scale + 3 : nullptr}, K, panels);
  } else {
    int p = 0;
    for (; p + P <= panels; p += P)
      gemm_block<C, R, P, M, UnitInner>(a, {b.data + p * b.panel, b.row, b.panel},
                                        {c.data + p * c.panel, c.row, c.panel, c.scale}, K);
    for (; P > 1 && p < panels; ++p)
      gemm_block<C, R, 1, M, UnitInner>(a, {b.data + p * b.panel, b.row, b.panel},
                                        {c.data + p * c.panel, c.row, c.panel, c.scale}, K);
  }
}

// c (rows x panels) (+)= a (rows x K) times b (K x panels). `rows` <= kStrip; 4 and 5 are computed as 6, so a and c
// must have kStrip rows of storage. UnitInner: a.inner is 1.
template <class C, Into M, bool UnitInner = true>
inline void gemm(Left<C> a, Right<C> b, Target<C> c, int64_t K, int rows, int panels) {
  switch (rows) {
    case 1: return gemm_rows<C, 1, M, UnitInner>(a, b, c, K, panels);
    case 2: return gemm_rows<C, 2, M, UnitInner>(a, b, c, K, panels);
    case 3: return gemm_rows<C, 3, M, UnitInner>(a, b, c, K, panels);
    default: return gemm_rows<C, kStrip, M, UnitInner>(a, b, c, K, panels);
  }
}

}  // namespace linbias::LINBIAS_VARIANT
