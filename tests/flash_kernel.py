# SPDX-License-Identifier: Apache-2.0
"""flash-attn's kernel as a dense formula, and calls to hold against it."""

import torch
from torch import Tensor

from linbias.testing import assert_within_budget


def make(queries: int, keys: int, batch: int = 2, heads: int = 6, kv_heads: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in flash-attn's layout, all sizes different."""
    return (
        torch.randn(batch, queries, heads, 7),
        torch.randn(batch, keys, kv_heads, 7),
        torch.randn(batch, keys, kv_heads, 5),
    )


def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    room: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp as flash-attn's kernel forms them, of one batch, in the dtype of q.

    With only later keys hidden it adds slope * column, else -slope * |row + S - T - column|. A side of the window is
    dropped if it is at least `room`: the keys of the call, the longest sequence's, or the slots of the cache.
    """
    queries, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    left, right = (-1 if side >= (room or keys) else side for side in window_size)
    right = 0 if causal else right
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2))
    scores = scores * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    rows, columns = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    slopes = slopes.to(q.dtype).expand(q.shape[0], -1)[:, :, None, None]
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    hidden |= (columns > rows + right) if right >= 0 else False
    hidden |= (columns < rows - left) if left >= 0 else False
    scores = scores + slopes * (columns if left < 0 and right == 0 else -(rows - columns).abs())
    scores = scores.masked_fill(hidden, -torch.inf)
    empty = hidden.all(1)
    weights = scores.softmax(-1).masked_fill(empty[:, None], 0.0)
    lse = torch.where(empty, torch.inf, scores.logsumexp(-1))
    return torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(group, 2)), lse


def assert_is_kernels(found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, **options) -> None:
    exact = kernel(q.double(), k.double(), v.double(), slopes.double(), **options)
    plain = kernel(q, k, v, slopes, **options)
    tolerance = torch.finfo(torch.float32).eps / 4
    assert_within_budget(found[0], exact[0], plain[0], "out", allowance=2 * tolerance * v.abs().max().item())
    assert_within_budget(found[1], exact[1], plain[1], "softmax_lse", allowance=2 * tolerance)


CALLS = [
    {"causal": True},
    {},
    {"causal": True, "window_size": (4, 0)},
    {"causal": True, "window_size": (4, 9)},
    {"window_size": (3, 2)},
    {"window_size": (-1, 0)},
    {"window_size": (2, -1)},
    {"causal": True, "window_size": (100, 3)},
    {"window_size": (-7, -1)},
    {"causal": True, "softcap": 0.8, "softmax_scale": 0.5},
]
