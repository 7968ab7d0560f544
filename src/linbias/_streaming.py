# SPDX-License-Identifier: Apache-2.0
"""Attention with distances counted in the cache: sinks never move further away than the window is wide."""

import torch
from torch import Tensor

from . import attention
from .prepare import Request
from .semantics.problem import Result


def stream(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, request: Request, backend: str) -> Result:
    """`attention.attend` with the distance of query p to sink r capped: ``min(p - r, sinks + left - r)``.

    The first request.sinks keys are the sinks, at positions 0, 1, ...; request.window and both positions are given. One
    query: the gap between sinks and window is closed by shifting its window. Several queries would need a shift each,
    so they attend to the sinks on their own, no query standing further than the cap, and the results are merged.
    """
    sinks, rows, keys, window = request.sinks, request.query_positions, request.key_positions, request.window
    assert rows is not None and keys is not None and window is not None and window[0] is not None
    cap = sinks + window[0]
    is_sink = torch.arange(key.shape[2], device=key.device) < sinks
    if query.shape[2] == 1:
        gap = (rows - cap).clamp_min(0)
        request = request._replace(query_positions=rows - gap, key_positions=torch.where(is_sink, keys, keys - gap))
        return attention.attend(query, key, value, slopes, request, backend)
    real = ~is_sink[None] if request.key_mask is None else request.key_mask & ~is_sink
    near = attention.attend(query, key, value, slopes, request._replace(key_mask=real, sinks=0), backend)
    far = attention.attend(
        query,
        key[:, :, :sinks],
        value[:, :, :sinks],
        slopes,
        _sinks_alone(request, sinks, rows.clamp_max(cap)),
        backend,
    )
    return _merged(near, far)


def _sinks_alone(request: Request, sinks: int, rows: Tensor) -> Request:
    """The same call on the sinks, which no window hides."""

    def first(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[..., :sinks]

    marks = request.unbiased_marks
    return request._replace(
        window=None,
        sinks=0,
        query_positions=rows,
        key_positions=first(request.key_positions),
        key_mask=first(request.key_mask),
        attn_mask=first(request.attn_mask),
        unbiased_marks=None if marks is None else (marks[0], marks[1][..., :sinks]),
        key_bounds=None,
    )


def _merged(a: Result, b: Result) -> Result:
    out, lse = attention.merge(a.out, a.lse, b.out, b.lse)
    some = lse > -torch.inf
    shares = [torch.where(some, (part.lse - lse).exp() * part.skipped, 0.0) for part in (a, b)]
    return Result(
        out=out, lse=lse, lse_low=torch.zeros_like(lse), skipped=shares[0] + shares[1], computed=a.computed + b.computed
    )
