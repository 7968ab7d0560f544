# SPDX-License-Identifier: Apache-2.0
"""The bound of `reach` for every strip of rows and block of keys at once.

Row i bounds a block of norm rho by ``c_i rho - log Z_i - m (offset_i + gap)``, with c_i = |scale| |q_i|: linear in rho.
The largest of the rows' bounds, and the log of the sum of their exponentials, are therefore convex in rho, and lie
below the chord between their values at the smallest and the largest norm of the head. So two numbers a strip and side
stand for all its rows: the table costs O(1) an entry without giving up what single rows would allow.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .semantics._boxes import Boxes, Gaps, gaps, host, in_tiles, maybe_visible, real_keys
from .semantics.blocks import token_positions
from .semantics.bounds import tail_log, upper_norms
from .semantics.problem import Operands, Problem

STRIP = 64
"""Rows judged together, and keys a block unless the caller's bounds say otherwise."""
_TABLE = 1 << 22
"""Most strip x block entries a head: beyond it, tiles are doubled into superblocks."""
_CHUNK = 1 << 21
"""Table entries held at once."""
_SHORT = 16
"""With fewer queries, reading all keys for their norms costs as much as attending to them."""


def table_sizes(problem: Problem) -> tuple[int, int]:
    """(rows a strip, keys a block) of the table, coarse enough for its cap."""
    given = problem.options.bounds_block or STRIP
    strip, block = STRIP, given * max(1, STRIP // given)
    while math.ceil(problem.queries / strip) * math.ceil(problem.keys / block) > _TABLE:
        strip, block = 2 * strip, 2 * block
    return strip, block


@dataclass(frozen=True)
class Keys:
    """The keys of a call by blocks, on the host."""

    boxes: Boxes
    count: Tensor
    """(b, J) fp64: real keys a block."""
    norms: Tensor
    """(B, G, J) fp64: largest norm of a real key; inf where nobody asked or gave it."""

    @staticmethod
    def of(problem: Problem, operands: Operands) -> "Keys":
        """Summarise the keys of a call."""
        block = table_sizes(problem)[1]
        real = real_keys(operands)
        pool = block // (problem.options.bounds_block or block)
        count = in_tiles(host(real), block, 0.0).sum(-1)
        if operands.bound_norms is not None:
            norms = in_tiles(host(operands.bound_norms).flatten(0, 1), pool, 0.0).amax(-1)
        elif problem.queries < _SHORT:
            norms = count.new_full((problem.batch * problem.kv_heads, count.shape[1]), math.inf)
        else:
            each = torch.where(real[:, None], upper_norms(operands.key), 0.0)
            norms = host(in_tiles(each.flatten(0, 1), block, 0.0).amax(-1))
        return Keys(
            boxes=Boxes.of_keys(operands, block),
            count=count,
            norms=norms.unflatten(0, (problem.batch, problem.kv_heads)),
        )


@dataclass(frozen=True)
class Judge:
    """The bounds of one call. A lane is a (batch item, query head); tables are (lanes, I, J), on the host, in fp64.

    Sides: 0 for tiles that straddle, hold tokens without bias, or have no side; 1 for the past; 2 for the future.
    """

    problem: Problem
    keys: Keys
    strip: int
    near: Gaps
    possible: Tensor
    """(b, h, I, J) bool: what may be visible."""
    slopes: Tensor
    """(3, L): the smaller one, past, future."""
    content: Tensor
    """(L, T): c_i."""
    base: Tensor
    """(3 or 2, L, T): -log Z_i - m offset_i, the bound without content; 2 sides where no future tile is visible."""

    @staticmethod
    def of(problem: Problem, operands: Operands, keys: Keys, norms: Tensor, mass: Tensor) -> "Judge":
        """Prepare: `norms` (B, H, T) of the queries, `mass` (B, H, T) a lower bound of log Z."""
        strip = table_sizes(problem)[0]
        rows = Boxes.of_queries(operands, strip)
        log_mass = host(mass).flatten(0, 1)
        # A row without weight (mass inf) counts for nothing, whatever its query holds.
        content = torch.where(log_mass == math.inf, 0.0, host(norms).flatten(0, 1) * abs(problem.options.scale))
        past = _lane_slopes(problem, operands.slopes)
        future = past if operands.future_slopes is None else _lane_slopes(problem, operands.future_slopes)
        offsets = _offsets(problem, operands, rows)
        base = [-log_mass, *(-log_mass - _product(m[:, None], d) for m, d in zip((past, future), offsets, strict=True))]
        near = gaps(rows, keys.boxes, problem.options.metric)
        possible = maybe_visible(problem.options, operands.attn_mask, rows, keys.boxes)
        # Most calls look one way, and need not evaluate the other.
        ahead = bool((near.future & possible.any(1)).any())
        return Judge(
            problem=problem,
            keys=keys,
            strip=strip,
            near=near,
            possible=possible,
            slopes=torch.stack([torch.minimum(past, future), past, future]),
            content=content,
            base=torch.stack(base if ahead else base[:2]),
        )

    def chunks(self) -> Iterator[Tensor]:
        """Lanes by index, as many at once as the memory set aside for tables allows."""
        step = max(1, _CHUNK // max(1, self.possible.shape[2] * self.possible.shape[3]))
        return iter(torch.arange(self.problem.batch * self.problem.heads, device="cpu").split(step))

    def seen(self, lanes: Tensor) -> Tensor:
        """Bool table: what may be visible."""
        if self.possible.shape[1] == 1:
            return self._of(self.possible.squeeze(1), lanes).expand(len(lanes), -1, -1)
        batch, head = lanes // self.problem.heads, lanes % self.problem.heads
        return self.possible[batch % self.possible.shape[0], head]

    def row_bounds(self, lanes: Tensor) -> Tensor:
        """log of the largest share, over the strip's rows, that the whole block can weigh."""
        bound = self._bounds(lanes, lambda values: values.amax(-1))
        return bound + self._log_count(lanes)

    def key_bounds(self, lanes: Tensor) -> Tensor:
        """log of the sum, over the strip's rows, of the share that a single key of the block can weigh."""
        return self._bounds(lanes, lambda values: values.logsumexp(-1))

    def stretch(self, lanes: Tensor) -> Tensor:
        """log(1 + m d) at the largest distance of the tile: how much a slope's gradient magnifies its weights.

        A slope of 0 counts as 1, for its gradient too takes the distance.
        """
        steepest = self.slopes[1:, lanes].amax(0).clamp_min(0)
        steepest = torch.where(steepest == 0, 1.0, steepest)[:, None, None]
        return torch.log1p(_product(steepest, self._of(self.near.far, lanes)))

    def _of(self, table: Tensor, lanes: Tensor) -> Tensor:
        """Rows of a (b, I, J) table for each lane."""
        return table if table.shape[0] == 1 else table[lanes // self.problem.heads]

    def _kv(self, table: Tensor, lanes: Tensor) -> Tensor:
        """Rows of a (B, G, ...) table for each lane."""
        return table.flatten(0, 1)[lanes // self.problem.group]

    def _choose(self, lanes: Tensor, sides: list[Tensor]) -> Tensor:
        """Of the values for unknown, past and future side, each tile's own."""
        chosen = torch.where(self._of(self.near.past, lanes), sides[1], sides[0])
        return torch.where(self._of(self.near.future, lanes), sides[2], chosen) if len(self.base) > 2 else chosen

    def _bounds(self, lanes: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """The bound of one key at the block's largest norm, over the strip's rows as `combine` puts them together."""
        norms = self._kv(self.keys.norms, lanes)
        content, base = self.content[lanes], self.base[:, lanes]
        finite = norms.isfinite()
        low = torch.where(finite, norms, math.inf).amin(-1)
        high = torch.where(finite, norms, -math.inf).amax(-1)
        ends = [combine(_strips(content * end[:, None] + base, self.strip)) for end in (low, high)]
        part = torch.where(high > low, (norms.T - low) / (high - low), 0.0).T.unsqueeze(1)
        part = torch.where(finite.unsqueeze(1), part, math.nan)
        start, step = ends[0].unsqueeze(-1), torch.where(ends[0] == ends[1], 0.0, ends[1] - ends[0]).unsqueeze(-1)
        sides = [start[side] + step[side] * part for side in range(len(base))]
        if self.problem.options.softcap is not None:
            steepest = _strips(content, self.strip, 0.0).amax(-1).unsqueeze(-1)
            capped = _cap(steepest * norms.unsqueeze(1), self.problem.options.softcap)
            alone = combine(_strips(base, self.strip)).unsqueeze(-1)
            sides = [torch.minimum(side, alone[index] + capped) for index, side in enumerate(sides)]
        return self._choose(lanes, sides) - self._penalty(lanes)

    def _penalty(self, lanes: Tensor) -> Tensor:
        """slope x nearest distance; -inf where a slope of the tile is negative, so that it is never skipped."""
        near, slopes = self._of(self.near.near, lanes), self.slopes[: len(self.base), lanes, None, None]
        return self._choose(lanes, [torch.where(m < 0, -math.inf, _product(m, near)) for m in slopes])

    def _log_count(self, lanes: Tensor) -> Tensor:
        """log gamma: how many times the nearest key's bound the whole block can weigh."""
        count = self._of(self.keys.count.unsqueeze(1), lanes)
        plain = count.log()
        if "query_positions" in self.problem.features:
            return plain
        slopes = self.slopes[1 : len(self.base), lanes, None, None]
        decayed = [torch.log(-torch.expm1(-m * count)) - tail_log(m) for m in slopes]
        decayed = [torch.where(m > 0, value, plain) for m, value in zip(slopes, decayed, strict=True)]
        return self._choose(lanes, [plain, *decayed])


def _cap(content: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(content / softcap) * (1 + 1e-12)


def _strips(values: Tensor, strip: int, fill: float = -math.inf) -> Tensor:
    """(..., T) as (..., I, strip); rows beyond T weigh nothing."""
    shape = values.shape[:-1]
    return in_tiles(values.reshape(-1, values.shape[-1]), strip, fill).unflatten(0, shape)


def _product(slope: Tensor, distance: Tensor) -> Tensor:
    """slope x distance, 0 at distance 0 even for slope inf."""
    return torch.where(distance == 0, 0.0, slope * distance)


def _lane_slopes(problem: Problem, slopes: Tensor) -> Tensor:
    """(b, H) slopes as (L,)."""
    return host(slopes).expand(problem.batch, problem.heads).flatten()


def _offsets(problem: Problem, operands: Operands, rows: Boxes) -> tuple[Tensor, Tensor]:
    """(L or 1, T) each: how much further a row is from keys of its past, and of its future, than its strip's box."""
    if problem.options.metric is not None:
        zeros = torch.zeros((1, problem.queries), dtype=torch.float64, device="cpu")
        return zeros, zeros
    places = host(token_positions(operands)[0])
    low, high = (edge[..., 0].repeat_interleave(rows.size, 1)[:, : problem.queries] for edge in (rows.low, rows.high))
    repeats = 1 if places.shape[0] == 1 else problem.heads
    return (places - low).repeat_interleave(repeats, 0), (high - places).repeat_interleave(repeats, 0)
