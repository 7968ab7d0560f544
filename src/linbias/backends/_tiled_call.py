# SPDX-License-Identifier: Apache-2.0
"""One call as the tiles need it: lanes for heads, the accumulating dtype, and contents that nobody sees removed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..semantics.blocks import token_positions
from ..semantics.problem import Operands, Problem


@dataclass(frozen=True)
class Call:
    """A lane is a (batch item, query head), L = B * H of them; a row of keys is a (batch item, kv head), K = B * G."""

    problem: Problem
    operands: Operands
    query: Tensor
    """(L, T, D)."""
    key: Tensor
    """(K, S, D)."""
    value: Tensor
    """(K, S, V)."""
    slopes: Tensor
    """(L,)."""
    future_slopes: Tensor | None
    """(L,)."""
    positions: tuple[Tensor, Tensor]
    """(b, T[, C]) and (b, S[, C])."""
    infinite: bool
    """Some slope is infinite."""

    @staticmethod
    def of(problem: Problem, operands: Operands) -> "Call":
        """Flatten heads and convert once; memory linear in the length."""
        dtype = problem.accumulator

        def lanes(slopes: Tensor) -> Tensor:
            return slopes.expand(problem.batch, problem.heads).flatten()

        given = [operands.slopes] if operands.future_slopes is None else [operands.slopes, operands.future_slopes]
        return Call(
            problem=problem,
            operands=operands,
            query=flat_heads(operands.query, dtype),
            key=flat_heads(operands.key, dtype),
            value=flat_heads(operands.value, dtype),
            slopes=lanes(operands.slopes),
            future_slopes=None if operands.future_slopes is None else lanes(operands.future_slopes),
            positions=token_positions(operands),
            infinite=any(bool(slopes.isinf().any()) for slopes in given),
        )

    def batch_of(self, lanes: tuple[int, ...]) -> slice | Tensor:
        """Which rows of a (b, ...) tensor these lanes read: one slice if they share a batch item."""
        items = [lane // self.problem.heads for lane in lanes]
        if items[0] == items[-1]:
            return slice(items[0], items[0] + 1)
        return torch.tensor(items, device=self.problem.device)

    def select(self, tensor: Tensor, lanes: tuple[int, ...]) -> Tensor:
        """Rows of a (b, ...) tensor for these lanes, (1 or n, ...)."""
        return tensor if tensor.shape[0] == 1 else tensor[self.batch_of(lanes)]


def flat_heads(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, heads, N, D) as (B * heads, N, D) in `dtype`, each row contiguous, as the fused kernel must have it."""
    flat = tensor.to(dtype).flatten(0, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def index(lanes: tuple[int, ...], device: torch.device) -> slice | Tensor:
    """Lanes as an index: a slice, which makes a view, where they are consecutive."""
    if lanes[-1] - lanes[0] == len(lanes) - 1:
        return slice(lanes[0], lanes[-1] + 1)
    return torch.tensor(lanes, device=device)


def kv_index(call: Call, lanes: tuple[int, ...]) -> slice | Tensor:
    """The rows of keys that these lanes read."""
    if call.problem.group == 1:
        return index(lanes, call.problem.device)
    return torch.tensor([lane // call.problem.group for lane in lanes], device=call.problem.device)


def batch_lanes(problem: Problem, item: int | None) -> tuple[int, ...]:
    """The lanes of one batch item; None: of all."""
    if item is None:
        return tuple(range(problem.batch * problem.heads))
    return tuple(range(item * problem.heads, (item + 1) * problem.heads))
