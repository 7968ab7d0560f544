# SPDX-License-Identifier: Apache-2.0
"""Which tiles a pass visits, judged on the device by torch operations; no value is read on the host.

What tiles see is `semantics.blocks`, what they can weigh `semantics.bounds`. A line of the table skips the tiles whose
shares are at most a threshold, the largest of a ladder for which their sum fits the tolerance: as sorting them would,
but for the last step, and a far outlier costs its own tile. docs/proof.md, section 7.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...semantics.blocks import Answer, Blocks, Tiles, in_tiles
from ...semantics.bounds import log_gamma, score_bound
from ...semantics.problem import Operands, Problem
from ...semantics.tokens import Tokens
from .arguments import Visits

_TABLE = 1 << 19
"""Most entries of a head's table; beyond it, they are doubled."""
_LADDER = 12
"""Thresholds, each a quarter of the one before."""
_STEEPEST = torch.finfo(torch.float32).max / 2**65
"""The steepest slope whose bias is finite at every distance, in any unit."""


@dataclass(frozen=True)
class Table:
    """I strips of queries by J blocks of keys, each some kernel tiles. Flags and distances are (b, h, I, J)."""

    problem: Problem
    strip: int
    block: int
    tiles: tuple[int, int]
    """Rows and keys of a kernel's tile."""
    some: Tensor
    """Some pair may be visible."""
    whole: Tensor
    """Every pair is, on one side, with a finite bias."""
    near: Tensor
    far: Tensor
    past: Tensor
    """Every key stands before every query."""
    slopes: tuple[Tensor, Tensor]
    """(b, H, 1, 1) each."""

    @staticmethod
    def of(problem: Problem, operands: Operands, tiles: tuple[int, int]) -> "Table":
        """Summarise the tokens of a call, for kernels whose tiles have that many rows and keys."""
        strip, block = _sizes(problem, tiles)
        queries, keys = Tokens.queries_of(operands), Tokens.keys_of(operands)
        # Rows that a strip lacks are computed for nobody, so that its tiles may be whole without them.
        rows, columns = replace(Blocks.of(queries, strip), real=None), Blocks.of(keys, block)
        table = Tiles.of(rows.down(), columns.across(), problem.options)
        before, after = table.sides()
        past = operands.slopes[..., None, None]
        future = past if operands.future_slopes is None else operands.future_slopes[..., None, None]
        near = table.distance.low
        # An infinite slope hides what is not at distance 0.
        slope = torch.where(before, past, torch.where(after, future, torch.minimum(past, future)))
        some = _filled(table.visible, near).some & ~((near > 0) & (slope == torch.inf))
        steady = (before & (past.abs() <= _STEEPEST)) | (after & (future.abs() <= _STEEPEST))
        return Table(
            problem=problem,
            strip=strip,
            block=block,
            tiles=tiles,
            some=some,
            whole=some & table.visible.every & steady,
            near=near,
            far=table.distance.high,
            past=before,
            slopes=(past, future),
        )

    def of_rows(self, visited: Tensor) -> Visits:
        """For each strip its blocks; ``visited`` (B, H, I, J)."""
        return _listed(visited, self.whole, 1, (self.strip // self.tiles[0], self.block // self.tiles[1]))

    def of_keys(self, visited: Tensor) -> Visits:
        """For each block its strips; the query heads of a group come one after the other."""
        each = (self.block // self.tiles[1], self.strip // self.tiles[0])
        return _listed(visited.mT, self.whole.expand_as(visited).mT, self.problem.group, each)

    def every(self) -> Tensor:
        """(B, H, I, J): all that may be visible."""
        shape = (self.problem.batch, self.problem.heads)
        return self.some.expand(*shape, *self.some.shape[2:])

    def nearest(self) -> Tensor:
        """(B, H, I, J): of each strip one block, the nearest that it may see."""
        near = torch.where(self.some, self.near, math.inf)
        first = near.argmin(-1, keepdim=True)
        return torch.zeros_like(near, dtype=torch.bool).scatter_(-1, first, True).expand_as(self.every()) & self.every()

    def pairs(self, visited: Tensor) -> Tensor:
        """(B, H) int64: the pairs of the tiles visited."""
        device = visited.device
        heights, widths = (
            (total - size * torch.arange(-(-total // size), device=device)).clamp_max(size)
            for total, size in ((self.problem.queries, self.strip), (self.problem.keys, self.block))
        )
        return ((visited * widths).sum(-1) * heights).sum(-1)


def _filled(answer: Answer, like: Tensor) -> Answer:
    return Answer(*(torch.broadcast_tensors(each, like)[0] for each in (answer.some, answer.every)))


def _sizes(problem: Problem, tiles: tuple[int, int]) -> tuple[int, int]:
    """(rows a strip, keys a block) of the table, coarse enough for its cap, and whole blocks of the caller's bounds."""
    strip, block = tiles
    while math.ceil(problem.queries / strip) * math.ceil(problem.keys / block) > _TABLE:
        strip, block = 2 * strip, 2 * block
    return strip, math.lcm(block, problem.options.bounds_block or 1)


def _listed(visited: Tensor, whole: Tensor, group: int, each: tuple[int, int]) -> Visits:
    """The entries of each line by number: those of ``whole`` from the front, the others from the back."""
    entries = visited.shape[3]
    whole = whole & visited
    parts = visited & ~whole
    front, back = whole.cumsum(-1, dtype=torch.int32), parts.cumsum(-1, dtype=torch.int32)
    # What is not visited goes to a last place of its own.
    place = torch.where(whole, front - 1, torch.where(parts, entries - back, entries)).long()
    number = torch.arange(entries, device=visited.device, dtype=torch.int16 if entries < 1 << 15 else torch.int32)
    made = number.new_zeros((*visited.shape[:3], entries + 1)).scatter_(-1, place, number.expand_as(place))
    counts = front[..., -1].contiguous(), back[..., -1].contiguous()
    work = (counts[0] + counts[1]).unflatten(1, (-1, group)).sum(2)
    order = work.flatten().argsort(descending=True, stable=True)
    return Visits(made[..., :-1].contiguous(), *counts, order.int(), visited.shape[2], entries, each)


@dataclass(frozen=True)
class Lengths:
    """Upper bounds of what contents can do."""

    query: Tensor
    """(B, H, T) norms."""
    key: Tensor
    """(B, G, J): largest norm of a real key of each block of the table."""

    def longest(self, group: int) -> Tensor:
        """(B, H, 1): largest finite norm of a key of the head."""
        return torch.where(self.key.isfinite(), self.key, 0.0).amax(-1, keepdim=True).repeat_interleave(group, 1)


def block_lengths(table: Table, operands: Operands, norms: Tensor) -> Tensor:
    """(B, G, J) from norms of single keys, or of the blocks that the caller gave."""
    problem, size = table.problem, table.block
    if operands.bound_norms is not None:
        size //= problem.options.bounds_block
    elif operands.key_mask is not None:
        norms = torch.where(operands.key_mask[:, None], norms, 0.0)
    return in_tiles(norms.flatten(0, 1), size, 0.0).amax(-1).unflatten(0, (problem.batch, problem.kv_heads))


def rounded_mass(problem: Problem, lengths: Lengths, lse: Tensor) -> Tensor:
    """(B, H, T): a lower bound of log Z from an lse over some of the keys, computed with rounding."""
    eps = torch.finfo(torch.float32).eps
    content = abs(problem.options.scale) * lengths.query * lengths.longest(problem.group)
    return lse - (problem.head_dim + 16) * eps * content - 32 * eps * (1 + lse.abs())


@dataclass(frozen=True)
class Shares:
    """What a tile can hold of the weight of each of its rows, and of what each of its keys weighs in all of them."""

    table: Table
    lengths: Lengths
    base: Tensor
    """(B, H, T) -log Z_i, in float64; -inf for rows without weight."""

    @staticmethod
    def of(table: Table, lengths: Lengths, mass: Tensor) -> "Shares":
        """``mass`` (B, H, T): a lower bound of log Z; inf for rows that weigh nothing."""
        idle = mass == torch.inf
        query = torch.where(idle, 0.0, lengths.query)
        return Shares(table, replace(lengths, query=query), -mass.double())

    def rows(self, stretch: Tensor | float = 0.0) -> Tensor:
        """(B, H, I, J), of the tolerance: the largest share, over the strip's rows, that the whole block can weigh."""
        ends = self._ends(lambda values: values.amax(-1))
        return self._of_tolerance(ends, self._log_count() + stretch)

    def keys(self, stretch: Tensor | float = 0.0) -> Tensor:
        """(B, H, I, J), of the tolerance: the sum, over the strip's rows, of what one key of the block can weigh."""
        return self._of_tolerance(self._ends(lambda values: values.logsumexp(-1)), stretch)

    def stretch(self) -> Tensor:
        """log(1 + m d) at the tile's largest distance: how much a slope's gradient magnifies its weights."""
        steepest = torch.maximum(*self.table.slopes).clamp_min(0.0)
        steepest = torch.where(steepest == 0, 1.0, steepest)
        return torch.log1p(torch.where(self.table.far == 0, 0.0, steepest * self.table.far)) + 1e-5

    def _ends(self, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """(B, H, I, J): the bound of one key without its distance, over the strip's rows as `combine` does.

        Linear in the norm for each row, so convex, and below the chord between the head's shortest and longest block.
        """
        problem, keys = self.table.problem, self.lengths.key.double()
        options, group = problem.options, problem.group
        finite = keys.isfinite()
        low = torch.where(finite, keys, math.inf).amin(-1, keepdim=True)
        high = torch.where(finite, keys, -math.inf).amax(-1, keepdim=True)
        part = torch.where(finite, torch.where(high > low, (keys - low) / (high - low), 0.0), math.nan)
        query = self.lengths.query.double()
        first, last = (
            combine(self._strips(score_bound(options.scale, None, query, end.repeat_interleave(group, 1)) + self.base))
            for end in (low, high)
        )
        # One in a million more than fp32 can lose of either.
        margin = 1e-6 * (first.abs() + last.abs()).nan_to_num(0.0, 0.0, 0.0)
        first, last = ((each + margin).float().unsqueeze(-1) for each in (first, last))
        step = torch.where(first == last, 0.0, last - first)
        bound = first + step * part.float().repeat_interleave(group, 1).unsqueeze(2)
        if options.softcap is None:
            return bound
        longest = self._strips(query, 0.0).amax(-1).unsqueeze(-1).float()
        alone = combine(self._strips(self.base)).unsqueeze(-1).float()
        keys = self.lengths.key.repeat_interleave(group, 1).unsqueeze(2)
        return torch.minimum(
            bound, alone + 1e-6 * alone.abs() + score_bound(options.scale, options.softcap, longest, keys)
        )

    def _strips(self, values: Tensor, fill: float = -math.inf) -> Tensor:
        shape, size = values.shape[:2], self.table.strip
        return in_tiles(values.flatten(0, 1), size, fill).unflatten(0, shape)

    def _of_tolerance(self, bound: Tensor, more: Tensor | float) -> Tensor:
        """Less the bias at the nearest distance; inf where a slope rewards distance."""
        table = self.table
        past, future = table.slopes
        slope = torch.where(table.past, past, torch.minimum(past, future)) * (1 - 1e-6)
        bias = torch.where(table.near == 0, 0.0, slope * table.near)
        tolerance = self.table.problem.options.tolerance * (1 - 1e-5)
        log = bound - bias + more - math.log(tolerance) + 1e-6 * (bias.abs() + 16)
        return torch.where(
            table.some, torch.where(slope < 0, math.inf, torch.where(bias == math.inf, 0.0, log.exp())), 0.0
        )

    def _log_count(self) -> Tensor | float:
        """How many times the nearest key's bound the whole block can weigh."""
        table = self.table
        count = torch.tensor(float(table.block), device=table.near.device)
        if "key_positions" in table.problem.features:
            return math.log(table.block)
        past, future = table.slopes
        sided = torch.where(table.past, past, torch.minimum(past, future))
        known = table.whole & (sided > 0)
        return torch.where(known, log_gamma(sided.double(), count).float(), count.log())


def fitting(shares: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """bool, and the sum of what it chooses along ``dim``: shares up to the largest threshold whose sum is at most 1."""
    chosen = torch.full_like(shares.narrow(dim, 0, 1), -1.0)
    for step in reversed(range(_LADDER)):
        threshold = 4.0**-step
        total = torch.where(shares <= threshold, shares, 0.0).sum(dim, keepdim=True)
        chosen = torch.where(total <= 1 - 1e-4, threshold, chosen)
    fits = shares <= chosen
    return fits, torch.where(fits, shares, 0.0).sum(dim)
