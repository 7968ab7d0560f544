# SPDX-License-Identifier: Apache-2.0
"""Forward and decode: one block of rows over the key blocks of its list."""

import triton
import triton.language as tl

from .rule import content, dot, exponential, kept, pairs, penalty, places_of, ramp, tile_of

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def fold(b_m, b_l, b_o, b_t, b_c, b_v, b_keep, EXP2: tl.constexpr, VALUES: tl.constexpr):
    """The online softmax: scores are b_t - b_c, [BM, BN] and [BM] or a number; b_keep: None, or what dropout leaves."""
    b_top = tl.maximum(b_m, tl.max(b_t, 1) - b_c)
    b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_p = exponential(b_t - (b_safe + b_c)[:, None], EXP2)
    b_fade = exponential(b_m - b_safe, EXP2)
    b_l = b_l * b_fade + tl.sum(b_p, 1)
    if VALUES:
        if b_keep is not None:
            b_p = b_p * b_keep
        b_o = b_o * b_fade[:, None] + dot(b_p.to(b_v.dtype), b_v)
    return b_top, b_l, b_o


@triton.jit
def forward_kernel(
    q, k, v, past, future, seed, rows, keys, limits, numbers, visits, found,
    H, GROUP,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    METRIC: tl.constexpr, COORDS: tl.constexpr, EXP2: tl.constexpr, VALUES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (w, s): row block w of the schedule, share s of the keys it visits."""
    i_w, i_s = tl.program_id(0), tl.program_id(1)
    i_n = tl.load(visits.order + i_w // visits.each[0]).to(tl.int64)
    i_bh, i_i = i_n // visits.lines, i_n % visits.lines
    i_b, i_h = i_bh // H, (i_bh % H).to(tl.int32)
    o_m = ((i_i * visits.each[0] + i_w % visits.each[0]) * BM).to(tl.int32) + tl.arange(0, BM)
    m_m = o_m < rows.length
    b_q = tile_of(q.data, q.strides, i_b, i_h, o_m, rows.length, D, BD, True)
    past, future = tl.load(past + i_bh), tl.load(future + i_bh)
    b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BM], dtype=tl.float32)
    b_o = tl.zeros([BM, BV], dtype=tl.float32)
    p_list = visits.list + i_n * visits.entries

    if METRIC is None:
        # Wholly visible, on one side: the bias is a ramp along the keys and a number a row.
        b_p = places_of(rows, i_b, o_m)
        whole = tl.load(visits.whole + i_n) * visits.each[1]
        for n in range(whole * i_s // SPLITS, whole * (i_s + 1) // SPLITS):
            i_j = tl.load(p_list + n // visits.each[1]).to(tl.int32) * visits.each[1] + n % visits.each[1]
            o_n = i_j * BN + tl.arange(0, BN)
            b_k = tile_of(k.data, k.strides, i_b, i_h // GROUP, o_n, keys.length, D, BD, False)
            b_v = b_k
            if VALUES:
                b_v = tile_of(v.data, v.strides, i_b, i_h // GROUP, o_n, keys.length, V, BV, False)
            b_row, b_key, slope, ahead = ramp(b_p, places_of(keys, i_b, o_n), past, future)
            b_s = dot(b_q, tl.trans(b_k))
            b_t = content(b_s, numbers) - (slope * b_key)[None, :]
            b_keep = None
            if seed is not None:
                b_keep = tl.where(kept(seed, numbers.least, i_b, i_h, o_m, i_j * BN, BN), numbers.share, 0.0)
            b_m, b_l, b_o = fold(b_m, b_l, b_o, b_t, slope * b_row, b_v, b_keep, EXP2, VALUES)

    parts = tl.load(visits.parts + i_n) * visits.each[1]
    for n in range(parts * i_s // SPLITS, parts * (i_s + 1) // SPLITS):
        i_j = (
            tl.load(p_list + visits.entries - 1 - n // visits.each[1]).to(tl.int32) * visits.each[1]
            + n % visits.each[1]
        )
        o_n = i_j * BN + tl.arange(0, BN)
        visible, b_d, ahead = pairs(rows, keys, limits, i_b, o_m, o_n, METRIC, COORDS)
        b_bias = penalty(b_d, ahead, past, future)
        visible = visible & (b_bias != float("inf"))
        b_k = tile_of(k.data, k.strides, i_b, i_h // GROUP, o_n, keys.length, D, BD, True)
        b_v = b_k
        if VALUES:
            b_v = tile_of(v.data, v.strides, i_b, i_h // GROUP, o_n, keys.length, V, BV, True)
            # What no row sees may hold NaN, and 0 * NaN is NaN.
            b_v = tl.where((tl.max(visible.to(tl.int32), 0) > 0)[:, None], b_v, tl.zeros_like(b_v))
        b_s = content(dot(b_q, tl.trans(b_k)), numbers)
        b_t = tl.where(visible, b_s - b_bias, float("-inf"))
        b_keep = None
        if seed is not None:
            b_keep = tl.where(kept(seed, numbers.least, i_b, i_h, o_m, i_j * BN, BN), numbers.share, 0.0)
        b_m, b_l, b_o = fold(b_m, b_l, b_o, b_t, tl.zeros_like(b_l), b_v, b_keep, EXP2, VALUES)

    o_row = i_bh * rows.length + o_m
    if SPLITS > 1:
        o_row += i_s * found.rows
        tl.store(found.top + o_row, b_m, mask=m_m)
        tl.store(found.sum + o_row, b_l, mask=m_m)
    else:
        b_seen = b_l != 0
        b_o = tl.where(b_seen[:, None], b_o / b_l[:, None], 0.0)
        b_z = b_m.to(tl.float64) * (_LN2 if EXP2 else 1.0) + tl.log(tl.where(b_seen, b_l, 1.0)).to(tl.float64)
        b_high = tl.where(b_seen, b_z.to(tl.float32), float("-inf"))
        b_low = tl.where(tl.abs(b_high) < float("inf"), (b_z - b_high.to(tl.float64)).to(tl.float32), 0.0)
        tl.store(found.lse + o_row, b_high, mask=m_m)
        tl.store(found.lse_low + o_row, b_low, mask=m_m)
    if VALUES:
        o_v = tl.arange(0, BV)
        p_o = found.out + o_row[:, None] * V + o_v[None, :]
        tl.store(p_o, b_o.to(found.out.dtype.element_ty), mask=m_m[:, None] & (o_v < V)[None, :])


@triton.jit
def norms_kernel(x, out, H, N, all_rows, inflation, least, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    """Upper bounds of the lengths of all rows, as `semantics.bounds.upper_norms`, in one pass."""
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_r = o_r < all_rows
    i_bh = o_r // N
    o_x = (i_bh // H) * x.strides[0] + (i_bh % H) * x.strides[1] + (o_r % N) * x.strides[2]
    o_d = tl.arange(0, BD)
    b_x = tl.load(x.data + o_x[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0.0)
    b_x = tl.abs(b_x.to(tl.float32))
    b_peak = tl.max(b_x, 1)
    b_unit = tl.where((b_peak > 0) & (b_peak < float("inf")), b_peak, 1.0)
    b_y = tl.div_rn(b_x, b_unit[:, None].broadcast_to(b_x.shape))
    b_n = b_unit * tl.sqrt_rn(tl.sum(b_y * b_y, 1)) * inflation + least
    tl.store(out + o_r, b_n, mask=m_r)
