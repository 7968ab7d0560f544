# SPDX-License-Identifier: Apache-2.0
"""The formula, written out. Dense, slow, and what everything else must agree with.

It is made of plain torch operations, so autograd, functorch, torch.compile and torch.export see through it: gradients
of any order, any dtype, any device. Bias and visibility are the rule of `semantics` at blocks of one.
"""

import torch
from torch import Tensor

from ..semantics.blocks import dense
from ..semantics.dropout import keep_mask
from ..semantics.problem import FEATURES, Gradients, Operands, Problem, Result

NAME = "reference"
COMPOSITE = True
INSTALLED = True
READS_PAGES = False
SUPPORTS = FEATURES


def why_not(problem: Problem) -> str | None:
    """It runs everything."""
    return problem.beyond(SUPPORTS)


def forward(problem: Problem, operands: Operands) -> Result:
    """softmax(cap(scale * q @ k.T) - slope * distance) @ v over what is visible."""
    weights_BHTS, lse_BHT, value_BGSV = _softmax(problem, operands)
    if operands.seed is not None:
        kept = _kept(problem, operands.seed).to(weights_BHTS.dtype) / (1.0 - problem.options.dropout_p)
        weights_BHTS = weights_BHTS * kept
    grouped = weights_BHTS.unflatten(1, (problem.kv_heads, problem.group))
    out = (grouped @ value_BGSV.unsqueeze(2)).flatten(1, 2)
    # Already 0 there; this stops a gradient of NaN, which times a weight of 0 would reach every value.
    out = torch.where((lse_BHT == -torch.inf).unsqueeze(-1), 0.0, out)
    pairs = problem.queries * problem.keys
    return Result(
        out=out.to(problem.dtype),
        lse=lse_BHT,
        lse_low=torch.zeros_like(lse_BHT),
        skipped=torch.zeros_like(lse_BHT),
        computed=torch.full((problem.batch, problem.heads), pairs, dtype=torch.int64, device=problem.device),
    )


def output(problem: Problem, operands: Operands) -> Tensor:
    """The output of `forward`."""
    return forward(problem, operands).out


def weights(problem: Problem, operands: Operands) -> Tensor:
    """(B, H, T, S): the softmax itself, in the accumulating dtype; rows that see nothing are 0."""
    return _softmax(problem, operands)[0]


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
    """Never called: autograd differentiates `forward`."""
    raise AssertionError("the reference backend is composite; autograd sees through its forward")


def _softmax(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (B, H, T, S), lse (B, H, T) and the value without unseen contents, all in the accumulating dtype."""
    options = problem.options
    penalty, visible = dense(operands, options)
    visible = visible.expand(problem.batch, problem.heads, problem.queries, problem.keys)
    # What nobody sees is replaced, because 0 * NaN is NaN in the products of forward and backward.
    seen_rows = visible.any(-1)
    seen_keys = visible.unflatten(1, (problem.kv_heads, problem.group)).any(-2).any(2)
    query, key, value = (
        torch.where(seen.unsqueeze(-1), tensor.to(problem.accumulator), 0.0)
        for seen, tensor in ((seen_rows, operands.query), (seen_keys, operands.key), (seen_keys, operands.value))
    )
    query = query.unflatten(1, (problem.kv_heads, problem.group))
    content = options.scale * (query @ key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    if options.softcap is not None:
        content = options.softcap * torch.tanh(content / options.softcap)
    scores = torch.where(visible, content - penalty, -torch.inf)
    # Any shift leaves the result the same; this one needs no gradient and keeps exp in range.
    shift = scores.detach().logsumexp(-1)
    weighs = shift != -torch.inf  # not where nothing is seen, nor where every score is -inf
    shift = torch.where(weighs, shift, 0.0)
    terms = torch.where(visible, torch.exp(scores - shift.unsqueeze(-1)), 0.0)
    total = torch.where(weighs, terms.sum(-1), 1.0)
    lse = torch.where(weighs, shift + total.log(), -torch.inf)
    return terms / total.unsqueeze(-1), lse, value


def _kept(problem: Problem, seed: Tensor) -> Tensor:
    b, h, i = (torch.arange(count, device=seed.device) for count in (problem.batch, problem.heads, problem.queries))
    return keep_mask(seed, problem.options.dropout_p, b[:, None, None], h[:, None], i, first_key=0, keys=problem.keys)
