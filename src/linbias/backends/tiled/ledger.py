# SPDX-License-Identifier: Apache-2.0
"""Which tiles a pass must visit, judged before anything is computed, so that what it skips fits the tolerance.

`Table` knows of every strip of rows and block of keys how near they come and what may be visible (semantics/blocks.py).
`TileBounds` bounds a tile: row i bounds a block of norm rho by ``c_i rho - log Z_i - m (offset_i + near)``
with c_i = |scale| |q_i|, linear in rho. The largest of the rows' bounds, and the log of the sum of their exponentials,
are therefore convex in rho, and lie below the chord between their values at the smallest and the largest norm of the
head: two numbers a strip and side stand for all its rows, and the table costs O(1) an entry. A ledger then adds up the
shares and skips the smallest first: the farthest tiles, as a rule, and never a near outlier in their stead, so that one
key of huge norm costs its own block.

Proof: docs/proof.md, sections 2 to 4. Everything here is on the host in fp64; `bh` counts (batch item, query head).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...semantics.blocks import Blocks, Tiles, in_tiles, penalty
from ...semantics.bounds import log_gamma, score_bound
from ...semantics.problem import Operands, Problem
from ...semantics.tokens import Tokens
from .table import Table, both_slopes, host

_CHUNK = 1 << 21
"""Table entries held at once."""
_NEAR = 4
"""Blocks whose mean keys make the lower bound of a row's weight."""
# Left unspent: covers the rounding of sums of shares, and of fp64 bounds of inputs in fp32.
_LIMIT = 1 - 1e-6


@dataclass(frozen=True)
class TileBounds:
    """The bounds of one call. Sides: 0 for tiles that straddle, hold tokens without bias, or have no side; 1 past, 2
    future.
    """

    table: Table
    slopes: Tensor
    """(3, BH): the smaller one, past, future."""
    lengths: Tensor
    """(BH, T): bounds of the query norms."""
    base: Tensor
    """(3 or 2, BH, T): -log Z_i - m offset_i, the bound without content; 2 sides where no future tile is visible."""

    @staticmethod
    def of(table: Table, operands: Operands, norms: Tensor, mass: Tensor) -> "TileBounds":
        """Prepare: `norms` (B, H, T) of the queries, `mass` (B, H, T) a lower bound of log Z."""
        problem = table.problem
        log_mass = host(mass).flatten(0, 1)
        # A row without weight (mass inf) counts for nothing, whatever its query holds.
        lengths = torch.where(log_mass == math.inf, 0.0, host(norms).flatten(0, 1))
        past, future = both_slopes(problem, operands)
        repeats = 1 if table.offsets[0].shape[0] == 1 else problem.heads
        offsets = [each.repeat_interleave(repeats, 0) for each in table.offsets]
        base = [-log_mass, *(-log_mass - _product(m[:, None], d) for m, d in zip((past, future), offsets, strict=True))]
        # Most calls look one way, and need not evaluate the other.
        ahead = bool((table.future & table.visible.some).any())
        return TileBounds(
            table=table,
            slopes=torch.stack([torch.minimum(past, future), past, future]),
            lengths=lengths,
            base=torch.stack(base if ahead else base[:2]),
        )

    def chunks(self) -> Iterator[Tensor]:
        """`bh` by number, as many at once as the memory set aside for tables allows."""
        strips, blocks = self.table.near.shape[2:]
        step = max(1, _CHUNK // max(1, strips * blocks))
        return iter(_every_head(self.table.problem).split(step))

    def row_bounds(self, bh: Tensor) -> Tensor:
        """log of the largest share, over the strip's rows, that the whole block can weigh."""
        return self._bounds(bh, lambda values: values.amax(-1)) + self._log_count(bh)

    def key_bounds(self, bh: Tensor) -> Tensor:
        """log of the sum, over the strip's rows, of the share that a single key of the block can weigh."""
        return self._bounds(bh, lambda values: values.logsumexp(-1))

    def stretch(self, bh: Tensor) -> Tensor:
        """log(1 + m d) at the largest distance of the tile: how much a slope's gradient magnifies its weights.

        A slope of 0 counts as 1, for its gradient too takes the distance.
        """
        steepest = self.slopes[1:, bh].amax(0).clamp_min(0)
        steepest = torch.where(steepest == 0, 1.0, steepest)[:, None, None]
        return torch.log1p(_product(steepest, self.table.of_bh(self.table.far, bh)))

    def _choose(self, bh: Tensor, sides: list[Tensor]) -> Tensor:
        """Of the values for unknown, past and future side, each tile's own."""
        chosen = torch.where(self.table.of_bh(self.table.past, bh), sides[1], sides[0])
        if len(self.base) == 2:  # noqa: PLR2004
            return chosen
        return torch.where(self.table.of_bh(self.table.future, bh), sides[2], chosen)

    def _bounds(self, bh: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """The bound of one key at the block's largest norm, over the strip's rows as `combine` puts them together."""
        options, strip = self.table.problem.options, self.table.strip
        norms = self.table.norms.flatten(0, 1)[bh // self.table.problem.group]
        lengths, base = self.lengths[bh], self.base[:, bh]
        finite = norms.isfinite()
        low = torch.where(finite, norms, math.inf).amin(-1)
        high = torch.where(finite, norms, -math.inf).amax(-1)
        ends = [
            combine(_strips(score_bound(options.scale, None, lengths, end[:, None]) + base, strip))
            for end in (low, high)
        ]
        part = torch.where(high > low, (norms.T - low) / (high - low), 0.0).T.unsqueeze(1)
        part = torch.where(finite.unsqueeze(1), part, math.nan)
        start, step = ends[0].unsqueeze(-1), torch.where(ends[0] == ends[1], 0.0, ends[1] - ends[0]).unsqueeze(-1)
        sides = [start[side] + step[side] * part for side in range(len(base))]
        if options.softcap is not None:
            longest = _strips(lengths, strip, 0.0).amax(-1).unsqueeze(-1)
            capped = score_bound(options.scale, options.softcap, longest, norms.unsqueeze(1))
            alone = combine(_strips(base, strip)).unsqueeze(-1)
            sides = [torch.minimum(side, alone[index] + capped) for index, side in enumerate(sides)]
        return self._choose(bh, sides) - self._penalty(bh)

    def _penalty(self, bh: Tensor) -> Tensor:
        """slope x nearest distance; -inf where a slope of the tile is negative, so that it is never skipped."""
        near, slopes = self.table.of_bh(self.table.near, bh), self.slopes[: len(self.base), bh, None, None]
        return self._choose(bh, [torch.where(m < 0, -math.inf, _product(m, near)) for m in slopes])

    def _log_count(self, bh: Tensor) -> Tensor:
        """log gamma: how many times the nearest key's bound the whole block can weigh."""
        count = self.table.of_bh(self.table.count[:, None, None], bh)
        if "key_positions" in self.table.problem.features:
            return count.log()
        slopes = self.slopes[1 : len(self.base), bh, None, None]
        return self._choose(bh, [count.log(), *(log_gamma(m, count) for m in slopes)])


def _every_head(problem: Problem) -> Tensor:
    return torch.arange(problem.batch * problem.heads, device="cpu")  # whatever torch's default device is


def _strips(values: Tensor, strip: int, fill: float = -math.inf) -> Tensor:
    """(..., T) as (..., I, strip); rows beyond T weigh nothing."""
    shape = values.shape[:-1]
    return in_tiles(values.reshape(-1, values.shape[-1]), strip, fill).unflatten(0, shape)


def _product(slope: Tensor, distance: Tensor) -> Tensor:
    """slope x distance, 0 at distance 0 even for slope inf."""
    return torch.where(distance == 0, 0.0, slope * distance)


@dataclass(frozen=True)
class Visits:
    """Which tiles a pass computes."""

    table: Tensor
    """(BH, I, J) bool."""
    sides: Tensor
    """(BH, I, J) int8: `ANY`, `PAST` or `FUTURE`, of skipped tiles too."""
    spent: Tensor
    """(BH, I): proven bound of the skipped share of the weight of each row of the strip."""
    strip: int
    """Rows a strip."""
    block: int
    """Keys a block."""


def forward_visits(table: Table, operands: Operands, norms: Tensor, mass: Tensor) -> Visits:
    """The row ledger.

    Args:
        table, operands: the call.
        norms: (B, H, T), upper bounds of the query norms.
        mass: (B, H, T), a proven lower bound of the log of each row's weight; -inf where unknown.
    """

    def judged(bounds: TileBounds, bh: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        return _fitting(_shares(bounds.row_bounds(bh), seen, table.problem.options.tolerance), -1)

    return _visits(TileBounds.of(table, operands, norms, mass), judged)


def backward_visits(table: Table, operands: Operands, norms: Tensor, lse: Tensor, *, slopes_too: bool) -> Visits:
    """The row-and-key ledger: judged afresh from the saved lse, `norms` as in `forward_visits`.

    The skipped tiles fit the tolerance of every row *and*, summed over rows, of every key, for each query head. With
    `slopes_too` weights count (1 + m d)-fold, as the gradient of a slope takes them.
    """
    tolerance = table.problem.options.tolerance

    def judged(bounds: TileBounds, bh: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        extra = bounds.stretch(bh) if slopes_too else 0.0
        rows, used = _fitting(_shares(bounds.row_bounds(bh) + extra, seen, tolerance), -1)
        columns, _ = _fitting(_shares(bounds.key_bounds(bh) + extra, seen, tolerance), -2)
        return rows & columns, used

    # Rows that saw nothing weigh nothing.
    mass = torch.where(lse == -math.inf, math.inf, rounded_mass(table, norms, lse))
    return _visits(TileBounds.of(table, operands, norms, mass), judged)


def every_visit(table: Table, operands: Operands) -> Visits:
    """All that is visible, without judging."""
    bh = _every_head(table.problem)
    sides = table.sides_of(bh, torch.stack([bh, *both_slopes(table.problem, operands)]))
    visits = table.of_bh(table.visible.some, bh)
    spent = torch.zeros(visits.shape[:2], dtype=torch.float64, device="cpu")
    return Visits(visits, sides, spent, table.strip, table.block)


def _visits(bounds: TileBounds, judged: Callable[[TileBounds, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Visits:
    table, tolerance = bounds.table, bounds.table.problem.options.tolerance
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for bh in bounds.chunks():
        seen = table.of_bh(table.visible.some, bh)
        fits, used = judged(bounds, bh, seen)
        parts.append((seen & ~fits, table.sides_of(bh, bounds.slopes), used * tolerance))
    visits, sides, spent = (torch.cat(each) for each in zip(*parts, strict=True))
    return Visits(visits, sides, spent, table.strip, table.block)


def _shares(bounds: Tensor, seen: Tensor, tolerance: float) -> Tensor:
    """Bounds as parts of the tolerance; 0 for what is invisible. Tolerance 0 has room only for what weighs nothing."""
    if tolerance > 0:
        parts = torch.exp(bounds - math.log(tolerance))
    else:
        parts = torch.where(bounds == -math.inf, 0.0, math.inf)
    return torch.where(seen, parts, 0.0)


def _fitting(shares: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The most entries along `dim` whose sum stays within 1, smallest first, and that sum; NaN and inf never fit."""
    ordered, order = shares.sort(dim)
    total = ordered.cumsum(dim)
    # As `<=`, so that a NaN anywhere before it makes the comparison false.
    within = total <= _LIMIT
    fits = torch.zeros_like(within).scatter(dim, order, within)
    return fits, torch.where(within, total, 0.0).amax(dim)


def rounded_mass(table: Table, norms: Tensor, lse: Tensor) -> Tensor:
    """(B, H, T): a lower bound of log Z from an lse over some of the keys, computed with rounding."""
    problem = table.problem
    eps = torch.finfo(problem.accumulator).eps
    longest = torch.where(table.norms.isfinite(), table.norms, 0.0).amax(-1).repeat_interleave(problem.group, 1)
    error = _error(problem, norms) * longest.to(norms.device, norms.dtype).unsqueeze(-1)
    return lse - error - 16 * eps * (1 + lse.abs())


def _error(problem: Problem, norms: Tensor) -> Tensor:
    """By how much a computed dot product can exceed the true one, for each unit of the key's norm."""
    eps = torch.finfo(problem.accumulator).eps
    return (problem.head_dim + 8) * eps * abs(problem.options.scale) * norms


def near_mass(table: Table, operands: Operands, norms: Tensor) -> Tensor:
    """(B, H, T): a proven lower bound of the log of each row's weight: one key, and the nearest blocks of its past.

    Without a soft cap only: the mean score of a block is the score of its mean key because scores are linear.
    """
    bound = torch.logaddexp(_own_mass(table, operands, norms), _block_mass(table, operands, norms))
    return bound - 16 * torch.finfo(bound.dtype).eps * (1 + bound.abs())


def _own_mass(table: Table, operands: Operands, norms: Tensor) -> Tensor:
    """The key that ends aligned give a query, its own in self-attention, where it is visible."""
    problem = table.problem
    offset = problem.keys - problem.queries
    rows, place = slice(max(0, -offset), problem.queries), slice(max(0, offset), problem.keys)
    queries, keys = Tokens.queries_of(operands).part(rows), Tokens.keys_of(operands).part(place)
    pairs = Tiles.of(Blocks.of(queries).abreast(), Blocks.of(keys).abreast(), problem.options)
    visible = pairs.visible.some
    if operands.attn_mask is not None:
        diagonal = operands.attn_mask.expand(-1, -1, problem.queries, problem.keys).diagonal(offset, 2, 3)
        visible = visible & diagonal
    future = None if operands.future_slopes is None else operands.future_slopes.unsqueeze(-1)
    query = operands.query[:, :, rows].to(norms.dtype).unflatten(1, (problem.kv_heads, problem.group))
    key = operands.key[:, :, None, place].to(norms.dtype)
    score = problem.options.scale * (query * key).sum(-1).flatten(1, 2)
    rho = table.norms.to(norms.device, norms.dtype).repeat_interleave(table.block, 2)[:, :, place]
    score = score - _error(problem, norms[:, :, rows]) * rho.repeat_interleave(problem.group, 1)
    own = norms.new_full(norms.shape, -math.inf)
    own[:, :, rows] = torch.where(visible, score - penalty(pairs, operands.slopes.unsqueeze(-1), future), -math.inf)
    return own


def _block_mass(table: Table, operands: Operands, norms: Tensor) -> Tensor:
    """Jensen on each of the nearest blocks that are FULL and past: ``sum exp(s - m d) >= n exp(mean s - m mean d)``.

    The mean score is one product with the block's mean key, so four products stand for hundreds of keys. The distance
    is the row's from its strip's first, the same for all blocks, plus the strip's from the block.
    """
    problem, strip, block = table.problem, table.strip, table.block
    dtype, device = norms.dtype, norms.device
    usable = (table.visible.every & table.past).all(1)
    near_BIW, index_BIW = torch.where(usable, table.near.amax(1), math.inf).topk(min(_NEAR, usable.shape[2]), 2, False)
    gap_BIW = near_BIW + table.behind.expand(len(index_BIW), -1)[:, None].expand(*usable.shape).gather(2, index_BIW)
    gap_BIW, usable, index_BIW = gap_BIW.to(device, dtype), near_BIW.isfinite().to(device), index_BIW.to(device)
    bias = operands.slopes[..., None, None] * torch.where(usable, gap_BIW, 0.0).unsqueeze(1)
    start_BHIW = torch.where(usable.unsqueeze(1), math.log(block) - bias, -math.inf)
    sums = in_tiles(operands.key.to(dtype).flatten(0, 1), block, 0.0).sum(2).unflatten(0, (problem.batch, -1))
    item = torch.arange(problem.batch, device=device)[:, None, None] % problem.batch
    index_BIW = index_BIW.expand(problem.batch, -1, -1)
    centers = sums.transpose(1, 2)[item, index_BIW].movedim(3, 1) * (problem.options.scale / block)
    centers = centers.repeat_interleave(problem.group, 1).flatten(0, 2)
    rows = in_tiles(operands.query.to(dtype).flatten(0, 1), strip, 0.0).flatten(0, 1)
    start = start_BHIW.expand(problem.batch, problem.heads, -1, -1).flatten(0, 2).unsqueeze(-1)
    # What is not usable may hold anything, NaN too.
    near = torch.where(start == -math.inf, -math.inf, torch.baddbmm(start, centers, rows.mT)).logsumexp(-2)
    near = near.unflatten(0, (problem.batch, problem.heads, -1)).flatten(2)[:, :, : problem.queries]
    longest = table.norms.to(device, dtype).transpose(1, 2)[item, index_BIW].movedim(3, 1)
    longest = torch.where(usable.unsqueeze(1), longest, 0.0).amax(-1)
    longest = longest.repeat_interleave(problem.group, 1).repeat_interleave(strip, 2)[:, :, : problem.queries]
    beyond = table.offsets[0].to(device, dtype).unsqueeze(1)
    bias = torch.where(beyond == 0, 0.0, operands.slopes.unsqueeze(-1) * beyond)
    return near - _error(problem, norms) * longest - bias
