# SPDX-License-Identifier: Apache-2.0
"""What a kernel knows of pairs: which exist, how far apart they are, what their bias and content come to.

The one statement of visibility and bias in Triton: forward, backward and decode ask here. Scores are in units of
``EXP2``: of log 2 where exponentials are powers of two, for half types, else natural; scale and slopes come multiplied.
"""

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_FARTHEST = tl.constexpr(2**63 - 1)


@triton.jit
def exponential(x, EXP2: tl.constexpr):
    if EXP2:
        return tl.exp2(x)
    else:
        return tl.exp(x)


@triton.jit
def dot(a, b):
    """[M, K] @ [K, N] of one dtype, in float32."""
    if _INTERPRETED:  # which knows no bfloat16 product
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def difference(a, b, COUNTED: tl.constexpr):
    """a - b, held at the farthest that int64 can say where it would wrap."""
    back = a - b
    if COUNTED:
        return back
    else:
        beyond = ((a ^ b) & (a ^ back)) < 0
        return tl.maximum(tl.where(beyond, tl.where(a < 0, -_FARTHEST, _FARTHEST), back), -_FARTHEST)


@triton.jit
def flags_of(pointer, stride, i_b, o_n, m_n):
    return tl.load(pointer + i_b * stride + o_n, mask=m_n, other=0) != 0


@triton.jit
def numbers_of(pointer, stride, i_b, o_n, m_n):
    return tl.load(pointer + i_b * stride + o_n, mask=m_n, other=0)


@triton.jit
def places_of(tokens, i_b, o_n):
    """Positions: counted ones are int32, given ones int64."""
    if tokens.position is None:
        return o_n + tokens.first
    else:
        # Beyond the end the last one again, so that the least and the greatest are those of tokens that exist.
        return tl.load(tokens.position + i_b * tokens.strides[0] + tl.minimum(o_n, tokens.length - 1))


@triton.jit
def apart(rows, keys, i_b, o_m, o_n, m_m, m_n, METRIC: tl.constexpr, COORDS: tl.constexpr):
    """[BM, BN] distance between points."""
    b_d = tl.zeros([o_m.shape[0], o_n.shape[0]], dtype=tl.float32)
    for c in tl.static_range(COORDS):
        b_p = numbers_of(rows.position + c, rows.strides[0], i_b, o_m * COORDS, m_m)
        b_r = numbers_of(keys.position + c, keys.strides[0], i_b, o_n * COORDS, m_n)
        b_x = tl.abs(b_p[:, None] - b_r[None, :])
        if METRIC == "euclidean":
            b_x = b_x * b_x
        b_d += b_x
    if METRIC == "euclidean":
        b_d = tl.sqrt_rn(b_d)
    return b_d


@triton.jit
def pairs(rows, keys, limits, i_b, o_m, o_n, METRIC: tl.constexpr, COORDS: tl.constexpr):
    """Of queries o_m and keys o_n: [BM, BN] whether the pair exists, its distance, whether the key is later."""
    m_m, m_n = o_m < rows.length, o_n < keys.length
    visible = m_m[:, None] & m_n[None, :]
    if keys.real is not None:
        visible = visible & flags_of(keys.real, keys.strides[3], i_b, o_n, m_n)[None, :]
    if rows.segment is not None:
        b_p = numbers_of(rows.segment, rows.strides[1], i_b, o_m, m_m)
        b_r = numbers_of(keys.segment, keys.strides[1], i_b, o_n, m_n)
        visible = visible & (b_p[:, None] == b_r[None, :])
    if METRIC is not None:
        b_d = apart(rows, keys, i_b, o_m, o_n, m_m, m_n, METRIC, COORDS)
        ahead = b_d < 0
    else:
        b_p, b_r = places_of(rows, i_b, o_m), places_of(keys, i_b, o_n)
        back = difference(b_p[:, None], b_r[None, :], rows.position is None)
        ahead = back < 0
        if limits.prefix is not None:
            allowed = ~ahead
            if keys.rank is not None:
                allowed = allowed | (numbers_of(keys.rank, keys.strides[2], i_b, o_n, m_n) < limits.prefix)[None, :]
            visible = visible & allowed
        if limits.left is not None or limits.right is not None:
            inside = visible
            if limits.left is not None:
                inside = inside & (back <= limits.left)
            if limits.right is not None:
                inside = inside & (back >= -limits.right)
            if keys.rank is not None:
                inside = inside | (numbers_of(keys.rank, keys.strides[2], i_b, o_n, m_n) < limits.sinks)[None, :]
            visible = visible & inside
        b_d = tl.abs(back).to(tl.float32)
    if rows.unbiased is not None:
        b_free = flags_of(rows.unbiased, rows.strides[4], i_b, o_m, m_m)[:, None]
        b_free = b_free | flags_of(keys.unbiased, keys.strides[4], i_b, o_n, m_n)[None, :]
        b_d = tl.where(b_free, 0.0, b_d)
    return visible, b_d, ahead


@triton.jit
def penalty(b_d, ahead, past, future):
    """slope x distance, exactly 0 at distance 0."""
    return tl.where(b_d == 0, 0.0, tl.where(ahead, future, past) * b_d)


@triton.jit
def ramp(b_p, b_r, past, future):
    """Of a tile whose keys all stand on one side of its queries: the distance as a row's and a key's part, the slope.

    Both parts are measured from the key nearest to the queries, so neither exceeds the distance, at any length.
    """
    near_past, near_future = tl.max(b_r, 0), tl.min(b_r, 0)
    ahead = tl.min(b_p, 0) < near_future
    near = tl.where(ahead, near_future, near_past)
    b_row, b_key = tl.abs(b_p - near).to(tl.float32), tl.abs(b_r - near).to(tl.float32)
    return b_row, b_key, tl.where(ahead, future, past), ahead


@triton.jit
def tanh(x):
    """No library that only a GPU has: a series where (1 - e) / (1 + e) would cancel."""
    b_e = tl.exp(-2.0 * tl.abs(x))
    b_far = tl.where(x < 0, -1.0, 1.0) * (1.0 - b_e) / (1.0 + b_e)
    y = x * x
    b_near = 1.0 + y * (
        -0.3333333333333333
        + y * (0.13333333333333333 + y * (-0.05396825396825397 + y * (0.021869488536155203 - y * 0.008863235529902197)))
    )
    return tl.where(tl.abs(x) < 0.25, x * b_near, b_far)


@triton.jit
def content(b_s, numbers):
    """Of the products: what the score is before its bias."""
    if numbers.softcap is None:
        return b_s * numbers.scale
    else:
        return numbers.softcap * tanh(b_s * numbers.scale)


@triton.jit
def flattening(b_s, numbers):
    """The derivative of the cap."""
    b_t = tanh(b_s * numbers.scale)
    return 1.0 - b_t * b_t


@triton.jit
def kept(seed, least, i_b, i_h, o_m, first, BN: tl.constexpr):
    """[BM, BN] whether dropout keeps the pair: semantics/dropout.py."""
    i_b, i_h = i_b.to(tl.int32), i_h.to(tl.int32)
    o_c = first // 4 + tl.arange(0, BN // 4)
    b_zero = tl.zeros([o_m.shape[0], BN // 4], dtype=tl.int32)
    c0, c1 = b_zero + o_c[None, :], b_zero + o_m[:, None]
    b_0, b_1, b_2, b_3 = tl.philox(tl.load(seed), c0, c1, b_zero + i_h, b_zero + i_b, 10)
    b_u = tl.interleave(tl.interleave(b_0, b_2), tl.interleave(b_1, b_3))
    return b_u.to(tl.uint32, bitcast=True) >= least


@triton.jit
def tile_of(pointer, strides, i_b, i_h, o_n, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr):
    """[N, BLOCK] rows o_n of (B, H, count, WIDTH), 0 beyond; without CUT all of them are there. Offsets are int64."""
    o_d = tl.arange(0, BLOCK)
    p_x = pointer + i_b * strides[0] + i_h * strides[1] + o_n.to(tl.int64)[:, None] * strides[2] + o_d[None, :]
    if CUT:
        return tl.load(p_x, mask=(o_n < count)[:, None] & (o_d < WIDTH)[None, :], other=0.0)
    elif WIDTH != BLOCK:
        return tl.load(p_x, mask=(o_d < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(p_x)
