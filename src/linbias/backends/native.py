# SPDX-License-Identifier: Apache-2.0
"""Backend `native`: the C++ kernels of csrc/, on CPU.

This file turns one Problem into addresses, shapes and strides; the kernels do the rest. It copies nothing: any strides
are read where they are.
"""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..errors import BackendUnavailable
from ..semantics.problem import Gradients, Operands, Problem, Result

NAME = "native"
COMPOSITE = False

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
# Looked for, not loaded: asking why_not imports no kernel.
_BUILT = find_spec("linbias._native") is not None

_View = tuple[int, torch.Size, tuple[int, ...]]


def why_not(problem: Problem) -> str | None:
    """The reason this call cannot run here, or None."""
    if problem.device.type != "cpu":
        return f"runs on CPU tensors, got {problem.device.type!r}"
    if not _BUILT:
        return "its kernels were not built, for want of a working C++17 compiler; reinstall linbias with one"
    if problem.dtype not in _DTYPES:
        return f"supports float32, float64, bfloat16 and float16, got {problem.dtype}"
    if "transformed" in problem.features:
        return "functorch gradients and forward mode need the reference backend"
    return None


def forward(problem: Problem, operands: Operands) -> Result:
    """One pass over the visible tiles; see csrc/forward.h."""
    # Sizes one by one and no keywords: a small call costs little more than its four results.
    rows = (problem.batch, problem.heads, problem.queries)
    out = operands.query.new_empty(*rows, problem.value_dim)
    lse, skipped = operands.slopes.new_empty(*rows), operands.slopes.new_empty(*rows)
    computed = operands.query.new_empty(rows[:2], dtype=torch.int64)
    results = (out.data_ptr(), lse.data_ptr(), skipped.data_ptr(), computed.data_ptr())
    _kernels().forward(
        _environment(problem), problem.options, _views((*operands[:-1], None, None, operands[-1])), results
    )
    return Result(out, lse, torch.zeros_like(lse), skipped, computed)


def backward(
    problem: Problem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """Gradients in one pass of five products a tile, recomputed from the saved output and lse; see csrc/backward.h."""
    accumulator = problem.accumulator
    rows = (problem.batch, problem.heads)
    shapes = (operands.query.shape, operands.key.shape, operands.value.shape, rows, rows)
    dtypes = (problem.dtype,) * 3 + (accumulator,) * 2
    gradients = [
        torch.empty(shape, dtype=dtype, device="cpu") if need else None
        for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
    ]
    saved = _views((out, grad_out, lse, grad_lse))
    results = tuple(None if gradient is None else gradient.data_ptr() for gradient in gradients)
    _kernels().backward(
        _environment(problem), problem.options, _views((*operands[:-1], None, None, operands[-1])), saved, results
    )
    # Slopes that the batch shares sum what the items found.
    for place, slopes in ((3, operands.slopes), (4, operands.future_slopes)):
        gradient = gradients[place]
        if slopes is not None and gradient is not None and slopes.shape[0] == 1:
            gradients[place] = gradient.sum(0, keepdim=True)
    return Gradients(*gradients)


# What the tuples below hold; csrc/bindings.cpp counts along.
_INTERFACE = 2
# Which build of the kernels runs; "": the widest this processor has. Tests compare them all.
_variant = ""


@cache
def _kernels() -> ModuleType:
    from linbias import _native

    built = getattr(_native, "interface", 0)
    if built != _INTERFACE:
        raise BackendUnavailable(
            f"backend 'native' needs kernels of interface {_INTERFACE}, got {built}: they were built for other sources "
            f"of linbias; install it again (in a checkout: make setup), or pass backend='tiled'"
        )
    return _native


def _environment(problem: Problem) -> tuple[int, int, str]:
    return _DTYPES[problem.dtype], torch.get_num_threads(), _variant


def _views(tensors: Iterable[Tensor | None]) -> tuple[_View | None, ...]:
    return tuple([None if each is None else (each.data_ptr(), each.shape, each.stride()) for each in tensors])
