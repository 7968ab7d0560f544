# SPDX-License-Identifier: Apache-2.0
"""Strips of queries and blocks of keys as boxes of positions: how near they come, and whether they can see each other.

A box stands for all its tokens, so its answers are one-sided: a distance is never overestimated, and "cannot see" is
certain while "may see" is not. Boxes live on the host in fp64, whatever device the call runs on.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import token_positions
from .problem import Operands, Options

# Coordinates are differences of rounded numbers; positions on a line are integers and exact.
_DEFLATION = 1 - 1e-12


def in_tiles(tensor: Tensor, size: int, fill: float | bool) -> Tensor:
    """(n, N, ...) as (n, ceil(N / size), size, ...), the last tile filled up."""
    missing = -tensor.shape[1] % size
    if missing:
        tail = tensor.new_full((tensor.shape[0], missing, *tensor.shape[2:]), fill)
        tensor = torch.cat([tensor, tail], dim=1)
    return tensor.unflatten(1, (tensor.shape[1] // size, size))


def real_keys(operands: Operands) -> Tensor:
    """(b, S) bool: the keys that exist."""
    if operands.key_mask is not None:
        return operands.key_mask
    return torch.ones((1, operands.key.shape[2]), dtype=torch.bool, device=operands.key.device)


def host(tensor: Tensor) -> Tensor:
    """On the host in fp64; converted there, because some devices have no fp64."""
    return tensor.cpu().double()


@dataclass(frozen=True)
class Boxes:
    """The extent of each tile of tokens. A tile without real tokens has low = inf, high = -inf."""

    low: Tensor
    """(b, N, C), C = 1 on a line."""
    high: Tensor
    """(b, N, C)."""
    segments: tuple[Tensor, Tensor] | None
    """Lowest and highest segment, (b, N) int64."""
    free: Tensor | None
    """(b, N) bool: holds a token without bias."""
    first_rank: Tensor | None
    """(b, N) int64, keys only: the lowest rank."""
    size: int
    """Tokens a tile."""

    @staticmethod
    def of_queries(operands: Operands, size: int) -> "Boxes":
        """Strips of `size` queries."""
        return _boxes(token_positions(operands)[0], None, operands.query_segments, operands.query_unbiased, None, size)

    @staticmethod
    def of_keys(operands: Operands, size: int) -> "Boxes":
        """Blocks of `size` keys; keys that do not exist count for nothing."""
        return _boxes(
            token_positions(operands)[1],
            operands.key_mask,
            operands.key_segments,
            operands.key_unbiased,
            operands.key_ranks,
            size,
        )


def _boxes(
    positions: Tensor,
    real: Tensor | None,
    segments: Tensor | None,
    free: Tensor | None,
    ranks: Tensor | None,
    size: int,
) -> Boxes:
    places = host(positions)
    places = places if places.dim() == 3 else places.unsqueeze(-1)  # noqa: PLR2004
    keep = torch.ones(places.shape[:2], dtype=torch.bool, device="cpu") if real is None else real.cpu()
    places, keep = torch.broadcast_tensors(places, keep.unsqueeze(-1))
    low = torch.where(keep, places, torch.inf)
    high = torch.where(keep, places, -torch.inf)
    return Boxes(
        low=in_tiles(low, size, torch.inf).amin(2),
        high=in_tiles(high, size, -torch.inf).amax(2),
        segments=None if segments is None else _range(segments.cpu(), size),
        free=None if free is None else in_tiles(free.cpu(), size, False).any(2),
        first_rank=None if ranks is None else _range(ranks.cpu(), size)[0],
        size=size,
    )


def _range(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    bounds = torch.iinfo(torch.int64)
    return in_tiles(values, size, bounds.max).amin(2), in_tiles(values, size, bounds.min).amax(2)


@dataclass(frozen=True)
class Gaps:
    """Between each strip and each block, all (b, I, J)."""

    near: Tensor
    """A lower bound of every distance; 0 where a token without bias is among them."""
    far: Tensor
    """An upper bound of every distance."""
    past: Tensor
    """bool: every key lies before every query, and none is without bias."""
    future: Tensor
    """bool: every key lies after every query, and none is without bias."""


def gaps(rows: Boxes, keys: Boxes, metric: str | None) -> Gaps:
    """Distances between boxes, by the metric or on a line."""
    row_low, row_high = rows.low.unsqueeze(2), rows.high.unsqueeze(2)
    key_low, key_high = keys.low.unsqueeze(1), keys.high.unsqueeze(1)
    before, after = row_low - key_high, key_low - row_high
    apart = torch.maximum(before, after).clamp_min(0)
    across = torch.maximum(row_high - key_low, key_high - row_low)
    if metric == "euclidean":
        near, far = apart.square().sum(-1).sqrt() * _DEFLATION, across.square().sum(-1).sqrt() / _DEFLATION
    elif metric == "manhattan":
        near, far = apart.sum(-1) * _DEFLATION, across.sum(-1) / _DEFLATION
    else:
        near, far = apart.squeeze(-1), across.squeeze(-1)
    past, future = before[..., 0] > 0, after[..., 0] > 0
    if metric is not None:
        past, future = torch.zeros_like(past), torch.zeros_like(future)
    if rows.free is not None and keys.free is not None:
        free = rows.free.unsqueeze(2) | keys.free.unsqueeze(1)
        near, past, future = torch.where(free, 0.0, near), past & ~free, future & ~free
    return Gaps(near, far, past, future)


def maybe_visible(options: Options, attn_mask: Tensor | None, rows: Boxes, keys: Boxes) -> Tensor:
    """(b, h, I, J) bool, h = 1 or H: False only where no query of the strip sees a key of the block."""
    earliest = rows.low[..., 0].unsqueeze(2) - keys.high[..., 0].unsqueeze(1)
    latest = rows.high[..., 0].unsqueeze(2) - keys.low[..., 0].unsqueeze(1)
    # As `!=`, so that a tile with a NaN coordinate is visited.
    visible = (keys.low[..., 0] != torch.inf).unsqueeze(1) & (rows.low[..., 0] != torch.inf).unsqueeze(2)
    rank = None if keys.first_rank is None else keys.first_rank.unsqueeze(1)
    if options.causal:
        allowed = latest >= 0
        visible = visible & (allowed if rank is None else allowed | (rank < options.prefix))
    inside = torch.ones_like(visible)
    if options.left is not None:
        inside = inside & (earliest <= options.left)
    if options.right is not None:
        inside = inside & (latest >= -options.right)
    visible = visible & (inside if rank is None else inside | (rank < options.sinks))
    if rows.segments is not None and keys.segments is not None:
        (row_low, row_high), (key_low, key_high) = rows.segments, keys.segments
        meet = (row_low.unsqueeze(2) <= key_high.unsqueeze(1)) & (key_low.unsqueeze(1) <= row_high.unsqueeze(2))
        visible = visible & meet
    visible = visible.unsqueeze(1)
    if attn_mask is not None:
        visible = visible & _mask_tiles(attn_mask, rows.size, keys.size)
    return visible


def _mask_tiles(mask: Tensor, strip: int, block: int) -> Tensor:
    """(B or 1, H or 1, I or 1, J or 1) bool: whether the mask shows anything in each tile; read a strip at a time."""
    step = strip if mask.shape[2] > 1 else 1
    shown = torch.stack([rows.any(2) for rows in mask.split(step, dim=2)], dim=2)
    if mask.shape[3] > 1:
        lines = shown.flatten(0, 2)
        shown = in_tiles(lines, block, False).any(2).unflatten(0, shown.shape[:3])
    return shown.cpu()
