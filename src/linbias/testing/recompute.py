# SPDX-License-Identifier: Apache-2.0
"""The formula as a backend's backward must compute it: dense, without autograd, summed from last to first.

What rounding costs depends on the order of the sums and on the form of the softmax's derivative. Autograd keeps the
weights and differentiates their normalisation; a backward that recomputes has only the saved output and lse. The second
form loses more where the gradient of a score cancels, and no such backend can avoid it, so a budget must know both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..semantics.blocks import dense
from ..semantics.dropout import keep_mask
from ..semantics.problem import Operands, Problem
from .inputs import Inputs, seen, visible_pairs


def recompute(inputs: Inputs, stored: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output, lse and gradients by name; and of what the gradients of slopes are summed, sum |terms|.

    Args:
        inputs: in the accumulating dtype.
        stored: the dtype in which backward finds the output.
    """
    problem, operands = inputs.resolve()
    dense = _Dense.of(inputs, problem, operands)
    weights, lse, inner = dense.softmax(problem)
    shared = weights * dense.share
    out = shared @ dense.value
    delta = (dense.grad_out * out.to(stored).to(out.dtype)).sum(-1, keepdim=True)
    grad_weights = dense.share * (dense.grad_out @ dense.value.mT)
    grad_scores = weights * (grad_weights - delta + dense.grad_lse)
    grad_product = problem.options.scale * inner * grad_scores

    def of_keys(gradient: Tensor) -> Tensor:
        return gradient.unflatten(1, (problem.kv_heads, problem.group)).sum(2).flip(2)

    found = {
        "out": out,
        "lse": lse,
        "grad_query": (grad_product @ dense.key).flip(-1),
        "grad_key": of_keys(grad_product.mT @ dense.query).flip(-1),
        "grad_value": of_keys(shared.mT @ dense.grad_out),
    }
    sizes = weights * (grad_weights.abs() + delta.abs() + dense.grad_lse.abs())
    terms: dict[str, Tensor] = {}
    for name, distance in _distances(inputs, problem, operands).items():
        shape = getattr(inputs, name).shape
        found[f"grad_{name}"] = -(grad_scores * distance).sum((2, 3)).sum_to_size(shape)
        terms[f"grad_{name}"] = (sizes * distance).sum((2, 3)).sum_to_size(shape)
    return found, terms


@dataclass(frozen=True)
class _Dense:
    """A call without groups, keys and channels reversed, and 0 in place of what nothing sees."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    """(B, H, T, 1)."""
    penalty: Tensor
    visible: Tensor
    share: Tensor
    """(B, H, T, S): 1 / (1 - dropout_p) where the pair is kept, else 0."""

    @staticmethod
    def of(inputs: Inputs, problem: Problem, operands: Operands) -> "_Dense":
        penalty, visible = visible_pairs(problem, operands)
        rows, keys = (where.unsqueeze(-1) for where in seen(problem, visible))

        def of_keys(tensor: Tensor) -> Tensor:
            return torch.where(keys, tensor, 0.0).repeat_interleave(problem.group, 1).flip(2)

        return _Dense(
            query=torch.where(rows, inputs.query, 0.0).flip(-1),
            key=of_keys(inputs.key).flip(-1),
            value=of_keys(inputs.value),
            grad_out=torch.where(rows, inputs.grad_out, 0.0),
            grad_lse=torch.where(rows, inputs.grad_lse.unsqueeze(-1), 0.0),
            penalty=penalty.flip(-1),
            visible=visible.flip(-1),
            share=_share(problem, operands).flip(-1),
        )

    def softmax(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, lse and the derivative of the cap."""
        product, cap = problem.options.scale * (self.query @ self.key.mT), problem.options.softcap
        content = product if cap is None else cap * torch.tanh(product / cap)
        scores = torch.where(self.visible, content - self.penalty, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
        return weights, lse, torch.ones_like(content) if cap is None else 1 - (content / cap) ** 2


def _share(problem: Problem, operands: Operands) -> Tensor:
    whole = torch.ones((1, 1, 1, problem.keys), dtype=operands.slopes.dtype, device=problem.device)
    if operands.seed is None:
        return whole
    b, h, i = (torch.arange(count, device=problem.device) for count in (problem.batch, problem.heads, problem.queries))
    p = problem.options.dropout_p
    return whole / (1 - p) * keep_mask(operands.seed, p, b[:, None, None], h[:, None], i, 0, problem.keys)


def _distances(inputs: Inputs, problem: Problem, operands: Operands) -> dict[str, Tensor]:
    """(b, 1, T, S) by name of the slopes that multiply it, 0 elsewhere; keys reversed."""
    one = torch.ones((1, 1), dtype=operands.slopes.dtype, device=problem.device)
    later = None if problem.options.metric is not None else one if inputs.future_slopes is None else 0 * one
    sides = {"slopes": (one, later)}
    if inputs.future_slopes is not None:
        sides["future_slopes"] = (0 * one, one)
    return {
        name: dense(operands._replace(slopes=past, future_slopes=future), problem.options)[0].flip(-1)
        for name, (past, future) in sides.items()
    }
