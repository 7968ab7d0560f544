# SPDX-License-Identifier: Apache-2.0
"""What the kernels are given, as named tuples: what a call does not have is None, and a kernel is compiled without it.

No kernel is imported here. A flat pointer comes with the strides that it is read by; the last dimension is dense.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...semantics import dropout, tokens
from ...semantics.problem import Operands, Problem


class Rows(NamedTuple):
    """A (B, heads, N, width) tensor."""

    data: Tensor
    strides: tuple[int, int, int]

    @staticmethod
    def of(tensor: Tensor) -> "Rows":
        """Copied only if its last dimension is strided."""
        dense = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
        return Rows(dense, (dense.stride(0), dense.stride(1), dense.stride(2)))


class Tokens(NamedTuple):
    """One side of a call, as `semantics.tokens.Tokens`: (b, N) each."""

    position: Tensor | None
    segment: Tensor | None
    rank: Tensor | None
    real: Tensor | None
    unbiased: Tensor | None
    strides: tuple[int, int, int, int, int]
    """From one batch item to the next, in that order; 0 where all share one."""
    first: int
    length: int

    @staticmethod
    def of(side: tokens.Tokens) -> "Tokens":
        """Flags become bytes."""
        given = tuple(map(_dense, (side.position, side.segment, side.rank, side.real, side.unbiased)))
        strides = tuple(0 if each is None or each.shape[0] == 1 else each.stride(0) for each in given)
        return Tokens._make((*given, strides, side.first, side.length))


def _dense(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    dense = tensor.contiguous()
    return dense.view(torch.uint8) if dense.dtype == torch.bool else dense


class Limits(NamedTuple):
    """How far a query sees."""

    left: int | None
    right: int | None
    sinks: int
    prefix: int | None
    """None: not causal."""

    @staticmethod
    def of(problem: Problem) -> "Limits":
        """0 where there are no sinks and no prefix."""
        options = problem.options
        return Limits(options.left, options.right, options.sinks, options.prefix if options.causal else None)


class Numbers(NamedTuple):
    """What becomes of a product on its way to a score, and of a weight on its way to the output."""

    scale: float
    """Multiplies the product: to a content, or to what tanh is taken of."""
    softcap: float | None
    share: float
    """What dropout multiplies the weights by that it keeps."""
    least: int
    """The least word of those it keeps."""
    inner: float
    """Multiplies gradients of products on their way to query and key."""

    @staticmethod
    def of(problem: Problem) -> "Numbers":
        """Of the call."""
        options, unit = problem.options, unit_of(problem)
        cap, p = options.softcap, options.dropout_p
        scale = options.scale * unit if cap is None else options.scale / cap
        return Numbers(scale, None if cap is None else cap * unit, 1 / (1 - p), dropout.threshold(p), options.scale)


class Visits(NamedTuple):
    """What each line of a table visits: strips of rows their key blocks, or key blocks their strips."""

    list: Tensor
    """(B, H, lines, entries), int16 or int32: those wholly visible from the front, the others from the back."""
    whole: Tensor
    """(B, H, lines) int32."""
    parts: Tensor
    """(B, H, lines) int32."""
    order: Tensor
    """(B * H * lines,) int32: the lines, longest first; (B * G * lines,) where the heads of a group go together."""
    lines: int
    entries: int
    each: tuple[int, int]
    """Kernel tiles a line, and an entry."""


class Found(NamedTuple):
    """Where forward puts its results; with shares of the keys, one behind the other."""

    out: Tensor | None
    lse: Tensor | None
    lse_low: Tensor | None
    top: Tensor | None
    sum: Tensor | None
    rows: int
    """B * H * T."""


class Saved(NamedTuple):
    """What backward finds of each row, (B, H, T) each but the gradient of the output."""

    grad: Rows
    high: Tensor
    """lse in units of scores; inf for rows that saw nothing."""
    low: Tensor
    """What `high` drops."""
    delta: Tensor
    """<gradient, output> less the gradient of the log-sum-exp."""


def unit_of(problem: Problem) -> float:
    """Of scores: half types count in log 2, whose exponential is one instruction; float32 keeps the last digit."""
    return 1.0 if problem.dtype == torch.float32 else math.log2(math.e)


def slopes_of(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(B, H) each, in units of scores: past and future."""
    shape, unit = (problem.batch, problem.heads), unit_of(problem)
    past = (operands.slopes * unit).expand(shape).contiguous()
    later = operands.future_slopes
    return past, past if later is None else (later * unit).expand(shape).contiguous()
