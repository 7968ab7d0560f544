# SPDX-License-Identifier: Apache-2.0
"""From a table of visits to pieces of work: rectangles for the plain engine, bands for the fused one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from .._ledger import Visits
from ..semantics.problem import Problem

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Rectangle:
    """Rows x keys that several lanes compute together; a lane is a (batch item, query head)."""

    lanes: tuple[int, ...]
    rows: slice
    runs: Runs
    """Ranges of keys, ascending, disjoint."""
    whole: bool = True
    """No other rectangle holds keys of these rows."""

    @property
    def width(self) -> int:
        """Keys in all runs."""
        return sum(last - first for first, last in self.runs)


def rectangles(problem: Problem, visits: Visits, rows: int, round_to: int) -> Iterator[Rectangle]:
    """The table's visits in tiles of about `rows` rows, lanes that visit the same keys together.

    `round_to` blocks are visited together or not at all, so that more lanes agree: worth it where launching work costs
    more than the work.
    """
    strips = max(1, rows // visits.strip)
    step = strips * visits.strip
    together: dict[tuple[int, Runs], list[int]] = {}
    for lane, tile, runs in _runs(_coarse(_coarse(visits.table, 1, strips), 2, round_to)):
        edges = tuple(
            (first * round_to * visits.block, min(last * round_to * visits.block, problem.keys)) for first, last in runs
        )
        together.setdefault((tile, edges), []).append(lane)
    for (tile, edges), lanes in together.items():
        yield Rectangle(tuple(lanes), slice(tile * step, min((tile + 1) * step, problem.queries)), edges)


def _coarse(table: Tensor, dim: int, factor: int) -> Tensor:
    """`factor` neighbours along `dim` as one, visited if any of them is."""
    if factor == 1:
        return table
    missing = -table.shape[dim] % factor
    if missing:
        shape = list(table.shape)
        shape[dim] = missing
        table = torch.cat([table, table.new_zeros(shape)], dim)
    return table.unflatten(dim, (-1, factor)).any(dim + 1)


def _runs(table: Tensor) -> Iterator[tuple[int, int, Runs]]:
    """(lane, row of the table, its runs of True as half-open ranges), where there are any, in order."""
    edge = table.new_zeros((*table.shape[:2], 1))
    padded = torch.cat([edge, table, edge], dim=2)
    starts = (padded[..., 1:] & ~padded[..., :-1]).nonzero().tolist()
    ends = (padded[..., :-1] & ~padded[..., 1:]).nonzero()[:, 2].tolist()
    edges = [(lane, row, first, last) for (lane, row, first), last in zip(starts, ends, strict=True)]
    for (lane, row), found in groupby(edges, key=lambda each: each[:2]):
        yield lane, row, tuple((first, last) for _, _, first, last in found)


@dataclass(frozen=True)
class Band:
    """`count` tiles of `rows` rows, each seeing `span` keys that move along with it, or stand still for one tile."""

    first_row: int
    count: int
    rows: int
    first_key: int
    span: int

    @property
    def last_row(self) -> int:
        """One past the band's rows."""
        return self.first_row + self.count * self.rows


@dataclass(frozen=True)
class _Tile:
    """Rows first to last, and how many keys before the first row's and after the last row's position they need."""

    first: int
    last: int
    before: int
    after: int
    long: bool = False

    def joined(self, after: "_Tile", *, long: bool) -> "_Tile":
        """This tile and the one that follows as one."""
        shift, grown = after.first - self.first, after.last - self.last
        before, behind = max(self.before, after.before - shift), max(self.after - grown, after.after)
        return _Tile(self.first, after.last, before, behind, long)


@dataclass(frozen=True)
class Bands:
    """The whole work of a pass by bands, for default positions."""

    near: dict[Band, list[int]]
    """Bands and the lanes that share them; each row is in at most one near band of its lane."""
    far: dict[Band, list[int]]
    """What lies apart from the near keys, as a sink does."""

    def pairs(self, lanes: int) -> list[int]:
        """Pairs computed by each lane."""
        counts = [0] * lanes
        for band, sharing in (*self.near.items(), *self.far.items()):
            for lane in sharing:
                counts[lane] += band.count * band.rows * band.span
        return counts


_WASTE = 1.06
"""A band may compute this many times the pairs its tiles asked for."""
_LONG = 1536
"""From this many keys on, taller tiles run at a better rate than they lose by covering more."""
_TALL = 256


def bands(problem: Problem, visits: Visits) -> Bands:
    """Group the table's visits: nearest run of each strip into bands, other runs into rectangles of their own."""
    offset = problem.keys - problem.queries
    near: dict[Band, list[int]] = {}
    far: dict[Band, list[int]] = {}
    for lane, found in groupby(_runs(visits.table), key=lambda each: each[0]):
        tiles: list[_Tile] = []
        apart: list[tuple[int, int, int, int]] = []
        for _, strip, runs in found:
            rows = (strip * visits.strip, min((strip + 1) * visits.strip, problem.queries))
            clipped = [_clip(problem, rows, run, visits.block) for run in runs]
            home = min(clipped, key=lambda run: max(run[0] - rows[0] - offset, rows[0] + offset - run[1] + 1, 0))
            tiles.append(_Tile(*rows, rows[0] + offset - home[0], home[1] - rows[1] - offset))
            apart += [(*rows, *run) for run in clipped if run is not home]
        for band in _merge(problem, _taller(problem, tiles)):
            near.setdefault(band, []).append(lane)
        for band in _stack(apart):
            far.setdefault(band, []).append(lane)
    return Bands(near, far)


def _clip(problem: Problem, rows: tuple[int, int], run: tuple[int, int], block: int) -> tuple[int, int]:
    """The keys of a run of blocks that some row can see: what no row sees must not even be loaded."""
    options, offset = problem.options, problem.keys - problem.queries
    first, last = run[0] * block, min(run[1] * block, problem.keys)
    right = 0 if options.causal else options.right
    if options.left is not None:
        first = max(first, rows[0] + offset - options.left)
    if right is not None:
        last = min(last, rows[1] + offset + right)
    return first, last


def _taller(problem: Problem, tiles: list[_Tile]) -> list[_Tile]:
    """Join neighbouring strips up to `_TALL` rows: those of long rows, and those no band can hold, for they start at
    the first key and each would be a call of its own.
    """
    offset = problem.keys - problem.queries
    joined: list[_Tile] = []
    for tile in tiles:
        last = joined[-1] if joined else None
        alone = tile.before == tile.first + offset
        long = tile.before + tile.after >= _LONG
        if (
            last is not None
            and last.last == tile.first
            and tile.last - last.first <= _TALL
            and ((alone and last.before == last.first + offset) or (long and last.long))
        ):
            joined[-1] = last.joined(tile, long=long)
        else:
            joined.append(replace(tile, long=long))
    return joined


def _merge(problem: Problem, tiles: list[_Tile]) -> Iterator[Band]:
    """Runs of neighbouring tiles of one height as one band, as wide as the widest, while that wastes little."""
    offset = problem.keys - problem.queries
    start = 0
    while start < len(tiles):
        first = tiles[start]
        height = first.last - first.first
        before, after, asked, end = first.before, first.after, 0, start
        while end < len(tiles):
            tile = tiles[end]
            wide = (max(before, tile.before), max(after, tile.after))
            total = asked + height + tile.before + tile.after
            count = end - start + 1
            if (
                tile.last - tile.first != height
                or tile.first != first.first + (end - start) * height
                or count * (height + wide[0] + wide[1]) > _WASTE * total
                or wide[0] > first.first + offset
                or tile.last + offset + wide[1] > problem.keys
            ):
                break
            before, after, asked, end = *wide, total, end + 1
        yield Band(first.first, end - start, height, first.first + offset - before, before + height + after)
        start = end


def _stack(apart: list[tuple[int, int, int, int]]) -> Iterator[Band]:
    """Neighbouring strips that visit the same keys, as one tall tile each."""
    by_keys = sorted(apart, key=lambda each: (each[2:], each[0]))
    open_band: list[int] | None = None
    for first, last, first_key, last_key in by_keys:
        if open_band is not None and open_band[1:] == [first, first_key, last_key]:
            open_band[1] = last
            continue
        if open_band is not None:
            yield _still(open_band)
        open_band = [first, last, first_key, last_key]
    if open_band is not None:
        yield _still(open_band)


def _still(edges: list[int]) -> Band:
    first, last, first_key, last_key = edges
    return Band(first, 1, last - first, first_key, last_key - first_key)
