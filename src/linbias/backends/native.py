# SPDX-License-Identifier: Apache-2.0
"""Backend `native`: the C++ kernels of csrc/, on CPU.

This file turns one Problem into addresses, shapes and strides; the kernels do the rest. It copies nothing: any strides
are read where they are.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from ..problem import Gradients, Operands, Problem, Result

NAME = "native"
COMPOSITE = False

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# Looked for, not loaded: asking why_not imports no kernel.
_BUILT = find_spec("linbias._native") is not None
_METRICS = {None: 0, "euclidean": 1, "manhattan": 2}

_View = tuple[int, torch.Size, tuple[int, ...]]


def why_not(problem: Problem) -> str | None:
    """The reason this call cannot run here, or None."""
    if problem.device.type != "cpu":
        return f"runs on CPU tensors, got {problem.device.type!r}"
    if not _BUILT:
        return "its kernels were not built, for want of a working C++17 compiler; reinstall linbias with one"
    if problem.dtype not in _DTYPES:
        return f"supports float32, float64, bfloat16 and float16, got {problem.dtype}"
    if problem.transformed:
        return "functorch gradients and forward mode need the reference backend"
    return None


def forward(problem: Problem, operands: Operands) -> Result:
    """One pass over the visible tiles; see csrc/forward.h."""
    from linbias import _native

    batch, heads, queries, accumulator = problem.batch, problem.heads, problem.queries, problem.accumulator
    out = torch.empty((batch, heads, queries, problem.value_dim), dtype=problem.dtype, device="cpu")
    lse = torch.empty((batch, heads, queries), dtype=accumulator, device="cpu")
    skipped = torch.empty((batch, heads, queries), dtype=accumulator, device="cpu")
    computed = torch.zeros((batch, heads), dtype=torch.int64, device="cpu")
    results = (out.data_ptr(), lse.data_ptr(), skipped.data_ptr(), computed.data_ptr())
    _native.forward(_sizes(problem, operands), _numbers(problem), _views(operands), results, _variant)
    return Result(out, lse, skipped, computed)


def backward(
    problem: Problem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """Gradients in one pass of five products a tile, recomputed from the saved output and lse; see csrc/backward.h."""
    from linbias import _native

    accumulator = problem.accumulator
    rows = (problem.batch, problem.heads)
    shapes = (operands.query.shape, operands.key.shape, operands.value.shape, rows, rows)
    dtypes = (problem.dtype,) * 3 + (accumulator,) * 2
    gradients = [
        torch.empty(shape, dtype=dtype, device="cpu") if need else None
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    ]
    saved = (_view(out), _view(grad_out), _view(lse), _view(grad_lse))
    results = tuple(None if gradient is None else gradient.data_ptr() for gradient in gradients)
    _native.backward(_sizes(problem, operands), _numbers(problem), _views(operands), saved, results, _variant)
    # Slopes that the batch shares sum what the items found.
    for place, slopes in ((3, operands.slopes), (4, operands.future_slopes)):
        gradient = gradients[place]
        if slopes is not None and gradient is not None and slopes.shape[0] == 1:
            gradients[place] = gradient.sum(0, keepdim=True)
    return Gradients(*gradients)


# Which build of the kernels runs; "": the widest this processor has. Tests compare them all.
_variant = ""


def _sizes(problem: Problem, operands: Operands) -> tuple[int, ...]:
    positions = operands.query_positions
    return (
        _DTYPES[problem.dtype],
        problem.batch,
        problem.heads,
        problem.kv_heads,
        problem.queries,
        problem.keys,
        problem.head_dim,
        problem.value_dim,
        positions.shape[-1] if positions is not None and problem.options.metric is not None else 0,
        torch.get_num_threads(),
    )


def _numbers(problem: Problem) -> tuple[bool | int | float | None, ...]:
    options = problem.options
    return (
        options.causal,
        options.left,
        options.right,
        options.sinks,
        options.prefix,
        _METRICS[options.metric],
        options.scale,
        options.softcap,
        options.dropout_p,
        options.tolerance,
        options.bounds_block,
    )


def _view(tensor: Tensor | None) -> _View | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride())


def _views(operands: Operands) -> tuple[_View | None, ...]:
    return (
        _view(operands.query),
        _view(operands.key),
        _view(operands.value),
        _view(operands.slopes),
        _view(operands.future_slopes),
        _view(operands.query_positions),
        _view(operands.key_positions),
        _view(operands.query_segments),
        _view(operands.key_segments),
        _view(operands.key_mask),
        _view(operands.attn_mask),
        _view(operands.key_ranks),
        _view(operands.query_unbiased),
        _view(operands.key_unbiased),
        _view(operands.bound_norms),
        _view(operands.seed),
    )
