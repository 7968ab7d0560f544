# SPDX-License-Identifier: Apache-2.0
"""Backend `triton`: GPU kernels. Not measured on a GPU yet: its tests run them in Triton's interpreter.

The host summarises blocks of tokens and judges tiles by torch operations on the device (judge.py), which gives each
strip of rows the list of the key blocks it visits; kernels compute those (kernels/). Nothing waits for the device.
"""

import math
from importlib.util import find_spec

import torch
from torch import Tensor

from ...semantics.problem import Gradients, Operands, Problem, Result
from .arguments import Found, Visits, unit_of
from .judge import Lengths, Shares, Table, block_lengths, fitting, rounded_mass
from .launch import Launch, interpreted, tiles_of

NAME = "triton"
COMPOSITE = False
READS_PAGES = False
SUPPORTS = frozenset(
    (
        *("future_slopes", "query_positions", "key_positions", "query_segments", "key_segments", "key_mask"),
        *("key_ranks", "query_unbiased", "key_unbiased", "bound_norms", "seed", "causal", "left", "right", "sinks"),
        *("prefix", "metric", "scale", "softcap", "dropout_p", "tolerance", "bounds_block", "key_lengths"),
        *("block_table", "paged_keys"),
    )
)
"""The features of a problem that these kernels honour."""

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32))
_WIDEST = 256
_SHORT = 16
"""With fewer queries, reading all keys for their norms costs as much as attending to them."""
# Looked for, not loaded: asking why_not imports no kernel.
INSTALLED = find_spec("triton") is not None


def why_not(problem: Problem) -> str | None:
    """The reason this call cannot run here, or None."""
    if problem.device.type != "cuda" and not interpreted():
        return f"runs on CUDA and ROCm tensors, got {problem.device.type!r} (TRITON_INTERPRET=1 interprets its kernels)"
    if not INSTALLED:
        return "needs the package triton, which comes with torch's builds for GPUs; pip install 'linbias[triton]'"
    if problem.dtype not in _DTYPES:
        return f"supports float16, bfloat16 and float32, got {problem.dtype}"
    if max(problem.head_dim, problem.value_dim) > _WIDEST:
        return f"supports head and value dims up to {_WIDEST}, got {problem.head_dim} and {problem.value_dim}"
    return problem.beyond(SUPPORTS)


def forward(problem: Problem, operands: Operands) -> Result:
    """Visit the nearest tiles, and of the others those that could matter."""
    rows = (problem.batch, problem.heads, problem.queries)
    like = operands.slopes
    out, lse = operands.query.new_empty((*rows, problem.value_dim)), like.new_empty(rows)
    lse_low, skipped = torch.empty_like(lse), like.new_zeros(rows)
    if math.prod(rows) * problem.keys == 0:
        nothing = like.new_zeros(rows[:2], dtype=torch.int64)
        return Result(out.zero_(), lse.fill_(-math.inf), lse_low.zero_(), skipped, nothing)
    launch = Launch.of(problem, operands, tiles_of(problem))
    table = Table.of(problem, operands, launch.tiles[:2])
    visited = table.every()
    if _judged(table):
        visited, skipped = _forward_judgement(launch, table, operands)
    _attend(launch, table.of_rows(visited), (out, lse, lse_low))
    return Result(out, lse, lse_low, skipped, table.pairs(visited))


def output(problem: Problem, operands: Operands) -> Tensor:
    """The output of `forward`."""
    return forward(problem, operands).out


def _judged(table: Table) -> bool:
    """Whether there is something to skip, and a way to tell."""
    problem = table.problem
    known = problem.queries >= _SHORT or "bound_norms" in problem.features
    return problem.options.tolerance > 0 and table.near.shape[3] > 1 and known


def _lengths(launch: Launch, table: Table, operands: Operands) -> Lengths:
    norms = launch.norms(launch.key) if operands.bound_norms is None else operands.bound_norms
    return Lengths(launch.norms(launch.query), block_lengths(table, operands, norms))


def _forward_judgement(launch: Launch, table: Table, operands: Operands) -> tuple[Tensor, Tensor]:
    """(B, H, I, J) what is visited, and (B, H, T) the bound on the rest."""
    problem = launch.problem
    lse = operands.slopes.new_empty((problem.batch, problem.heads, problem.queries))
    lengths = _lengths(launch, table, operands)
    # Each row weighs at least what it sees of the strip's nearest block.
    near = table.of_rows(table.nearest())
    launch.forward(near, Found(None, lse, torch.empty_like(lse), None, None, lse.numel()))
    shares = Shares.of(table, lengths, rounded_mass(problem, lengths, lse))
    skips, spent = fitting(shares.rows(), -1)
    spent = spent.repeat_interleave(table.strip, 2)[:, :, : problem.queries] * problem.options.tolerance
    return table.every() & ~skips, spent.contiguous()


def _attend(launch: Launch, visits: Visits, results: tuple[Tensor, Tensor, Tensor]) -> None:
    """Output, lse and lse_low of what is visited."""
    out, lse, lse_low = results
    splits, size = launch.splits(visits), lse.numel()
    if splits == 1:
        launch.forward(visits, Found(out, lse, lse_low, None, None, size))
        return
    # Few rows: each share of the keys has a softmax of its own, which are merged.
    shape = (splits, *lse.shape)
    top, total, mean = lse.new_empty(shape), lse.new_empty(shape), lse.new_empty((*shape, out.shape[3]))
    launch.forward(visits, Found(mean, None, None, top, total, size), splits)
    unit = 1 / unit_of(launch.problem)
    highest = top.amax(0)
    weight = ((top - torch.where(highest == -math.inf, 0.0, highest)) * unit).exp_()
    total, mean = (total * weight).sum(0), (mean * weight.unsqueeze(-1)).sum(0)
    seen = total != 0
    out.copy_(torch.where(seen.unsqueeze(-1), mean / total.unsqueeze(-1), 0.0))
    exact = torch.where(seen, highest.double() * unit + total.double().log(), -math.inf)
    lse.copy_(exact)
    lse_low.copy_(torch.where(lse.isfinite(), exact - lse.double(), 0.0))


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
    """Recompute what matters for rows and keys, judged afresh from ``lse``."""
    shapes = (operands.query.shape, operands.key.shape, operands.value.shape)
    query, key, value = (operands.query.new_empty(shape) for shape in shapes)
    if lse.numel() * problem.keys == 0:
        nothing = operands.slopes.new_zeros((problem.batch, problem.heads))
        return _wanted(operands, needs, (query.zero_(), key.zero_(), value.zero_(), nothing, nothing))
    launch = Launch.of(problem, operands, tiles_of(problem, backward=True))
    table = Table.of(problem, operands, launch.tiles[:2])
    visited = table.every()
    if _judged(table):
        visited = visited & ~_backward_judgement(launch, table, operands, lse, slopes_too=needs[3] or needs[4])
    saved = launch.saved((out, lse, lse_low), grad_out, grad_lse)
    past = future = None
    if needs[3] or needs[4]:
        past = lse.new_empty((problem.batch, problem.heads, -(-problem.queries // launch.tiles.rows)))
        future = torch.empty_like(past)
    if needs[0] or past is not None:
        launch.rows(table.of_rows(visited), saved, (query, past, future))
    if needs[1] or needs[2]:
        launch.keys(table.of_keys(visited), saved, (key, value))
    parts = (None if part is None else part.double().sum(-1).float() for part in (past, future))
    return _wanted(operands, needs, (query, key, value, *parts))


def _backward_judgement(launch: Launch, table: Table, operands: Operands, lse: Tensor, *, slopes_too: bool) -> Tensor:
    """(B, H, I, J) bool: what fits the tolerance of every row and, summed over rows, of every key."""
    lengths = _lengths(launch, table, operands)
    mass = rounded_mass(launch.problem, lengths, lse)
    shares = Shares.of(table, lengths, torch.where(lse == -math.inf, math.inf, mass))
    stretch = shares.stretch() if slopes_too else 0.0
    return fitting(shares.rows(stretch), -1)[0] & fitting(shares.keys(stretch), -2)[0]


def _wanted(operands: Operands, needs: tuple[bool, ...], found: tuple[Tensor | None, ...]) -> Gradients:
    """What was asked for; slopes that the batch shares sum what its items found."""
    query, key, value, past, future = found
    if operands.future_slopes is None and past is not None and future is not None:
        past = past + future
    gradients = (query, key, value, _over_batch(past, operands.slopes), _over_batch(future, operands.future_slopes))
    return Gradients(*(each if need else None for each, need in zip(gradients, needs, strict=True)))


def _over_batch(gradient: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    if gradient is None or slopes is None or slopes.shape[0] != 1:
        return gradient
    return gradient.sum(0, keepdim=True)
