# SPDX-License-Identifier: Apache-2.0
"""The tiles of a call: of every strip of rows and block of keys, how near they come and what may be visible.

On the host in fp64, whatever device the call runs on; `bh` counts (batch item, query head).
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...semantics.blocks import Answer, Blocks, Tiles, difference, in_tiles, mask_tiles
from ...semantics.bounds import upper_norms
from ...semantics.problem import Operands, Problem
from ...semantics.tokens import Tokens

_STRIP = 64
"""Rows judged together, and keys a block unless the caller's bounds say otherwise."""
_TABLE = 1 << 22
"""Most strip x block entries a head: beyond it, tiles are doubled into superblocks."""
_SHORT = 16
"""With fewer queries, reading all keys for their norms costs as much as attending to them."""

ANY, PAST, FUTURE = 1, 2, 3
"""What is known of a tile: nothing; or that every pair is visible, has a bias, and is on this one side."""


def host(tensor: Tensor) -> Tensor:
    """On the host in fp64; converted there, because some devices have no fp64."""
    return tensor.cpu().double()


@dataclass(frozen=True)
class Table:
    """The tiles of a call: I strips of queries by J blocks of keys. A flag or distance is (b, h, I, J), h = 1 or H."""

    problem: Problem
    strip: int
    block: int
    near: Tensor
    far: Tensor
    past: Tensor
    future: Tensor
    visible: Answer
    offsets: tuple[Tensor, Tensor]
    """(b, T) each: how much further a row is from keys of its past, and of its future, than its strip's extreme."""
    behind: Tensor
    """(b, J): how far a block's mean position lies behind its last; of use for blocks that are FULL."""
    count: Tensor
    """(b, J): real keys a block."""
    norms: Tensor
    """(B, G, J): largest norm of a real key; inf where nobody asked or gave it."""

    @staticmethod
    def of(problem: Problem, operands: Operands) -> "Table":
        """Summarise the tokens of a call."""
        strip, block = _sizes(problem)
        queries, keys = _on_host(Tokens.queries_of(operands)), _on_host(Tokens.keys_of(operands))
        # Rows that a strip lacks are computed for nobody, so that its tiles may be whole without them.
        rows, columns = replace(Blocks.of(queries, strip), real=None), Blocks.of(keys, block)
        tiles = Tiles.of(rows.down(), columns.across(), problem.options)
        past, future = tiles.sides()
        visible = Answer(
            *(torch.broadcast_tensors(each, past)[0] for each in (tiles.visible.some, tiles.visible.every))
        )
        if operands.attn_mask is not None:
            shown = mask_tiles(operands.attn_mask, strip, block)
            visible = visible & Answer(shown.some.cpu(), shown.every.cpu())
        real = torch.ones((1, problem.keys), dtype=torch.bool, device="cpu") if keys.real is None else keys.real
        return Table(
            problem=problem,
            strip=strip,
            block=block,
            near=tiles.distance.low.double(),
            far=tiles.distance.high.double(),
            past=past,
            future=future,
            visible=visible,
            offsets=_offsets(queries, rows, strip),
            behind=_behind(keys, columns, block),
            count=in_tiles(real, block, False).sum(2).double(),
            norms=_norms(problem, operands, block),
        )

    @property
    def single(self) -> bool:
        """Whether this is one tile, with nothing to skip."""
        return self.near.shape[2] <= 1 and self.near.shape[3] <= 1

    def of_bh(self, tensor: Tensor, bh: Tensor) -> Tensor:
        """What holds for each of `bh`, (n, I, J), of a (b, h, I, J) tensor."""
        items, heads = bh // self.problem.heads, bh % self.problem.heads
        return tensor[items % tensor.shape[0], heads % tensor.shape[1]]

    def sides_of(self, bh: Tensor, slopes: Tensor) -> Tensor:
        """(n, I, J) int8: the tiles in which distance is a difference, with nothing hidden and every bias finite."""
        full, most = self.of_bh(self.visible.every, bh), steepest(self.problem)
        past, future = (
            full & self.of_bh(side, bh) & (slopes[side_slope, bh, None, None].abs() <= most)
            for side, side_slope in ((self.past, 1), (self.future, 2))
        )
        return torch.where(past, PAST, torch.where(future, FUTURE, ANY)).to(torch.int8)


def _sizes(problem: Problem) -> tuple[int, int]:
    """(rows a strip, keys a block) of the table, coarse enough for its cap."""
    given = problem.options.bounds_block or _STRIP
    strip, block = _STRIP, given * max(1, _STRIP // given)
    while math.ceil(problem.queries / strip) * math.ceil(problem.keys / block) > _TABLE:
        strip, block = 2 * strip, 2 * block
    return strip, block


def _on_host(tokens: Tokens) -> Tokens:
    found = tokens._replace(
        device=torch.device("cpu"), position=None if tokens.position is None else tokens.position.cpu()
    )
    if found.position is not None and found.position.is_floating_point():
        found = found._replace(position=found.position.double())
    return found._each(Tensor.cpu)


def _offsets(queries: Tokens, rows: Blocks, strip: int) -> tuple[Tensor, Tensor]:
    places = queries.places()
    if places.dim() == 3:  # noqa: PLR2004  (points have no sides)
        zeros = torch.zeros((1, queries.length), dtype=torch.float64, device="cpu")
        return zeros, zeros
    low, high = (
        edge.repeat_interleave(strip, 1)[:, : queries.length] for edge in (rows.position.low, rows.position.high)
    )
    return difference(places, low).double(), difference(high, places).double()


def _behind(keys: Tokens, columns: Blocks, block: int) -> Tensor:
    if keys.position is None:
        mean = torch.full((1, 1), (block - 1) / 2, dtype=torch.float64, device="cpu")
        return mean.expand(1, columns.position.high.shape[1])
    high = columns.position.high
    if high.is_floating_point():
        return high.new_zeros(high.shape[:2])
    return difference(high.unsqueeze(2), in_tiles(keys.position, block, 0)).double().mean(2)


def _norms(problem: Problem, operands: Operands, block: int) -> Tensor:
    shape = (problem.batch, problem.kv_heads)
    if operands.bound_norms is not None:
        pool = block // problem.options.bounds_block
        return in_tiles(host(operands.bound_norms).flatten(0, 1), pool, 0.0).amax(-1).unflatten(0, shape)
    if problem.queries < _SHORT:
        return torch.full((*shape, -(-problem.keys // block)), math.inf, dtype=torch.float64, device="cpu")
    each = upper_norms(operands.key)
    if operands.key_mask is not None:
        each = torch.where(operands.key_mask[:, None], each, 0.0)
    return host(in_tiles(each.flatten(0, 1), block, 0.0).amax(-1)).unflatten(0, shape)


def both_slopes(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(BH,) past and future slopes."""
    shape = (problem.batch, problem.heads)
    past = host(operands.slopes).expand(shape).flatten()
    return past, past if operands.future_slopes is None else host(operands.future_slopes).expand(shape).flatten()


def steepest(problem: Problem) -> float:
    """The steepest slope whose bias is finite at every distance; a steeper one may hide a key as infinity does."""
    if problem.options.metric is not None:
        return 0.0
    return torch.finfo(problem.accumulator).max / 2**63
