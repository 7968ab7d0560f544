# SPDX-License-Identifier: Apache-2.0
"""Attention with distances counted in the cache: sinks never move further away than the window is wide."""

import torch
from torch import Tensor

from ..attention import merge, run
from ..semantics.pages import spelled_out
from ..semantics.problem import Operands, Options, Problem, Result


def stream(operands: Operands, options: Options, backend: str) -> Result:
    """`attention.run` with the distance of query p to sink r capped: ``min(p - r, sinks + left - r)``.

    The first options.sinks keys are the sinks, at positions 0, 1, ...; window and positions are given. One query:
    the gap between sinks and window is closed by shifting its window. Several queries would need a shift each, so they
    attend to the sinks on their own, no query standing further than the cap, and the results are merged.
    """
    sinks, rows, keys = options.sinks, operands.query_positions, operands.key_positions
    assert rows is not None and keys is not None and options.left is not None
    cap = sinks + options.left
    is_sink = torch.arange(keys.shape[1], device=keys.device) < sinks
    if operands.query.shape[2] == 1:
        gap = (rows - cap).clamp_min(0)
        shifted = torch.where(is_sink, keys, keys - gap)
        return _run(operands._replace(query_positions=rows - gap, key_positions=shifted), options, backend)
    operands, options = spelled_out(operands, options)
    operands, dtype = _widened(operands), operands.query.dtype
    real = ~is_sink[None] if operands.key_mask is None else operands.key_mask & ~is_sink
    near = _run(operands._replace(key_mask=real, key_ranks=None), options._replace(sinks=0), backend)
    far = _run(_sinks_alone(operands, sinks, rows.clamp_max(cap)), _unwindowed(options), backend)
    merged = _merged(near, far)
    return merged._replace(out=merged.out.to(dtype))


def _widened(operands: Operands) -> Operands:
    """In the accumulating dtype, so that half types are rounded once, after the merge."""
    kind = torch.promote_types(operands.query.dtype, torch.float32)
    query, key, value = (tensor.to(kind) for tensor in (operands.query, operands.key, operands.value))
    return operands._replace(query=query, key=key, value=value)


def _run(operands: Operands, options: Options, backend: str) -> Result:
    return run(Problem.of(operands, options), operands, backend)


def _unwindowed(options: Options) -> Options:
    return options._replace(left=None, right=None, sinks=0, bounds_block=0)


def _sinks_alone(operands: Operands, sinks: int, rows: Tensor) -> Operands:
    """The same call on the sinks, which no window hides."""

    def first(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[..., :sinks]

    return operands._replace(
        key=operands.key[:, :, :sinks],
        value=operands.value[:, :, :sinks],
        query_positions=rows,
        key_positions=first(operands.key_positions),
        key_mask=first(operands.key_mask),
        attn_mask=None
        if operands.attn_mask is None
        else operands.attn_mask.expand(-1, -1, -1, operands.key.shape[2])[..., :sinks],
        key_ranks=None,
        key_unbiased=first(operands.key_unbiased),
        bound_norms=None,
    )


def _merged(a: Result, b: Result) -> Result:
    out, lse = merge(a.out, a.lse, b.out, b.lse)
    some = lse > -torch.inf
    shares = [torch.where(some, (part.lse - lse).exp() * part.skipped, 0.0) for part in (a, b)]
    low = torch.zeros_like(lse)
    return Result(out=out, lse=lse, lse_low=low, skipped=shares[0] + shares[1], computed=a.computed + b.computed)
