# SPDX-License-Identifier: Apache-2.0
"""The ledgers: which tiles a pass must visit, so that what it skips fits the tolerance of every row, and of every key.

A ledger adds up the proven shares of what it skips. For the least work it skips the smallest shares first: the
farthest tiles, as a rule, and never a near outlier in their stead, so that one key of huge norm costs its own block.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._bounds import Judge, Keys, table_sizes
from .semantics._boxes import in_tiles, real_keys
from .semantics.problem import Operands, Problem

_NEAR = 4
"""Blocks whose mean keys make the lower bound of a row's weight."""
# Left unspent: covers the rounding of sums of shares, and of fp64 bounds of inputs in fp32.
_LIMIT = 1 - 1e-6


@dataclass(frozen=True)
class Visits:
    """Which tiles a pass computes."""

    table: Tensor
    """(B * H, I, J) bool, on the host: strip I of the head must visit block J."""
    spent: Tensor
    """(B * H, I) fp64: proven bound of the skipped share of the weight of each row of the strip."""
    strip: int
    """Rows a strip."""
    block: int
    """Keys a block."""


def forward_visits(problem: Problem, operands: Operands, keys: Keys, norms: Tensor, mass: Tensor) -> Visits:
    """The row ledger.

    Args:
        problem, operands, keys: the call.
        norms: (B, H, T), upper bounds of the query norms.
        mass: (B, H, T), a proven lower bound of the log of each row's weight; -inf where unknown.
    """
    judge, tolerance = Judge.of(problem, operands, keys, norms, mass), problem.options.tolerance
    parts: list[Tensor] = []
    spent: list[Tensor] = []
    for lanes in judge.chunks():
        seen = judge.seen(lanes)
        fits, used = _fitting(_shares(judge.row_bounds(lanes), seen, tolerance), -1)
        parts.append(seen & ~fits)
        spent.append(used * tolerance)
    return Visits(torch.cat(parts), torch.cat(spent), judge.strip, keys.boxes.size)


def backward_visits(
    problem: Problem, operands: Operands, keys: Keys, norms: Tensor, lse: Tensor, *, slopes_too: bool
) -> Visits:
    """The row-and-key ledger: judged afresh from the saved lse, `norms` as in `forward_visits`.

    The skipped tiles fit the tolerance of every row *and*, summed over rows, of every key, for each query head. With
    `slopes_too` weights count (1 + m d)-fold, as the gradient of a slope takes them.
    """
    # Rows that saw nothing weigh nothing.
    mass = torch.where(lse == -math.inf, math.inf, rounded_mass(problem, keys, norms, lse))
    judge, tolerance = Judge.of(problem, operands, keys, norms, mass), problem.options.tolerance
    parts: list[Tensor] = []
    spent: list[Tensor] = []
    for lanes in judge.chunks():
        seen = judge.seen(lanes)
        extra = judge.stretch(lanes) if slopes_too else 0.0
        rows, used = _fitting(_shares(judge.row_bounds(lanes) + extra, seen, tolerance), -1)
        columns, _ = _fitting(_shares(judge.key_bounds(lanes) + extra, seen, tolerance), -2)
        parts.append(seen & ~(rows & columns))
        spent.append(used * tolerance)
    return Visits(torch.cat(parts), torch.cat(spent), judge.strip, keys.boxes.size)


def rounded_mass(problem: Problem, keys: Keys, norms: Tensor, lse: Tensor) -> Tensor:
    """(B, H, T): a lower bound of log Z from an lse over some of the keys, computed with rounding."""
    eps = torch.finfo(problem.accumulator).eps
    longest = torch.where(keys.norms.isfinite(), keys.norms, 0.0).amax(-1).repeat_interleave(problem.group, 1)
    error = _error(problem, norms) * longest.to(norms.device, norms.dtype).unsqueeze(-1)
    return lse - error - 16 * eps * (1 + lse.abs())


def _shares(bounds: Tensor, seen: Tensor, tolerance: float) -> Tensor:
    """Bounds as parts of the tolerance; 0 for what is invisible. Tolerance 0 has room only for what weighs nothing."""
    if tolerance > 0:
        parts = torch.exp(bounds - math.log(tolerance))
    else:
        parts = torch.where(bounds == -math.inf, 0.0, math.inf)
    return torch.where(seen, parts, 0.0)


def _fitting(shares: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The most entries along `dim` whose sum stays within 1, smallest first, and that sum; NaN and inf never fit."""
    ordered, order = shares.sort(dim)
    total = ordered.cumsum(dim)
    # As `<=`, so that a NaN anywhere before it makes the comparison false.
    within = total <= _LIMIT
    fits = torch.zeros_like(within).scatter(dim, order, within)
    return fits, torch.where(within, total, 0.0).amax(dim)


def near_mass(problem: Problem, operands: Operands, keys: Keys, norms: Tensor) -> Tensor:
    """(B, H, T): a proven lower bound of the log of each row's weight, for default positions and nothing but the bias,
    a key mask or a window: the row's own key, and the nearest blocks before the strip.
    """
    parts = [_own_mass(problem, operands, keys, norms), _block_mass(problem, operands, keys, norms)]
    bound = torch.logaddexp(*parts)
    return bound - 16 * torch.finfo(bound.dtype).eps * (1 + bound.abs())


def _error(problem: Problem, norms: Tensor) -> Tensor:
    """By how much a computed dot product can exceed the true one, for each unit of the key's norm."""
    eps = torch.finfo(problem.accumulator).eps
    return (problem.head_dim + 8) * eps * abs(problem.options.scale) * norms


def _own_mass(problem: Problem, operands: Operands, keys: Keys, norms: Tensor) -> Tensor:
    """The score of the key at the query's own position, whose bias is 0."""
    offset = problem.keys - problem.queries
    own = norms.new_full(norms.shape, -math.inf)
    first, place = max(0, -offset), slice(max(0, offset), problem.keys)
    query = operands.query[:, :, first:].to(norms.dtype).unflatten(1, (problem.kv_heads, problem.group))
    key = operands.key[:, :, None, place].to(norms.dtype)
    score = problem.options.scale * (query * key).sum(-1).flatten(1, 2)
    rho = keys.norms.to(norms.device, norms.dtype).repeat_interleave(keys.boxes.size, 2)[:, :, place]
    score = score - _error(problem, norms[:, :, first:]) * rho.repeat_interleave(problem.group, 1)
    own[:, :, first:] = torch.where(real_keys(operands)[:, None, place], score, -math.inf)
    return own


def _block_mass(problem: Problem, operands: Operands, keys: Keys, norms: Tensor) -> Tensor:
    """Jensen on each of the nearest blocks wholly before the strip: ``sum exp(s - m d) >= n exp(mean s - m mean d)``.

    The mean score is one product with the block's mean key, so four products stand for hundreds of keys. The distance
    is the row's from its strip's first, the same for all blocks, plus the strip's from the block.
    """
    strip, block = table_sizes(problem)
    dtype, device = norms.dtype, norms.device
    first = torch.arange(0, problem.queries, strip, device=device) + problem.keys - problem.queries
    index_IW = first[:, None] // block - 1 - torch.arange(_NEAR, device=device)
    usable = index_IW >= 0
    if problem.options.left is not None:
        usable = usable & (first[:, None] + strip - 1 - index_IW * block <= problem.options.left)
    index_IW = index_IW.clamp_min(0)
    real = real_keys(operands).to(dtype)
    count = in_tiles(real, block, 0.0).sum(-1)
    usable = (usable & (count[:, index_IW] > 0)).unsqueeze(1)
    places = torch.arange(problem.keys, device=device, dtype=dtype) * real
    mean = in_tiles(places, block, 0.0).sum(-1) / count.clamp_min(1)
    wide = operands.key.to(dtype)
    wide = wide if operands.key_mask is None else torch.where(real[:, None, :, None] > 0, wide, 0.0)
    sums = in_tiles(wide.flatten(0, 1), block, 0.0).sum(2).unflatten(0, (problem.batch, -1))
    centers = sums * (problem.options.scale / count.clamp_min(1))[:, None, :, None]
    bias = operands.slopes[..., None, None] * (first[:, None] - mean[:, index_IW]).unsqueeze(1)
    start_BHIW = torch.where(usable, count[:, index_IW].log().unsqueeze(1) - bias, -math.inf)
    rows = in_tiles(operands.query.to(dtype).flatten(0, 1), strip, 0.0)
    centers = centers[:, :, index_IW].repeat_interleave(problem.group, 1).flatten(0, 2)
    start = start_BHIW.expand(problem.batch, -1, -1, -1).flatten(0, 2).unsqueeze(-1)
    near = torch.baddbmm(start, centers, rows.flatten(0, 1).mT).logsumexp(-2)
    near = near.unflatten(0, (problem.batch, problem.heads, -1)).flatten(2)[:, :, : problem.queries]
    longest = torch.where(usable, keys.norms.to(device, dtype)[:, :, index_IW], 0.0).amax(-1)
    longest = longest.repeat_interleave(problem.group, 1).repeat_interleave(strip, 2)[:, :, : problem.queries]
    beyond = torch.arange(problem.queries, device=device) % strip
    bias = torch.where(beyond == 0, 0.0, operands.slopes.unsqueeze(-1) * beyond)
    return near - _error(problem, norms) * longest - bias
