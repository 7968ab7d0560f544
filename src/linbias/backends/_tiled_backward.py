# SPDX-License-Identifier: Apache-2.0
"""The derivative of the plain engine, rectangle by rectangle, from the saved output and lse.

With P the weights, K the kept ones under dropout and d = grad_out @ V.T::

    dS = P (K d - rowsum(grad_out out) + grad_lse)      S: cap(content) - bias
    grad_value = (P K).T grad_out    grad_query = scale dS' key    grad_key = scale dS'.T query
    grad_slope = - sum dS distance                      dS' = dS (1 - tanh^2) under a soft cap
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..semantics.problem import Gradients
from ._tiled_call import Call, flat_heads, index, kv_index
from ._tiled_pairs import Pairs, columns, keep, scores
from ._tiled_plan import Rectangle


@dataclass(frozen=True)
class Running:
    """What a backward reads for each row, and adds up."""

    grad_out: Tensor | None
    """(L, T, V); None: only the lse has a gradient, and values play no part."""
    lse: Tensor
    """(L, T); inf for rows that saw nothing."""
    shift: Tensor
    """(L, T): rowsum(grad_out out) - grad_lse."""
    query: Tensor
    """(L, T, D), a sum; likewise below."""
    key: Tensor
    """(K, S, D)."""
    value: Tensor
    """(K, S, V)."""
    slopes: Tensor
    """(2, L): past and future."""

    @staticmethod
    def of(call: Call, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None) -> "Running":
        """Start from zero; (B, H, ...) tensors come in."""
        dtype = call.query.dtype
        lse = lse.flatten(0, 1)
        blind = lse == -torch.inf
        flat, shift = None, torch.zeros_like(lse)
        if grad_out is not None:
            # Nothing may come from rows that saw nothing: 0 * NaN is NaN in the products.
            flat = flat_heads(grad_out, dtype).masked_fill(blind.unsqueeze(-1), 0.0)
            shift = (flat * out.to(dtype).flatten(0, 1)).sum(-1)
        if grad_lse is not None:
            shift = shift - grad_lse.to(dtype).flatten(0, 1).masked_fill(blind, 0.0)
        return Running(
            grad_out=flat,
            lse=lse.masked_fill(blind, torch.inf),
            shift=shift,
            query=torch.zeros_like(call.query),
            key=torch.zeros_like(call.key),
            value=torch.zeros_like(call.value),
            # A slope's gradient sums over all pairs; fp64 where there is one, so that only its terms round.
            slopes=torch.zeros((2, lse.shape[0]), dtype=_widest(lse.device), device=lse.device),
        )

    def gradients(self, call: Call, needs: tuple[bool, ...]) -> Gradients:
        """In the shapes and dtypes of the call."""
        problem, operands = call.problem, call.operands
        past, future = (each.unflatten(0, (problem.batch, problem.heads)) for each in self.slopes)
        if operands.future_slopes is None:
            past = past + future
        grad_future = None if operands.future_slopes is None else _unbroadcast(future, operands.future_slopes)

        def shaped(total: Tensor, heads: int) -> Tensor:
            return total.unflatten(0, (problem.batch, heads)).to(problem.dtype)

        return Gradients(
            query=shaped(self.query, problem.heads) if needs[0] else None,
            key=shaped(self.key, problem.kv_heads) if needs[1] else None,
            value=shaped(self.value, problem.kv_heads) if needs[2] else None,
            slopes=_unbroadcast(past, operands.slopes) if needs[3] else None,
            future_slopes=grad_future if needs[4] else None,
        )


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _unbroadcast(gradient: Tensor, like: Tensor) -> Tensor:
    return (gradient if gradient.shape == like.shape else gradient.sum(0, keepdim=True)).to(like.dtype)


def backward_piece(call: Call, piece: Rectangle, running: Running, needs: tuple[bool, ...]) -> None:
    """Add one rectangle's part to every gradient that is needed."""
    lanes, rows, device = piece.lanes, piece.rows, call.problem.device
    chosen, kv, cols = index(lanes, device), kv_index(call, lanes), columns(piece.runs, device)
    query, key, value = call.query[chosen, rows], call.key[:, cols][kv], call.value[:, cols][kv]
    grad_out = None if running.grad_out is None else running.grad_out[chosen, rows]
    pairs = Pairs.of(call, lanes, rows, cols)
    content, tanh = scores(call, pairs, query, key)
    weights = content.sub_(running.lse[chosen, rows].unsqueeze(-1)).exp_()
    if piece.whole:
        # The lse was rounded, by more than the weights deserve: they sum to 1.
        total = weights.sum(-1, keepdim=True)
        weights.div_(total.masked_fill_(total == 0, 1.0))
    kept = keep(call, lanes, rows, cols)
    shift = running.shift[chosen, rows].unsqueeze(-1)
    if grad_out is None:
        grad = weights * -shift
    else:
        if needs[2]:
            _add_keys(call, running.value, lanes, cols, (weights if kept is None else weights * kept).mT @ grad_out)
        grad = torch.bmm(grad_out, value.mT)
        if kept is not None:
            grad.mul_(kept)
        grad.sub_(shift).mul_(weights)
    if pairs.hidden is not None:
        # A hidden key's value may be anything finite, so its product may be inf, and inf * 0 is NaN.
        grad.masked_fill_(pairs.hidden, 0.0)
    if needs[3] or needs[4]:
        _add_slopes(running.slopes, chosen, pairs, grad)
    if tanh is not None:
        grad.mul_(1 - tanh.square())
    grad.mul_(call.problem.options.scale)
    if needs[0]:
        running.query[chosen, rows] += torch.bmm(grad, key)
    if needs[1]:
        _add_keys(call, running.key, lanes, cols, torch.bmm(grad.mT, query))


def _add_slopes(total: Tensor, chosen: slice | Tensor, pairs: Pairs, grad: Tensor) -> None:
    terms = grad * pairs.distance
    if pairs.future is None:
        total[0, chosen] -= terms.sum((1, 2))
        return
    later = terms.masked_fill(~pairs.future, 0.0).sum((1, 2))
    total[0, chosen] -= terms.masked_fill(pairs.future, 0.0).sum((1, 2))
    total[1, chosen] -= later


def _add_keys(call: Call, total: Tensor, lanes: tuple[int, ...], cols: slice | Tensor, part: Tensor) -> None:
    """Add (lanes, N, ...) to the keys they belong to; lanes of one group add to the same."""
    if call.problem.group == 1:
        target = index(lanes, call.problem.device)
        if isinstance(target, slice) or isinstance(cols, slice):
            total[target, cols] += part
        else:
            total[target[:, None], cols] += part
        return
    for place, lane in enumerate(lanes):
        total[lane // call.problem.group, cols] += part[place]
