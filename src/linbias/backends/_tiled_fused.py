# SPDX-License-Identifier: Apache-2.0
"""The CPU's fused attention, called on bands.

Within a tile the bias depends on i - j alone. With the rows of the tile reversed, pair (i', j) reads entry i' + j of
one ramp, so the bias is a view with strides (1, 1) and costs no memory; and as the keys of a band's next tile start a
fixed number of keys later, all tiles of a band are one batched call on an overlapping view of the keys.
"""

import torch
from torch import Tensor

from ..semantics.problem import Gradients, Problem
from ._tiled_backward import Running
from ._tiled_call import Call, index, kv_index
from ._tiled_plan import Band, Bands

# Private operators: looked up by name, because another torch may not have them; the plain engine needs none.
_ATEN = torch.ops.aten
_FORWARD = getattr(_ATEN, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(_ATEN, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
_OVERLAP = 1 << 17
"""Keys, counted with repetition, that one backward call may hold gradients of."""


def available(problem: Problem) -> bool:
    """Whether the fused kernel can run this call, as far as metadata tells: plain positions and nothing but bands."""
    options = problem.options
    return (
        _FORWARD is not None
        and _BACKWARD is not None
        and problem.device.type == "cpu"
        and problem.head_dim == problem.value_dim > 0
        and "query_positions" not in problem.features
        and options.metric is None
        and options.softcap is None
        and options.sinks == 0
        and options.prefix == 0
        and options.dropout_p == 0
    )


def ramp(call: Call) -> Tensor:
    """(L, T + 2 S): minus the bias at distance S, S - 1 ... (past), 0, -1 ... (future); -inf where invisible."""
    problem, options = call.problem, call.problem.options
    places = (problem.keys, -problem.keys - problem.queries, -1)
    distance = torch.arange(*places, dtype=call.slopes.dtype, device=call.slopes.device)
    past, future = call.slopes[:, None], call.slopes if call.future_slopes is None else call.future_slopes
    steep = torch.where(distance >= 0, past, future[:, None])
    bias = -(steep * distance.abs())
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if options.causal:
        hidden |= distance < 0
    if options.left is not None:
        hidden |= distance > options.left
    if options.right is not None:
        hidden |= distance < -options.right
    return bias.masked_fill_(hidden, -torch.inf)


def forward(call: Call, plan: Bands) -> tuple[Tensor, Tensor]:
    """(L, T, V) output and (L, T) lse."""
    problem = call.problem
    out = call.query.new_zeros((problem.batch * problem.heads, problem.queries, problem.value_dim))
    lse = call.query.new_full(out.shape[:2], -torch.inf)
    bias = ramp(call)
    for band, lanes in plan.near.items():
        chosen, rows = index(tuple(lanes), problem.device), slice(band.first_row, band.last_row)
        out[chosen, rows], lse[chosen, rows] = _attend(call, bias, band, tuple(lanes))
    for band, lanes in plan.far.items():
        chosen, rows = index(tuple(lanes), problem.device), slice(band.first_row, band.last_row)
        part, part_lse = _attend(call, bias, band, tuple(lanes))
        total = torch.logaddexp(lse[chosen, rows], part_lse)
        shift = torch.where(total == -torch.inf, 0.0, total)
        old = out[chosen, rows] * (lse[chosen, rows] - shift).exp().unsqueeze(-1)
        out[chosen, rows] = old + part * (part_lse - shift).exp().unsqueeze(-1)
        lse[chosen, rows] = total
    return out, lse


def _attend(call: Call, bias: Tensor, band: Band, lanes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(n, rows, V) and (n, rows) of one band."""
    assert _FORWARD is not None
    query, key, value, mask = _views(call, bias, band, lanes)
    part, lse = _FORWARD(query, key, value, 0.0, False, attn_mask=mask, scale=call.problem.options.scale)
    part, lse = part.flip(2).flatten(1, 2), lse.flip(2).flatten(1, 2)
    blind = _blind_rows(call.problem, band)
    if blind is not None:
        # The kernel gives a row without visible key an lse of 0.
        part, lse = part.masked_fill(blind[:, None], 0.0), lse.masked_fill(blind, -torch.inf)
    return part, lse


def _tiles(rows: Tensor, chosen: slice | Tensor, band: Band) -> Tensor:
    """(L, T, ...) as the band's (n, count, rows, ...), the rows of each tile reversed."""
    return rows[:, band.first_row : band.last_row][chosen].unflatten(1, (band.count, band.rows)).flip(2)


def _views(call: Call, bias: Tensor, band: Band, lanes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query (n, count, rows, D), key and value (n, count, span, D), mask (n, 1, rows, span)."""
    problem = call.problem
    chosen, kv = index(lanes, problem.device), kv_index(call, lanes)
    last_key = band.first_key + (band.count - 1) * band.rows + band.span
    key, value = (
        tensor[:, band.first_key : last_key][kv].unfold(1, band.span, band.rows).mT for tensor in (call.key, call.value)
    )
    # Pair (0, 0) of the reversed tile: its last row and its first key.
    farthest = band.first_row + band.rows - 1 + problem.keys - problem.queries - band.first_key
    start = problem.keys - farthest
    line = bias[:, start : start + band.rows + band.span - 1][chosen]
    mask = line.unfold(1, band.span, 1).unsqueeze(1)
    return _tiles(call.query, chosen, band), key, value, mask


def _blind_rows(problem: Problem, band: Band) -> Tensor | None:
    """(rows of the band,) bool: sees none of its keys; None where that is impossible."""
    options, offset = problem.options, problem.keys - problem.queries
    right = 0 if options.causal else options.right
    place = torch.arange(band.first_row, band.last_row, device=problem.device) + offset
    first = band.first_key + torch.arange(band.count, device=problem.device).repeat_interleave(band.rows) * band.rows
    blind = torch.zeros_like(place, dtype=torch.bool)
    if right is not None:
        blind |= first - place > right
    if options.left is not None:
        blind |= place - (first + band.span) >= options.left
    return blind if bool(blind.any()) else None


def backward(call: Call, plan: Bands, out: Tensor, running: Running) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (L, T, D), (K, S, D), (K, S, V); out and lse are the whole rows', so each band adds its exact part."""
    problem, grad_query, grad_out = call.problem, running.query, running.grad_out
    assert grad_out is not None, "the plain engine takes calls in which only the lse has a gradient"
    # Overlapping tiles add into views a whole number of tiles long, which may end beyond the last key.
    room = max([band.rows for band in (*plan.near, *plan.far)], default=0)
    longer = (call.key.shape[0], problem.keys + room, problem.head_dim)
    grad_key, grad_value = call.key.new_zeros(longer), call.value.new_zeros(longer)
    bias = ramp(call)
    for band, lanes in (*plan.near.items(), *plan.far.items()):
        for piece in _pieces(band):
            chosen, rows = index(tuple(lanes), problem.device), slice(piece.first_row, piece.last_row)
            query, key, value, mask = _views(call, bias, piece, tuple(lanes))
            assert _BACKWARD is not None
            found = _BACKWARD(
                _tiles(grad_out, chosen, piece),
                query,
                key,
                value,
                _tiles(out, chosen, piece),
                _tiles(running.lse, chosen, piece),
                0.0,
                False,
                attn_mask=mask,
                scale=problem.options.scale,
            )
            grad_query[chosen, rows] += found[0].flip(2).flatten(1, 2)
            for total, part in ((grad_key, found[1]), (grad_value, found[2])):
                _add_overlapping(call, total, part, piece, lanes)
    return grad_query, grad_key[:, : problem.keys], grad_value[:, : problem.keys]


def _pieces(band: Band) -> list[Band]:
    """The band in parts whose keys, counted with repetition, stay few."""
    step = max(1, _OVERLAP // band.span)
    return [
        Band(
            band.first_row + first * band.rows,
            min(step, band.count - first),
            band.rows,
            band.first_key + first * band.rows,
            band.span,
        )
        for first in range(0, band.count, step)
    ]


def _add_overlapping(call: Call, total: Tensor, part: Tensor, band: Band, lanes: list[int]) -> None:
    """Add (n, count, span, D), whose tiles overlap in the keys, into (K, S + room, D) a tile's stretch at a time."""
    for place, lane in enumerate(lanes):
        target = total[lane // call.problem.group]
        for first in range(0, band.span, band.rows):
            width = min(band.rows, band.span - first)
            stretch = target[band.first_key + first : band.first_key + first + band.count * band.rows]
            stretch.unflatten(0, (band.count, band.rows))[:, :width] += part[place, :, first : first + width]


def gradients(problem: Problem, found: tuple[Tensor, Tensor, Tensor], needs: tuple[bool, ...]) -> Gradients:
    """In the shapes and dtypes of the call."""
    heads = (problem.heads, problem.kv_heads, problem.kv_heads)
    query, key, value = (
        tensor.unflatten(0, (problem.batch, count)).to(problem.dtype) if need else None
        for tensor, count, need in zip(found, heads, needs, strict=False)
    )
    return Gradients(query, key, value, None, None)
