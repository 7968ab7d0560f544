# SPDX-License-Identifier: Apache-2.0
"""The formula on one rectangle of pairs, and its derivative: the plain engine, on any device, with every option."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..semantics.dropout import keep_mask
from ._tiled_call import Call, index, kv_index
from ._tiled_plan import Rectangle, Runs

Columns = slice | Tensor
"""Keys of a rectangle: a range, or the indices of several."""


def columns(runs: Runs, device: torch.device) -> Columns:
    """Ranges of keys as an index."""
    if len(runs) == 1:
        return slice(*runs[0])
    return torch.cat([torch.arange(*run, device=device) for run in runs])


def pieces(rectangle: Rectangle, budget: int) -> Iterator[Rectangle]:
    """The rectangle in parts of at most `budget` pairs, lanes first, then keys; whole rows of one lane stay together
    as long as they fit.
    """
    rows = max(1, rectangle.rows.stop - rectangle.rows.start)
    keys = max(1, min(rectangle.width, budget // rows))
    lanes = max(1, budget // (rows * keys))
    for first in range(0, len(rectangle.lanes), lanes):
        part = replace(rectangle, lanes=rectangle.lanes[first : first + lanes])
        if keys >= rectangle.width:
            yield part
            continue
        for run in rectangle.runs:
            for start in range(run[0], run[1], keys):
                yield replace(part, runs=((start, min(start + keys, run[1])),), whole=False)


@dataclass(frozen=True)
class Pairs:
    """Everything about a rectangle's pairs but their contents. n = 1 where all lanes agree."""

    distance: Tensor
    """(n, M, N) in the accumulating dtype; 0 for pairs without bias."""
    future: Tensor | None
    """(n, M, N) bool: the key is later; None where both sides have one slope."""
    bias: Tensor
    """(lanes, M, N): slope x distance."""
    hidden: Tensor | None
    """(n or lanes, M, N) bool; None: all visible."""

    @staticmethod
    def of(call: Call, lanes: tuple[int, ...], rows: slice, cols: Columns) -> "Pairs":
        """Evaluate positions, masks and slopes."""
        operands, chosen = call.operands, index(lanes, call.problem.device)
        offset, distance = _distance(call, lanes, rows, cols)
        hidden = _hidden(call, lanes, rows, cols, offset)
        if operands.query_unbiased is not None and operands.key_unbiased is not None:
            free = call.select(operands.query_unbiased, lanes)[:, rows, None]
            free = free | call.select(operands.key_unbiased, lanes)[:, None, cols]
            distance = distance.masked_fill(free, 0)
        future = None
        slope = call.slopes[chosen, None, None]
        if call.future_slopes is not None:
            future = offset < 0
            slope = torch.where(future, call.future_slopes[chosen, None, None], slope)
        bias = slope * distance
        if call.infinite:
            bias = torch.where(distance == 0, 0.0, bias)
            gone = bias == torch.inf
            hidden = gone if hidden is None else hidden | gone
        return Pairs(distance, future, bias, hidden)


def _distance(call: Call, lanes: tuple[int, ...], rows: slice, cols: Columns) -> tuple[Tensor, Tensor]:
    """Query position minus key position (on a line), and their distance, (n, M, N)."""
    query, key = (call.select(positions, lanes) for positions in call.positions)
    query, key, dtype = query[:, rows], key[:, cols], call.query.dtype
    if call.problem.options.metric is None:
        # Integers until here: their difference is exact, and so is its conversion up to 2^24.
        offset = query[:, :, None] - key[:, None, :]
        return offset, offset.abs().to(dtype)
    total = torch.zeros((), dtype=dtype, device=query.device)
    for coordinate in range(query.shape[2]):
        difference = query[:, :, None, coordinate] - key[:, None, :, coordinate]
        total = total + (difference.abs() if call.problem.options.metric == "manhattan" else difference.square())
    total = total if call.problem.options.metric == "manhattan" else total.sqrt()
    return total, total


def _hidden(call: Call, lanes: tuple[int, ...], rows: slice, cols: Columns, offset: Tensor) -> Tensor | None:
    """(n or lanes, M, N) bool: what the masks hide; None: nothing."""
    operands, options = call.operands, call.problem.options
    causes: list[Tensor] = []
    rank = None if operands.key_ranks is None else call.select(operands.key_ranks, lanes)[:, None, cols]
    if options.causal:
        later = offset < 0
        causes.append(later if rank is None else later & (rank >= options.prefix))
    if options.left is not None or options.right is not None:
        outside = torch.zeros_like(offset, dtype=torch.bool)
        if options.left is not None:
            outside |= offset > options.left
        if options.right is not None:
            outside |= offset < -options.right
        causes.append(outside if rank is None else outside & (rank >= options.sinks))
    if operands.key_mask is not None:
        causes.append(~call.select(operands.key_mask, lanes)[:, None, cols])
    if operands.query_segments is not None and operands.key_segments is not None:
        query_segments = call.select(operands.query_segments, lanes)[:, rows, None]
        causes.append(query_segments != call.select(operands.key_segments, lanes)[:, None, cols])
    if operands.attn_mask is not None:
        causes.append(~_mask(call, operands.attn_mask, lanes, rows, cols))
    if not causes:
        return None
    hidden = causes[0]
    for cause in causes[1:]:
        hidden = hidden | cause
    return hidden


def _mask(call: Call, mask: Tensor, lanes: tuple[int, ...], rows: slice, cols: Columns) -> Tensor:
    """(n, M or 1, N or 1) of a mask whose dimensions may each be 1."""
    mask = mask[:, :, rows if mask.shape[2] > 1 else slice(None)]
    mask = mask[..., cols if mask.shape[3] > 1 else slice(None)]
    batch = [lane // call.problem.heads % mask.shape[0] for lane in lanes]
    head = [lane % call.problem.heads % mask.shape[1] for lane in lanes]
    if len(set(batch)) == 1 and len(set(head)) == 1:
        return mask[batch[0], head[0] : head[0] + 1]
    device = mask.device
    return mask[torch.tensor(batch, device=device), torch.tensor(head, device=device)]


def scores(call: Call, pairs: Pairs, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
    """cap(scale * q @ k.T) - bias, -inf where hidden, (lanes, M, N); and tanh(content / softcap) under a soft cap."""
    options = call.problem.options
    if options.softcap is None:
        # One pass: beta * bias + alpha * product.
        content = torch.baddbmm(pairs.bias, query, key.mT, beta=-1, alpha=options.scale)
        tanh = None
    else:
        tanh = torch.bmm(query, key.mT).mul_(options.scale / options.softcap).tanh_()
        content = tanh * options.softcap - pairs.bias
    if pairs.hidden is not None:
        content.masked_fill_(pairs.hidden, -torch.inf)
    return content, tanh


def keep(call: Call, lanes: tuple[int, ...], rows: slice, cols: Columns) -> Tensor | None:
    """(lanes, M, N): 1 / (1 - p) for pairs that dropout keeps, else 0; None without dropout."""
    operands, problem = call.operands, call.problem
    if operands.seed is None:
        return None
    device = problem.device
    lane = torch.tensor(lanes, device=device)[:, None]
    row = torch.arange(rows.start, rows.stop, device=device)
    batch, head = lane // problem.heads, lane % problem.heads
    first, last = (cols.start, cols.stop) if isinstance(cols, slice) else (int(cols[0]), int(cols[-1]) + 1)
    kept = keep_mask(operands.seed, problem.options.dropout_p, batch, head, row, first, last - first)
    kept = kept if isinstance(cols, slice) else kept[..., cols - first]
    return kept.to(call.query.dtype).div_(1 - problem.options.dropout_p)


@dataclass(frozen=True)
class Softmax:
    """A softmax under way, relative to the largest score so far: normalised once, at the end, by the sum as it is.

    Dividing by exp(lse) instead would multiply the output by the rounding of the lse, which grows with the distance.
    """

    peak: Tensor
    """(L, T): the largest score; -inf before any."""
    weight: Tensor
    """(L, T): sum of exp(score - peak)."""
    out: Tensor | None
    """(L, T, V): sum of exp(score - peak) * value; None where only the lse is wanted."""

    @staticmethod
    def of(call: Call, lanes: int, *, with_value: bool = True) -> "Softmax":
        """Before any key."""
        rows = (lanes, call.problem.queries)
        out = call.query.new_zeros((*rows, call.problem.value_dim)) if with_value else None
        return Softmax(call.query.new_full(rows, -torch.inf), call.query.new_zeros(rows), out)

    @property
    def lse(self) -> Tensor:
        """(L, T); -inf where nothing was visible."""
        return self.peak + self.weight.log()

    def mean(self) -> Tensor:
        """(L, T, V): the output; 0 where nothing was visible."""
        assert self.out is not None
        return self.out / torch.where(self.weight == 0, 1.0, self.weight).unsqueeze(-1)


def forward_piece(call: Call, piece: Rectangle, running: Softmax) -> None:
    """Merge a rectangle's part into the softmax of its rows."""
    lanes, rows = piece.lanes, piece.rows
    chosen, kv = index(lanes, call.problem.device), kv_index(call, lanes)
    cols = columns(piece.runs, call.problem.device)
    pairs = Pairs.of(call, lanes, rows, cols)
    weights, _ = scores(call, pairs, call.query[chosen, rows], call.key[:, cols][kv])
    old = running.peak[chosen, rows]
    peak = torch.maximum(old, weights.amax(-1))
    shift = torch.where(peak == -torch.inf, 0.0, peak)
    part = weights.sub_(shift.unsqueeze(-1)).exp_()
    fade = (old - shift).exp()
    running.weight[chosen, rows] = running.weight[chosen, rows] * fade + part.sum(-1)
    running.peak[chosen, rows] = peak
    if running.out is None:
        return
    kept = keep(call, lanes, rows, cols)
    if kept is not None:
        part.mul_(kept)
    fresh = torch.bmm(part, call.value[:, cols][kv])
    running.out[chosen, rows] = fresh.add_(running.out[chosen, rows] * fade.unsqueeze(-1))
