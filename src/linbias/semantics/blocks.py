# SPDX-License-Identifier: Apache-2.0
"""The rule: which keys exist for a query, and how far away they are, for blocks of n tokens at once.

A pair of tokens is a tile of two blocks of one. So the rule is stated once, in interval arithmetic: a block knows the
extremes of its tokens, a tile the extremes of its pairs, and an `Answer` says of each tile whether some pair and
whether every pair fulfils a condition. With n = 1 the extremes coincide and the rule is docs/semantics.md's definition
(`dense`: reference, reports, masks for other kernels); with n = 64 it tells `tiled` what to visit, with n = 128 it is a
FlexAttention BlockMask.

Positions stay int64 until a difference is taken, and differences saturate. Nothing is read on the host, so all of this
runs and traces on any device. What belongs to pairs (attn_mask) and to heads (slopes) is taken together with a tile's
answer, by who has it: see `mask_tiles` and `dense`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .problem import Operands, Options
from .tokens import Tokens

_FARTHEST = 2**63 - 1
"""Differences of positions saturate here, on both sides."""


@dataclass(frozen=True)
class Answer:
    """EMPTY: not `some`; FULL: `every`; else PARTIAL. Blocks of one have one tensor for both, exact.

    Of larger blocks the answer is one-sided: a tile that is EMPTY or FULL may be called PARTIAL, never the reverse.
    """

    some: Tensor
    every: Tensor

    @property
    def exact(self) -> bool:
        """Whether this answers for single pairs."""
        return self.some is self.every

    def __and__(self, other: "Answer") -> "Answer":
        return self._joined(other, torch.logical_and)

    def __or__(self, other: "Answer") -> "Answer":
        return self._joined(other, torch.logical_or)

    def _joined(self, other: "Answer", join: Callable[[Tensor, Tensor], Tensor]) -> "Answer":
        some = join(self.some, other.some)
        return Answer(some, some if self.exact and other.exact else join(self.every, other.every))


@dataclass(frozen=True)
class Span:
    """The least and the greatest value of each block or tile; one tensor for both where it has one token or pair."""

    low: Tensor
    high: Tensor

    @property
    def exact(self) -> bool:
        """Whether this is one value, not a range."""
        return self.low is self.high

    def at_least(self, bound: int | Tensor) -> Answer:
        """value >= bound."""
        some = self.high >= bound
        return Answer(some, some if self.exact else self.low >= bound)

    def at_most(self, bound: int | Tensor) -> Answer:
        """value <= bound."""
        some = self.low <= bound
        return Answer(some, some if self.exact else self.high <= bound)


@dataclass(frozen=True)
class Blocks:
    """N blocks of tokens. (b, N), positions under a metric (b, N, C); None: as in `Tokens`."""

    position: Span
    counted: bool
    """Positions were not given: they count tokens."""
    segment: Span | None
    rank: Span | None
    real: Answer | None
    """None: every token of every block. A block that hangs over the end has tokens that are not."""
    unbiased: Answer | None

    @staticmethod
    def of(tokens: Tokens, size: int = 1) -> "Blocks":
        """Blocks of `size` tokens."""

        def span(values: Tensor | None) -> Span | None:
            return None if values is None else Span(values, values)

        def answer(flags: Tensor | None) -> Answer | None:
            return None if flags is None else Answer(flags, flags)

        places = tokens.places()
        single = Blocks(
            Span(places, places),
            tokens.position is None or tokens.counted,
            span(tokens.segment),
            span(tokens.rank),
            answer(tokens.real),
            answer(tokens.unbiased),
        )
        return single if size == 1 else single.joined(size)

    def joined(self, count: int) -> "Blocks":
        """Every `count` neighbours as one block: a summary of summaries. Tokens that do not exist count for nothing."""
        blocks, device = self.position.low.shape[1], self.position.low.device
        real = self.real
        if real is None and blocks % count:
            there = torch.ones((1, blocks), dtype=torch.bool, device=device)
            real = Answer(there, there)

        def span(values: Span | None) -> Span | None:
            if values is None:
                return None
            low, high = values.low, values.high
            least, greatest = _extremes(low.dtype)
            if self.real is not None:
                keep = self.real.some.reshape(*self.real.some.shape, *(1,) * (low.dim() - 2))
                low, high = torch.where(keep, low, greatest), torch.where(keep, high, least)
            return Span(in_tiles(low, count, greatest).amin(2), in_tiles(high, count, least).amax(2))

        def answer(flags: Answer | None) -> Answer | None:
            if flags is None:
                return None
            return Answer(in_tiles(flags.some, count, False).any(2), in_tiles(flags.every, count, False).all(2))

        return self._with(span, answer, answer(real))

    def down(self) -> "Blocks":
        """As the rows of a table of tiles that has room for heads: (b, 1, N, 1)."""
        return self._each(lambda tensor: tensor[:, None, :, None])

    def across(self) -> "Blocks":
        """As its columns: (b, 1, 1, N)."""
        return self._each(lambda tensor: tensor[:, None, None, :])

    def abreast(self) -> "Blocks":
        """One to one with the blocks of the other side: (b, 1, N)."""
        return self._each(lambda tensor: tensor[:, None])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Blocks":
        def span(values: Span | None) -> Span | None:
            if values is None:
                return None
            low = change(values.low)
            return Span(low, low if values.exact else change(values.high))

        def answer(flags: Answer | None) -> Answer | None:
            if flags is None:
                return None
            some = change(flags.some)
            return Answer(some, some if flags.exact else change(flags.every))

        return self._with(span, answer, answer(self.real))

    def _with(
        self,
        span: Callable[[Span | None], Span | None],
        answer: Callable[[Answer | None], Answer | None],
        real: Answer | None,
    ) -> "Blocks":
        position = span(self.position)
        assert position is not None
        return Blocks(position, self.counted, span(self.segment), span(self.rank), real, answer(self.unbiased))


@dataclass(frozen=True)
class Tiles:
    """What the pairs of a block of queries and a block of keys have in common, for every head."""

    offset: Span | None
    """int64: query position minus key position. None under a metric, which knows no before and after."""
    distance: Span
    """What a slope multiplies: int64 on a line, floating under a metric; 0 where a token without bias is among them."""
    free: Tensor | None
    """bool: a token without bias may be among them."""
    visible: Answer
    """Whether the pairs exist, as far as tokens tell."""

    @staticmethod
    def of(rows: Blocks, keys: Blocks, options: Options) -> "Tiles":
        """Rows against keys, broadcast: ``rows.down()`` and ``keys.across()`` give the table of tiles (b, 1, I, J)."""
        offset = None if options.metric is not None else _offset(rows, keys)
        distance = _away(rows.position, keys.position, options.metric) if offset is None else _absolute(offset)
        free = None
        if rows.unbiased is not None and keys.unbiased is not None:
            unbiased = rows.unbiased | keys.unbiased
            free = unbiased.some
            low = torch.where(free, 0, distance.low)
            distance = Span(low, low if distance.exact else torch.where(unbiased.every, 0, distance.high))
        return Tiles(offset, distance, free, _visible(rows, keys, offset, options))

    def sides(self) -> tuple[Tensor, Tensor]:
        """bool: every key stands before every query, and after; with a bias for each pair, and no distance held at the
        farthest, so that it is the sum of its parts.
        """
        if self.offset is None:
            nowhere = torch.zeros_like(self.distance.low, dtype=torch.bool)
            return nowhere, nowhere
        past = self.offset.at_least(1).every & (self.offset.high < _FARTHEST)
        future = self.offset.at_most(-1).every & (self.offset.low > -_FARTHEST)
        return (past, future) if self.free is None else (past & ~self.free, future & ~self.free)


def _visible(rows: Blocks, keys: Blocks, offset: Span | None, options: Options) -> Answer:
    """docs/semantics.md, "Visibility", word for word."""
    everywhere = torch.ones((), dtype=torch.bool, device=keys.position.low.device)
    answer = Answer(everywhere, everywhere)
    for side in (rows, keys):
        answer = answer if side.real is None else answer & side.real
    if rows.segment is not None and keys.segment is not None:
        answer = answer & _same(rows.segment, keys.segment)
    if offset is None:
        return answer
    if options.causal:
        allowed = offset.at_least(0)
        answer = answer & (allowed if keys.rank is None else allowed | keys.rank.at_most(options.prefix - 1))
    if options.left is not None or options.right is not None:
        inside = Answer(everywhere, everywhere)
        if options.left is not None:
            inside = inside & offset.at_most(options.left)
        if options.right is not None:
            inside = inside & offset.at_least(-options.right)
        answer = answer & (inside if keys.rank is None else inside | keys.rank.at_most(options.sinks - 1))
    return answer


def _same(a: Span, b: Span) -> Answer:
    """Whether values are equal."""
    if a.exact and b.exact:
        same = a.low == b.low
        return Answer(same, same)
    return Answer((a.low <= b.high) & (b.low <= a.high), (a.low == b.high) & (b.low == a.high))


def _offset(rows: Blocks, keys: Blocks) -> Span:
    minus = torch.sub if rows.counted and keys.counted else difference
    low = minus(rows.position.low, keys.position.high)
    exact = rows.position.exact and keys.position.exact
    return Span(low, low if exact else minus(rows.position.high, keys.position.low))


def difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b of int64, held at the farthest that int64 can say where it would wrap."""
    wrapped = a - b
    beyond = ((a ^ b) & (a ^ wrapped)) < 0
    farthest = torch.where(a < 0, -_FARTHEST, _FARTHEST)
    return torch.where(beyond, farthest, wrapped).clamp_min(-_FARTHEST)


def _absolute(offset: Span) -> Span:
    if offset.exact:
        distance = offset.low.abs()
        return Span(distance, distance)
    low = torch.maximum(offset.low, -offset.high).clamp_min(0)
    return Span(low, torch.maximum(offset.high, -offset.low))


def _away(a: Span, b: Span, metric: str | None) -> Span:
    """Distances between points, or boxes of them, (..., C): never overestimated by `low`, never under by `high`."""
    if a.exact and b.exact:
        distance = _length((a.low - b.low).abs(), metric)
        return Span(distance, distance)
    apart = torch.maximum(a.low - b.high, b.low - a.high).clamp_min(0)
    across = torch.maximum(a.high - b.low, b.high - a.low)
    slack = (a.low.shape[-1] + 4) * torch.finfo(a.low.dtype).eps
    return Span(_length(apart, metric) * (1 - slack), _length(across, metric) * (1 + slack))


def _length(coordinates: Tensor, metric: str | None) -> Tensor:
    return coordinates.sum(-1) if metric == "manhattan" else coordinates.square().sum(-1).sqrt()


def _extremes(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def in_tiles(tensor: Tensor, size: int, fill: float | bool) -> Tensor:
    """(n, N, ...) as (n, ceil(N / size), size, ...), the last tile filled up."""
    missing = -tensor.shape[1] % size
    if missing:
        tail = tensor.new_full((tensor.shape[0], missing, *tensor.shape[2:]), fill)
        tensor = torch.cat([tensor, tail], dim=1)
    return tensor.unflatten(1, (tensor.shape[1] // size, size))


def mask_tiles(mask: Tensor, rows: int, keys: int) -> Answer:
    """What a four-dimensional attn_mask shows of each tile of `rows` x `keys`, (B or 1, H or 1, I or 1, J or 1).

    It is read a strip of rows at a time, so memory stays that of the mask and of the answer.
    """
    step = rows if mask.shape[2] > 1 else 1
    strips = mask.split(step, dim=2)
    some, every = (torch.stack([reduce(strip, 2) for strip in strips], dim=2) for reduce in (torch.any, torch.all))
    if mask.shape[2] > 1 and mask.shape[2] % step:
        every[:, :, -1] = False  # the last strip hangs over the end
    if mask.shape[3] > 1:
        lines = [in_tiles(each.flatten(0, 2), keys, False) for each in (some, every)]
        some, every = (
            reduce(line, 2).unflatten(0, some.shape[:3])
            for line, reduce in zip(lines, (torch.any, torch.all), strict=True)
        )
    return Answer(some, every)


def penalty(tiles: Tiles, slopes: Tensor, future_slopes: Tensor | None) -> Tensor:
    """slope x distance of single pairs, what is subtracted from the score: exactly 0 at distance 0.

    Args:
        tiles: of blocks of one.
        slopes, future_slopes: what broadcasts against them.
    """
    slope, distance = slopes, tiles.distance.low
    if distance.is_floating_point():
        # A hidden point may stand at NaN or inf, and the slope's gradient multiplies by its distance.
        distance = torch.where(tiles.visible.some, distance, 0.0)
    if future_slopes is not None and tiles.offset is not None:
        slope = torch.where(tiles.offset.low < 0, future_slopes, slopes)
    # Distances are exact integers until this one product; slope inf at distance 0 would make NaN.
    return torch.where(distance == 0, 0.0, slope * distance.to(slopes.dtype))


def dense(
    operands: Operands, options: Options, rows: slice | None = None, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition itself: (b, H, T, S) slope x distance, and bool, whether each key exists for each query.

    Args:
        operands, options: the call.
        rows: some of the queries; None: all of them.
        columns: some of the keys, by number.
    """
    queries, keys, mask = Tokens.queries_of(operands), Tokens.keys_of(operands), operands.attn_mask
    if rows is not None:
        rows = slice(*rows.indices(queries.length))
        queries = queries.part(rows)
        mask = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
    if columns is not None:
        keys = keys.part(columns)
        mask = mask if mask is None or mask.shape[3] == 1 else mask[..., columns]
    tiles = Tiles.of(Blocks.of(queries).down(), Blocks.of(keys).across(), options)
    visible = tiles.visible.some if mask is None else tiles.visible.some & mask
    tiles = replace(tiles, visible=Answer(visible, visible))
    future = operands.future_slopes
    bias = penalty(tiles, operands.slopes[..., None, None], None if future is None else future[..., None, None])
    # Slope inf hides what is not at distance 0; a NaN slope must show as NaN results.
    return bias, visible & (bias != torch.inf)
