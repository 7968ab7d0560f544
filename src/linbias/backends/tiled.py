# SPDX-License-Identifier: Apache-2.0
"""Pure torch, tile by tile: what the ledgers prove negligible is skipped, and memory is linear in the length.

Forward and backward share one course: summarise queries and keys, let the ledger choose what to visit, compute that.
Two engines do the computing. The fused one calls the CPU's own attention on bands of tiles; the plain one evaluates
the formula on rectangles of pairs, anywhere and with every option.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._bounds import Keys, table_sizes
from .._ledger import Visits, backward_visits, forward_visits, near_mass, rounded_mass
from ..semantics._boxes import Boxes, gaps, maybe_visible
from ..semantics.bounds import upper_norms
from ..semantics.problem import Gradients, Operands, Problem, Result
from . import _tiled_fused as fused
from ._tiled_backward import Running, backward_piece
from ._tiled_call import Call, batch_lanes, flat_heads
from ._tiled_pairs import Softmax, forward_piece, pieces
from ._tiled_plan import Rectangle, bands, rectangles
from ._tiled_unseen import without_unseen

NAME = "tiled"
COMPOSITE = False

# Scores beyond this may overflow to inf, which the fused kernel's added mask would turn into NaN.
_SAFE_SCORE = 1e30


def why_not(problem: Problem) -> str | None:
    """It runs everything but functorch's gradients."""
    if "transformed" in problem.features:
        return "its backward recomputes tile by tile, which functorch cannot differentiate"
    return None


def forward(problem: Problem, operands: Operands) -> Result:
    """Visit the nearest tiles, and of the others those that could matter."""
    call = without_unseen(Call.of(problem, operands))
    lanes = problem.batch * problem.heads
    plan = Plan.of_forward(call) if lanes * problem.queries * problem.keys > 0 else None
    if plan is not None and plan.fusible:
        banded = bands(problem, plan.visits)
        out, lse = fused.forward(call, banded)
        computed = banded.pairs(lanes)
    else:
        running, computed = Softmax.of(call, lanes), [0] * lanes
        for piece in () if plan is None else _pieces(problem, plan.visits):
            forward_piece(call, piece, running)
            for lane in piece.lanes:
                computed[lane] += (piece.rows.stop - piece.rows.start) * piece.width
        out, lse = running.mean(), running.lse
    skipped = torch.zeros_like(lse) if plan is None else _skipped(plan.visits, lse)
    shape = (problem.batch, problem.heads)
    return Result(
        out=out.unflatten(0, shape).to(problem.dtype),
        lse=lse.unflatten(0, shape),
        lse_low=torch.zeros_like(lse).unflatten(0, shape),
        skipped=skipped.unflatten(0, shape),
        computed=torch.tensor(computed, dtype=torch.int64, device=problem.device).view(shape),
    )


def backward(
    problem: Problem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """Recompute what matters for rows and keys, judged afresh from `lse`."""
    call = without_unseen(Call.of(problem, operands))
    running = Running.of(call, out, lse, grad_out, grad_lse)
    if problem.batch * problem.heads * problem.queries * problem.keys == 0:
        return running.gradients(call, needs)
    slopes_too = needs[3] or needs[4]
    plan = Plan.of_backward(call, lse, slopes_too=slopes_too)
    if plan.fusible and not slopes_too and grad_lse is None and grad_out is not None:
        found = fused.backward(call, bands(problem, plan.visits), flat_heads(out, lse.dtype), running)
        return fused.gradients(problem, found, needs)
    # Nothing may come from a query that saw nothing, whatever it holds.
    call = replace(call, query=call.query.masked_fill((lse == -math.inf).flatten(0, 1).unsqueeze(-1), 0.0))
    for piece in _pieces(problem, plan.visits):
        backward_piece(call, piece, running, needs)
    return running.gradients(call, needs)


@dataclass(frozen=True)
class Plan:
    """What one pass visits, and by which engine it may."""

    visits: Visits
    fusible: bool
    """The fused engine can run the call."""

    @staticmethod
    def of_forward(call: Call) -> "Plan":
        """Judged by lower bounds of what the rows weigh."""
        problem, operands = call.problem, call.operands
        keys, norms = Keys.of(problem, operands), upper_norms(operands.query)
        if _one_tile(problem):
            visits = _everything(problem)
        else:
            visits = forward_visits(problem, operands, keys, norms, _mass(call, keys, norms))
        return Plan(visits, fused.available(problem) and _tame(call, keys, norms))

    @staticmethod
    def of_backward(call: Call, lse: Tensor, *, slopes_too: bool) -> "Plan":
        """Judged by what the rows did weigh."""
        problem, operands = call.problem, call.operands
        keys, norms = Keys.of(problem, operands), upper_norms(operands.query)
        if _one_tile(problem):
            visits = _everything(problem)
        else:
            visits = backward_visits(problem, operands, keys, norms, lse, slopes_too=slopes_too)
        return Plan(visits, fused.available(problem) and _tame(call, keys, norms))


def _one_tile(problem: Problem) -> bool:
    strip, block = table_sizes(problem)
    return problem.queries <= strip and problem.keys <= block


def _everything(problem: Problem) -> Visits:
    """A table of one tile has nothing to skip."""
    lanes = problem.batch * problem.heads
    strip, block = table_sizes(problem)
    everything = torch.ones((lanes, 1, 1), dtype=torch.bool, device="cpu")
    return Visits(everything, torch.zeros((lanes, 1), device="cpu"), strip, block)


def _mass(call: Call, keys: Keys, norms: Tensor) -> Tensor:
    """(B, H, T): a proven lower bound of the log of each row's weight; -inf where none is of use."""
    problem, operands, options = call.problem, call.operands, call.problem.options
    if options.tolerance == 0 or not bool(keys.norms.isfinite().any()):
        return torch.full_like(norms, -math.inf)
    hiding = (operands.query_positions, operands.query_segments, operands.attn_mask, operands.query_unbiased)
    if options.softcap is not None or any(tensor is not None for tensor in hiding):
        return _sampled_mass(call, keys, norms)
    return near_mass(problem, operands, keys, norms)


def _sampled_mass(call: Call, keys: Keys, norms: Tensor) -> Tensor:
    """A lower bound of each row's weight for any call: the true scores of the strip's nearest block."""
    problem, operands = call.problem, call.operands
    strip, block = table_sizes(problem)
    rows = Boxes.of_queries(operands, strip)
    possible = maybe_visible(problem.options, operands.attn_mask, rows, keys.boxes).any(1)
    nearest = torch.where(possible, gaps(rows, keys.boxes, problem.options.metric).near, math.inf).argmin(-1)
    running = Softmax.of(call, problem.batch * problem.heads, with_value=False)
    for item, blocks in enumerate(nearest.tolist()):
        lanes = batch_lanes(problem, item if len(nearest) > 1 else None)
        for place, chosen in enumerate(blocks):
            span = slice(place * strip, min((place + 1) * strip, problem.queries))
            run = (chosen * block, min((chosen + 1) * block, problem.keys))
            for piece in pieces(Rectangle(lanes, span, (run,)), _budget(problem)):
                forward_piece(call, piece, running)
    return rounded_mass(problem, keys, norms, running.lse.view_as(norms))


def _pieces(problem: Problem, visits: Visits) -> Iterator[Rectangle]:
    """The work of the plain engine, in rectangles that fit its memory."""
    cpu = problem.device.type == "cpu"
    for rectangle in rectangles(problem, visits, rows=128 if cpu else 256, round_to=1 if cpu else 8):
        yield from pieces(rectangle, _budget(problem))


def _budget(problem: Problem) -> int:
    """Pairs a rectangle: on a CPU, what stays in its caches."""
    return 1 << 19 if problem.device.type == "cpu" else 1 << 24


def _tame(call: Call, keys: Keys, norms: Tensor) -> bool:
    """No NaN, inf or overflow in scores or bias, and no mask by content: reads values, so only where that is cheap."""
    operands, problem = call.operands, call.problem
    masks = (operands.key_mask, operands.attn_mask, operands.query_segments, operands.query_unbiased)
    if any(mask is not None for mask in masks):
        return False
    slopes = call.slopes if call.future_slopes is None else torch.cat([call.slopes, call.future_slopes])
    bias = float(slopes.abs().max()) * (problem.queries + problem.keys)
    score = float(norms.max()) * float(keys.norms.max()) * abs(problem.options.scale)
    # As `<`, so that NaN is not tame.
    return score < _SAFE_SCORE and bias < _SAFE_SCORE


def _skipped(visits: Visits, lse: Tensor) -> Tensor:
    """(L, T): each row's bound, rounded up."""
    spent = visits.spent.repeat_interleave(visits.strip, 1)[:, : lse.shape[1]]
    return (spent * (1 + 2 * torch.finfo(lse.dtype).eps)).to(lse.dtype).to(lse.device)
