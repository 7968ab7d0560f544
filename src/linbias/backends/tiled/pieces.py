# SPDX-License-Identifier: Apache-2.0
"""A pass in pieces: tiles of one size that are computed together, and where their rows and keys lie.

Heads and tokens are flattened, so that a tile's rows, and its keys, are one stretch of a (BH * T, ...) or (K * S, ...)
tensor; where the stretches of a piece start at even intervals they are a view, and nothing is copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...semantics.problem import Operands, Problem
from ...semantics.tokens import Tokens
from .ledger import Visits
from .table import both_slopes, steepest


def wide(device: torch.device) -> torch.dtype:
    """The dtype of a row's numbers and of long sums."""
    return torch.float32 if device.type == "mps" else torch.float64


_FEW = 16
"""Stretches below it are added row by row: there may be many thousand, as of a decode step of a large batch."""


@dataclass(frozen=True)
class Stretches:
    """n stretches of consecutive rows of a (R, ...) tensor, (n, length, ...)."""

    starts: Tensor
    """(n,), on the host."""
    length: int
    step: int | None
    """From each start to the next; None: not even, so that a stretch has to be copied."""

    @staticmethod
    def of(starts: Tensor, length: int) -> "Stretches":
        """See whether the starts are evenly spaced."""
        steps = starts.diff()
        step = int(steps[0]) if len(steps) else 0
        return Stretches(starts, length, step if step >= 0 and bool((steps == step).all()) else None)

    def take(self, tensor: Tensor) -> Tensor:
        """A view where the spacing is even, else a copy."""
        if self.step is None:
            return tensor.index_select(0, self._index(tensor)).unflatten(0, (-1, self.length))
        row = tensor.stride(0)
        sizes, strides = (len(self.starts), self.length, *tensor.shape[1:]), (self.step * row, *tensor.stride())
        return tensor.as_strided(sizes, strides, tensor.storage_offset() + int(self.starts[0]) * row)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write back what was taken and changed in place; stretches that do not overlap."""
        if self.step is None:
            tensor.index_copy_(0, self._index(tensor), values.flatten(0, 1))

    def add(self, tensor: Tensor, values: Tensor) -> None:
        """Add to stretches; those that may overlap one after the other, so that the order is always the same."""
        if self.step is not None and self.step >= self.length:
            self.take(tensor).add_(values)
            return
        if tensor.device.type == "cpu" and self.length < _FEW:
            tensor.index_add_(0, self._index(tensor), values.flatten(0, 1))
            return
        for start, part in zip(self.starts.tolist(), values, strict=True):
            tensor[start : start + self.length] += part

    def _index(self, tensor: Tensor) -> Tensor:
        return (self.starts[:, None] + torch.arange(self.length, device="cpu")).flatten().to(tensor.device)


@dataclass(frozen=True)
class Piece:
    """n tiles of one size, which are computed together. No row of a head is in two of them."""

    bh: Tensor
    """(n,), on the host."""
    row: Tensor
    """(n,), on the host: the first row of each."""
    key: Tensor
    """(n,), on the host: the first key of each."""
    height: int
    width: int
    side: int
    """`ANY`, `PAST` or `FUTURE`."""


def pieces_of(problem: Problem, visits: Visits) -> Iterator[Piece]:
    """The visits in tiles of a strip by a run of blocks of one side, as many together as the memory set aside allows.

    On a CPU a piece's scores stay in its caches.
    """
    budget = 1 << 19 if problem.device.type == "cpu" else 1 << 24
    bh, strip, first, last, side = _runs(torch.where(visits.table, visits.sides, 0))
    if len(bh) == 0:
        return
    start, stop = first * visits.block, (last * visits.block).clamp_max(problem.keys)
    longest = max(1, budget // visits.strip)
    parts = (stop - start + longest - 1) // longest
    bh, strip, start, stop, side = (each.repeat_interleave(parts) for each in (bh, strip, start, stop, side))
    start = start + longest * _ordinal(torch.arange(len(parts), device=parts.device).repeat_interleave(parts))
    width = (stop - start).clamp_max(longest)
    height = (problem.queries - strip * visits.strip).clamp_max(visits.strip)
    # The runs of one row of a head go to different pieces, because each merges into what the others left.
    turn = _ordinal(bh * visits.table.shape[1] + strip)
    _, kind = kinds_of(height, width, side, turn)
    for alike in kind.argsort(stable=True).split(kind.bincount().tolist()):
        size = int(height[alike[0]]), int(width[alike[0]]), int(side[alike[0]])
        for some in alike.split(max(1, budget // (size[0] * size[1]))):
            yield Piece(bh[some], strip[some] * visits.strip, start[some], *size)


def kinds_of(*columns: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows of integers (n,) each: one row of each kind by number, and the kind of every row."""
    code = torch.zeros_like(columns[0])
    for column in columns:
        low, high = column.aminmax()
        code = code * (high - low + 1) + (column - low)
    kinds, kind = code.unique(return_inverse=True)
    return torch.empty_like(kinds).scatter_(0, kind, torch.arange(len(kind), device=kind.device)), kind


def _ordinal(groups: Tensor) -> Tensor:
    """How many neighbours before it each entry shares its value with; equal values are neighbours."""
    index = torch.arange(len(groups), device=groups.device)
    changed = torch.ones_like(groups, dtype=torch.bool)
    changed[1:] = groups[1:] != groups[:-1]
    return index - torch.where(changed, index, 0).cummax(0).values


def _runs(table: Tensor) -> tuple[Tensor, ...]:
    """Of each run of one side: bh, row of the table, first and one past the last block, side; in that order."""
    edge = table.new_zeros((*table.shape[:2], 1))
    padded = torch.cat([edge, table, edge], dim=2)
    change = padded[..., 1:] != padded[..., :-1]
    starts = change[..., :-1] & (table != 0)
    bh, row, first = starts.nonzero().unbind(1)
    last = (change & (padded[..., :-1] != 0)).nonzero()[:, 2]
    return bh, row, first, last, table[starts].long()


@dataclass(frozen=True)
class Call:
    """One call as the tiles need it: heads and tokens flattened, in the accumulating dtype. K = B * G key heads."""

    problem: Problem
    operands: Operands
    query: Tensor
    """(BH * T, D), times scale: a scale of 0 must not hide a NaN, which a product's own factor of 0 does."""
    key: Tensor
    """(K * S, D)."""
    value: Tensor
    """(K * S, V)."""
    slopes: Tensor
    """(2, BH): past and future."""
    tokens: tuple[Tokens, Tokens]
    """Queries and keys."""
    infinite: bool
    """Some slope is infinite, NaN, or so steep that a bias may be infinite."""

    @staticmethod
    def of(problem: Problem, operands: Operands) -> "Call":
        """Flatten and convert once; memory linear in the length."""
        slopes = torch.stack(both_slopes(problem, operands))
        return Call(
            problem=problem,
            operands=operands,
            query=flat(operands.query, problem.accumulator) * problem.options.scale,
            key=flat(operands.key, problem.accumulator),
            value=flat(operands.value, problem.accumulator),
            slopes=slopes.to(problem.accumulator).to(problem.device),
            tokens=(Tokens.queries_of(operands), Tokens.keys_of(operands)),
            infinite=not bool((slopes.abs() <= steepest(problem)).all()),
        )

    @property
    def rows(self) -> int:
        """BH * T."""
        return self.query.shape[0]

    def rows_of(self, piece: Piece) -> Stretches:
        """The piece's rows in (BH * T, ...)."""
        return Stretches.of(piece.bh * self.problem.queries + piece.row, piece.height)

    def keys_of(self, piece: Piece) -> Stretches:
        """Its keys in (K * S, ...)."""
        return Stretches.of(piece.bh // self.problem.group * self.problem.keys + piece.key, piece.width)

    def tokens_of(self, piece: Piece) -> tuple[Tokens, Tokens]:
        """Queries (n, M) and keys (n, N) of each tile."""
        device = self.problem.device
        items, row, key = ((piece.bh // self.problem.heads).to(device), piece.row.to(device), piece.key.to(device))
        queries, keys = self.tokens
        return queries.stretches(items, row, piece.height), keys.stretches(items, key, piece.width)

    def slopes_of(self, piece: Piece, side: int) -> Tensor:
        """(n, 1, 1): past (0) or future (1)."""
        return self.slopes[side, piece.bh.to(self.slopes.device), None, None]


def flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, heads, N, D) as (B * heads * N, D) in `dtype`, rows contiguous."""
    rows = tensor.to(dtype).flatten(0, 2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
