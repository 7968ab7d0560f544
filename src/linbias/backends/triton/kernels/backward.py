# SPDX-License-Identifier: Apache-2.0
"""Backward, without atomics: one kernel over rows, for query and slopes, one over keys, for key and value.

Both recompute a tile's weights from the saved log-sum-exp, which comes in units of scores and in two parts; inf for
rows that saw nothing, so that they weigh nothing.
"""

import triton
import triton.language as tl

from .rule import content, dot, exponential, flattening, kept, pairs, penalty, places_of, ramp, tile_of


@triton.jit
def weights(b_t, b_c, b_high, b_low, EXP2: tl.constexpr):
    """exp(b_t - b_c - lse) with b_c and lse joined a row at a time, and what that sum drops taken off again."""
    b_sum = b_c + b_high
    b_back = b_sum - b_c
    b_lost = (b_c - (b_sum - b_back)) + (b_high - b_back)
    b_lost = tl.where(tl.abs(b_high) < float("inf"), b_lost + b_low, 0.0)
    return exponential((b_t - b_sum[:, None]) - b_lost[:, None], EXP2)


@triton.jit
def whole_tile(b_q, b_k, b_p, b_r, past, future, b_high, b_low, numbers, EXP2: tl.constexpr):
    """Of a tile wholly visible on one side: its weights, products, distances, side."""
    b_row, b_key, slope, ahead = ramp(b_p, b_r, past, future)
    b_s = dot(b_q, tl.trans(b_k))
    b_w = weights(content(b_s, numbers) - (slope * b_key)[None, :], slope * b_row, b_high, b_low, EXP2)
    return b_w, b_s, b_row[:, None] + b_key[None, :], ahead


@triton.jit
def part_tile(
    b_q, b_k, o_m, o_n, i_b, rows, keys, limits, past, future, b_high, b_low, numbers,
    METRIC: tl.constexpr, COORDS: tl.constexpr, EXP2: tl.constexpr,
):  # fmt: skip
    """Of any other tile, and which of its pairs exist; weights are 0 elsewhere."""
    visible, b_d, ahead = pairs(rows, keys, limits, i_b, o_m, o_n, METRIC, COORDS)
    b_bias = penalty(b_d, ahead, past, future)
    visible = visible & (b_bias != float("inf"))
    b_s = dot(b_q, tl.trans(b_k))
    b_w = weights(content(b_s, numbers) - b_bias, tl.zeros_like(b_high), b_high, b_low, EXP2)
    return tl.where(visible, b_w, 0.0), b_s, tl.where(visible, b_d, 0.0), ahead, visible


@triton.jit
def seen(visible, b_x, AXIS: tl.constexpr):
    """b_x with 0 for the rows that no pair of the tile needs: they may hold NaN, and 0 * NaN is NaN."""
    return tl.where((tl.max(visible.to(tl.int32), AXIS) > 0)[:, None], b_x, tl.zeros_like(b_x))


@triton.jit
def score_gradient(b_w, b_do, b_v, b_delta, b_keep):
    """[BM, BN]: of the scores."""
    b_dp = dot(b_do, tl.trans(b_v))
    if b_keep is not None:
        b_dp = b_dp * b_keep
    return b_w * (b_dp - b_delta[:, None])


@triton.jit
def share_kept(seed, numbers, i_b, i_h, o_m, first, BN: tl.constexpr):
    if seed is None:
        return None
    else:
        return tl.where(kept(seed, numbers.least, i_b, i_h, o_m, first, BN), numbers.share, 0.0)


@triton.jit
def rows_kernel(
    q, k, v, past, future, seed, rows, keys, limits, numbers, visits, saved, dq, dpast, dfuture,
    H, GROUP,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    METRIC: tl.constexpr, COORDS: tl.constexpr, EXP2: tl.constexpr,
):  # fmt: skip
    """Program w: row block w of the schedule. dpast, dfuture (B, H, row blocks): what it adds to the slopes'."""
    i_w = tl.program_id(0)
    i_n = tl.load(visits.order + i_w // visits.each[0]).to(tl.int64)
    i_bh, i_i = i_n // visits.lines, i_n % visits.lines
    i_b, i_h = i_bh // H, (i_bh % H).to(tl.int32)
    i_t = (i_i * visits.each[0] + i_w % visits.each[0]).to(tl.int32)
    o_m = i_t * BM + tl.arange(0, BM)
    m_m, o_row = o_m < rows.length, i_bh * rows.length + o_m
    b_q = tile_of(q.data, q.strides, i_b, i_h, o_m, rows.length, D, BD, True)
    b_do = tile_of(saved.grad.data, saved.grad.strides, i_b, i_h, o_m, rows.length, V, BV, True)
    past, future = tl.load(past + i_bh), tl.load(future + i_bh)
    b_high = tl.load(saved.high + o_row, mask=m_m, other=float("inf"))
    b_low = tl.load(saved.low + o_row, mask=m_m, other=0.0)
    b_delta = tl.load(saved.delta + o_row, mask=m_m, other=0.0)
    b_dq = tl.zeros([BM, BD], dtype=tl.float32)
    b_past, b_future = tl.zeros([BM], dtype=tl.float32), tl.zeros([BM], dtype=tl.float32)
    p_list = visits.list + i_n * visits.entries

    if METRIC is None:
        b_p = places_of(rows, i_b, o_m)
        for n in range(0, tl.load(visits.whole + i_n) * visits.each[1]):
            i_j = tl.load(p_list + n // visits.each[1]).to(tl.int32) * visits.each[1] + n % visits.each[1]
            o_n = i_j * BN + tl.arange(0, BN)
            b_k = tile_of(k.data, k.strides, i_b, i_h // GROUP, o_n, keys.length, D, BD, False)
            b_v = tile_of(v.data, v.strides, i_b, i_h // GROUP, o_n, keys.length, V, BV, False)
            b_r = places_of(keys, i_b, o_n)
            b_w, b_s, b_d, ahead = whole_tile(b_q, b_k, b_p, b_r, past, future, b_high, b_low, numbers, EXP2)
            b_keep = share_kept(seed, numbers, i_b, i_h, o_m, i_j * BN, BN)
            b_ds = score_gradient(b_w, b_do, b_v, b_delta, b_keep)
            if dpast is not None:
                b_slope = tl.sum(b_ds * b_d, 1)
                b_past -= tl.where(ahead, 0.0, b_slope)
                b_future -= tl.where(ahead, b_slope, 0.0)
            if numbers.softcap is not None:
                b_ds = b_ds * flattening(b_s, numbers)
            b_dq += dot(b_ds.to(b_k.dtype), b_k)

    for n in range(0, tl.load(visits.parts + i_n) * visits.each[1]):
        i_j = tl.load(p_list + visits.entries - 1 - n // visits.each[1]).to(tl.int32)
        i_j = i_j * visits.each[1] + n % visits.each[1]
        o_n = i_j * BN + tl.arange(0, BN)
        b_k = tile_of(k.data, k.strides, i_b, i_h // GROUP, o_n, keys.length, D, BD, True)
        b_v = tile_of(v.data, v.strides, i_b, i_h // GROUP, o_n, keys.length, V, BV, True)
        b_w, b_s, b_d, ahead, visible = part_tile(
            b_q, b_k, o_m, o_n, i_b, rows, keys, limits, past, future, b_high, b_low, numbers, METRIC, COORDS, EXP2
        )
        b_keep = share_kept(seed, numbers, i_b, i_h, o_m, i_j * BN, BN)
        b_ds = tl.where(visible, score_gradient(b_w, b_do, b_v, b_delta, b_keep), 0.0)
        if dpast is not None:
            b_past -= tl.sum(tl.where(ahead, 0.0, b_ds * b_d), 1)
            b_future -= tl.sum(tl.where(ahead, b_ds * b_d, 0.0), 1)
        if numbers.softcap is not None:
            b_ds = tl.where(visible, b_ds * flattening(b_s, numbers), 0.0)
        b_dq += dot(b_ds.to(b_k.dtype), seen(visible, b_k, 0))

    o_d = tl.arange(0, BD)
    m_d = m_m[:, None] & (o_d < D)[None, :]
    tl.store(dq + o_row[:, None] * D + o_d[None, :], (b_dq * numbers.inner).to(dq.dtype.element_ty), mask=m_d)
    if dpast is not None:
        o_part = i_bh * tl.cdiv(rows.length, BM) + i_t
        there = i_t * BM < rows.length
        tl.store(dpast + o_part, tl.sum(b_past, 0), mask=there)
        tl.store(dfuture + o_part, tl.sum(b_future, 0), mask=there)


@triton.jit
def keys_kernel(
    q, k, v, past, future, seed, rows, keys, limits, numbers, visits, saved, dk, dv,
    H, GROUP,
    D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    METRIC: tl.constexpr, COORDS: tl.constexpr, EXP2: tl.constexpr,
):  # fmt: skip
    """Program w: key block w of the schedule, over the strips of every query head of its group."""
    i_w = tl.program_id(0)
    i_n = tl.load(visits.order + i_w // visits.each[0]).to(tl.int64)
    i_bg, i_i = i_n // visits.lines, i_n % visits.lines
    i_b, i_g = i_bg // (H // GROUP), (i_bg % (H // GROUP)).to(tl.int32)
    i_j = (i_i * visits.each[0] + i_w % visits.each[0]).to(tl.int32)
    o_n = i_j * BN + tl.arange(0, BN)
    b_k = tile_of(k.data, k.strides, i_b, i_g, o_n, keys.length, D, BD, True)
    b_v = tile_of(v.data, v.strides, i_b, i_g, o_n, keys.length, V, BV, True)
    b_dk, b_dv = tl.zeros([BN, BD], dtype=tl.float32), tl.zeros([BN, BV], dtype=tl.float32)

    for g in range(0, GROUP):
        i_h = i_g * GROUP + g
        i_bh = i_b * H + i_h
        i_line = i_bh * visits.lines + i_i
        p_list = visits.list + i_line * visits.entries
        m_past, m_future = tl.load(past + i_bh), tl.load(future + i_bh)
        if METRIC is None:
            b_r = places_of(keys, i_b, o_n)
            for n in range(0, tl.load(visits.whole + i_line) * visits.each[1]):
                i_t = tl.load(p_list + n // visits.each[1]).to(tl.int32) * visits.each[1] + n % visits.each[1]
                o_m = i_t * BM + tl.arange(0, BM)
                m_m, o_row = o_m < rows.length, i_bh * rows.length + o_m
                b_q = tile_of(q.data, q.strides, i_b, i_h, o_m, rows.length, D, BD, True)
                b_do = tile_of(saved.grad.data, saved.grad.strides, i_b, i_h, o_m, rows.length, V, BV, True)
                b_high = tl.load(saved.high + o_row, mask=m_m, other=float("inf"))
                b_low = tl.load(saved.low + o_row, mask=m_m, other=0.0)
                b_delta = tl.load(saved.delta + o_row, mask=m_m, other=0.0)
                b_p = places_of(rows, i_b, o_m)
                b_w, b_s, _, _ = whole_tile(b_q, b_k, b_p, b_r, m_past, m_future, b_high, b_low, numbers, EXP2)
                b_keep = share_kept(seed, numbers, i_b, i_h, o_m, i_j * BN, BN)
                b_ds = score_gradient(b_w, b_do, b_v, b_delta, b_keep)
                if b_keep is not None:
                    b_w = b_w * b_keep
                if numbers.softcap is not None:
                    b_ds = b_ds * flattening(b_s, numbers)
                b_dv += dot(tl.trans(b_w.to(b_do.dtype)), b_do)
                b_dk += dot(tl.trans(b_ds.to(b_q.dtype)), b_q)

        for n in range(0, tl.load(visits.parts + i_line) * visits.each[1]):
            i_t = tl.load(p_list + visits.entries - 1 - n // visits.each[1]).to(tl.int32)
            i_t = i_t * visits.each[1] + n % visits.each[1]
            o_m = i_t * BM + tl.arange(0, BM)
            m_m, o_row = o_m < rows.length, i_bh * rows.length + o_m
            b_q = tile_of(q.data, q.strides, i_b, i_h, o_m, rows.length, D, BD, True)
            b_do = tile_of(saved.grad.data, saved.grad.strides, i_b, i_h, o_m, rows.length, V, BV, True)
            b_high = tl.load(saved.high + o_row, mask=m_m, other=float("inf"))
            b_low = tl.load(saved.low + o_row, mask=m_m, other=0.0)
            b_delta = tl.load(saved.delta + o_row, mask=m_m, other=0.0)
            b_w, b_s, _, _, visible = part_tile(
                b_q, b_k, o_m, o_n, i_b, rows, keys, limits, m_past, m_future, b_high, b_low, numbers,
                METRIC, COORDS, EXP2,
            )  # fmt: skip
            b_keep = share_kept(seed, numbers, i_b, i_h, o_m, i_j * BN, BN)
            b_ds = tl.where(visible, score_gradient(b_w, b_do, b_v, b_delta, b_keep), 0.0)
            if b_keep is not None:
                b_w = b_w * b_keep
            if numbers.softcap is not None:
                b_ds = tl.where(visible, b_ds * flattening(b_s, numbers), 0.0)
            b_dv += dot(tl.trans(b_w.to(b_do.dtype)), seen(visible, b_do, 1))
            b_dk += dot(tl.trans(b_ds.to(b_q.dtype)), seen(visible, b_q, 1))

    o_row, m_n = i_bg * keys.length + o_n, o_n < keys.length
    o_d, o_v = tl.arange(0, BD), tl.arange(0, BV)
    p_k, p_v = dk + o_row[:, None] * D + o_d[None, :], dv + o_row[:, None] * V + o_v[None, :]
    tl.store(p_k, (b_dk * numbers.inner).to(dk.dtype.element_ty), mask=m_n[:, None] & (o_d < D)[None, :])
    tl.store(p_v, b_dv.to(dv.dtype.element_ty), mask=m_n[:, None] & (o_v < V)[None, :])


@triton.jit
def delta_kernel(
    out, grad, grad_lse, delta, H, N, all_rows, V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Of each row: <gradient, output> less the gradient of its log-sum-exp."""
    o_r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_r, i_bh, o_v = o_r < all_rows, o_r // N, tl.arange(0, BV)
    m_v = m_r[:, None] & (o_v < V)[None, :]
    b_delta = tl.zeros([BM], dtype=tl.float32)
    if grad is not None:
        o_g = (i_bh // H) * grad.strides[0] + (i_bh % H) * grad.strides[1] + (o_r % N) * grad.strides[2]
        o_x = (i_bh // H) * out.strides[0] + (i_bh % H) * out.strides[1] + (o_r % N) * out.strides[2]
        b_g = tl.load(grad.data + o_g[:, None] + o_v[None, :], mask=m_v, other=0.0).to(tl.float32)
        b_o = tl.load(out.data + o_x[:, None] + o_v[None, :], mask=m_v, other=0.0).to(tl.float32)
        b_delta += tl.sum(b_g * b_o, 1)
    if grad_lse is not None:
        b_delta -= tl.load(grad_lse + o_r, mask=m_r, other=0.0)
    tl.store(delta + o_r, b_delta, mask=m_r)
