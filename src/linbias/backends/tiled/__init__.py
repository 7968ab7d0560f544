# SPDX-License-Identifier: Apache-2.0
"""Backend `tiled`: torch operations tile by tile; what the ledger proves negligible is skipped, on any device.

Forward and backward share one course: a `Table` of strips and blocks says where they lie and what may be visible
(table.py), a ledger chooses what to visit (ledger.py), which is computed in pieces of many tiles (pieces.py, tile.py).
Memory is linear in the length. Of a GPU it fetches the table, the norms and the slopes once a call.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ...semantics.blocks import dense
from ...semantics.bounds import upper_norms
from ...semantics.problem import FEATURES, TRANSFORMED, Gradients, Operands, Problem, Result
from . import ledger
from .ledger import Visits
from .pieces import Call, pieces_of
from .table import ANY, Table
from .tile import GradientSums, Softmax

NAME = "tiled"
COMPOSITE = False
INSTALLED = True
READS_PAGES = False
SUPPORTS = FEATURES - {TRANSFORMED}
_PAIRS = 1 << 20
"""Pairs looked at together for keys that nobody sees."""


def why_not(problem: Problem) -> str | None:
    """It runs everything but what would have to see through its backward, which recomputes tile by tile."""
    return problem.beyond(SUPPORTS)


def forward(problem: Problem, operands: Operands) -> Result:
    """Visit the nearest tiles, and of the others those that could matter."""
    call, unit = _within_range(_without_unseen(Call.of(problem, operands)))
    softmax, rows = Softmax.of(call), (problem.batch, problem.heads, problem.queries)
    computed = torch.zeros(math.prod(rows[:2]), dtype=torch.int64, device="cpu")
    skipped = torch.zeros(rows, device="cpu")
    if math.prod(rows) * problem.keys > 0:
        visits = visits_of(call)
        skipped = _skipped(visits, problem.queries, problem.accumulator)
        for piece in pieces_of(problem, visits):
            softmax.add(call, piece)
            computed += piece.bh.bincount(minlength=len(computed)) * (piece.height * piece.width)
    lse, lse_low = softmax.lse(problem.accumulator)
    return Result(
        out=softmax.mean().div_(unit).to(problem.dtype).view(*rows, problem.value_dim),
        lse=lse.view(rows),
        lse_low=lse_low.view(rows),
        skipped=skipped.to(problem.device, problem.accumulator).view(rows),
        computed=computed.to(problem.device).view(rows[:2]),
    )


def output(problem: Problem, operands: Operands) -> Tensor:
    """The output of `forward`."""
    return forward(problem, operands).out


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
    call = _without_unseen(Call.of(problem, operands))
    sums = GradientSums.of(call, (out, lse, lse_low), grad_out, grad_lse)
    if lse.numel() * problem.keys > 0:
        # Nothing may come from a query that saw nothing, whatever it holds.
        call = replace(call, query=call.query.masked_fill((lse == -math.inf).view(-1, 1), 0.0))
        for piece in pieces_of(problem, _backward_visits(call, lse, slopes_too=needs[3] or needs[4])):
            sums.add(call, piece, needs)
    return sums.gradients(call, needs)


def visits_of(call: Call) -> Visits:
    """What a forward pass visits, judged by lower bounds of what the rows weigh."""
    table = Table.of(call.problem, call.operands)
    if table.single:
        return ledger.every_visit(table, call.operands)
    norms = upper_norms(call.operands.query)
    return ledger.forward_visits(table, call.operands, norms, _mass(call, table, norms))


def _backward_visits(call: Call, lse: Tensor, *, slopes_too: bool) -> Visits:
    """Judged by what the rows did weigh."""
    table = Table.of(call.problem, call.operands)
    if table.single:
        return ledger.every_visit(table, call.operands)
    norms = upper_norms(call.operands.query)
    return ledger.backward_visits(table, call.operands, norms, lse, slopes_too=slopes_too)


def _mass(call: Call, table: Table, norms: Tensor) -> Tensor:
    """(B, H, T): a proven lower bound of the log of each row's weight; -inf where none is of use."""
    options = call.problem.options
    if options.tolerance == 0 or not bool(table.norms.isfinite().any()):
        return torch.full_like(norms, -math.inf)
    if options.softcap is not None or options.metric is not None:
        return _sampled_mass(call, table, norms)
    return ledger.near_mass(table, call.operands, norms)


def _sampled_mass(call: Call, table: Table, norms: Tensor) -> Tensor:
    """A lower bound for any call: the true scores of the strip's nearest block."""
    problem, device = call.problem, call.problem.device
    nearest = torch.where(table.visible.some.any(1), table.near[:, 0], math.inf).argmin(-1)
    bh = torch.arange(problem.batch * problem.heads, device="cpu")
    nearest = nearest.expand(problem.batch, -1)[bh // problem.heads]
    visits = table.near.new_zeros((len(bh), *table.near.shape[2:]), dtype=torch.bool)
    visits.scatter_(2, nearest.unsqueeze(-1), True)
    sides = torch.full_like(visits, ANY, dtype=torch.int8)
    softmax = Softmax.of(call, with_value=False)
    for piece in pieces_of(problem, Visits(visits, sides, visits, table.strip, table.block)):
        softmax.add(call, piece)
    return ledger.rounded_mass(table, norms, softmax.lse(norms.dtype)[0].view_as(norms).to(device))


def _skipped(visits: Visits, queries: int, dtype: torch.dtype) -> Tensor:
    """(BH, T): each row's bound, rounded up."""
    spent = visits.spent.repeat_interleave(visits.strip, 1)[:, :queries]
    return (spent * (1 + 2 * torch.finfo(dtype).eps)).to(dtype)


def _within_range(call: Call) -> tuple[Call, float]:
    """The call with values in a unit small enough for their sums, which may leave the range although no mean does."""
    value = call.value
    if value.numel() == 0 or float(value.abs().amax()) * call.problem.keys <= torch.finfo(value.dtype).max:
        return call, 1.0
    return replace(call, value=value * 2.0**-64), 2.0**-64


def _without_unseen(call: Call) -> Call:
    """The call with keys that no query of their item can see zeroed where they hold NaN or inf: 0 * NaN is NaN in a
    product.

    Finite contents are harmless behind a mask, so only what is not finite is looked at: as a rule, nothing.
    """
    # A sum is finite if all its terms are, or it overflowed, which only costs the closer look.
    if bool((call.key.sum() + call.value.sum()).isfinite()) or call.rows == 0:
        return call
    problem, (key, value) = (
        call.problem,
        (each.clone().view(-1, call.problem.keys, each.shape[1]) for each in (call.key, call.value)),
    )
    suspects = (~(key.isfinite().all(-1) & value.isfinite().all(-1))).any(0).nonzero().squeeze(-1)
    seen = torch.zeros((problem.batch, problem.heads, len(suspects)), dtype=torch.bool, device=problem.device)
    step = max(1, _PAIRS // max(1, seen.numel()))
    for first in range(0, problem.queries, step):
        seen |= dense(call.operands, problem.options, slice(first, first + step), suspects)[1].any(2)
    unseen = ~seen.view(len(key), problem.group, -1).any(1).unsqueeze(-1)
    for tensor in (key, value):
        tensor[:, suspects] = tensor[:, suspects].masked_fill(unseen, 0.0)
    return replace(call, key=key.flatten(0, 1), value=value.flatten(0, 1))
