# SPDX-License-Identifier: Apache-2.0
"""How far rounding, and what the tolerance lets be skipped, can take each number of a call from its exact value.

The formula in float64 once more, every step with the error it may have beside it. A sum of n products rounded in a
precision eps is off by at most g(n) eps sum |terms|, where g(n) is n, or 6 sqrt(n) but for one in 10^7 (Higham and
Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019). In `linbias.testing` the budget comes from what
the plain formula loses, which is sharper where many numbers are compared and can be luck where there is one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from linbias.semantics.problem import Operands, Problem
from linbias.testing import Inputs
from linbias.testing.inputs import seen, visible_pairs
from linbias.testing.recompute import _distances, _share

_FUNCTION = 16.0
"""Roundings of an exp, a log or a tanh."""


def g(terms: int) -> float:
    """Roundings of a sum of that many products."""
    return min(terms, 6 * math.sqrt(terms)) + 2


@dataclass
class Room:
    """The call in float64, without groups: numbers, and beside them by how much each may be off."""

    inputs: Inputs
    problem: Problem
    operands: Operands
    eps: float
    """Of the accumulating dtype."""
    stored: float
    """Of the dtype of the results, 0 if that is the same."""

    @staticmethod
    def of(inputs: Inputs) -> "Room":
        """Of a call as a backend gets it."""
        eps = torch.finfo(inputs.dtype_of("lse")).eps
        stored = torch.finfo(inputs.query.dtype).eps
        # In float64 the exact values are rounded as well.
        room = Room(inputs.exactly(), *inputs.exactly().resolve(), eps * (1 + (eps < 1e-10)), stored)
        room.read()
        room.forward(inputs)
        return room

    def read(self) -> None:
        """The operands, with 0 in place of what nothing sees."""
        penalty, visible = visible_pairs(self.problem, self.operands)
        rows, keys = (where.unsqueeze(-1) for where in seen(self.problem, visible))
        self.see = visible & penalty.isfinite()
        self.query, self.grad_out = (torch.where(rows, each, 0.0) for each in (self.inputs.query, self.inputs.grad_out))
        self.key, self.value = (
            torch.where(keys, each, 0.0).repeat_interleave(self.problem.group, 1)
            for each in (self.inputs.key, self.inputs.value)
        )
        self.grad_lse = torch.where(rows, self.inputs.grad_lse.unsqueeze(-1), 0.0)
        self.bias = torch.where(self.see, penalty, 0.0)
        self.share = _share(self.problem, self.operands)

    def forward(self, given: Inputs) -> None:
        """Scores, weights and output."""
        options, eps = self.problem.options, self.eps
        self.tau = tolerance_of(given)
        product = options.scale * (self.query @ self.key.mT)
        self.off_product = eps * g(self.problem.head_dim) * abs(options.scale) * (self.query.abs() @ self.key.abs().mT)
        content, off, self.inner, self.off_inner = product, self.off_product, 1.0, 0.0
        if (cap := options.softcap) is not None:
            bent = torch.tanh(product / cap)
            content, off, self.inner = (
                cap * bent,
                self.off_product.clamp_max(2 * cap) + _FUNCTION * eps * cap,
                1 - bent**2,
            )
            self.off_inner = _FUNCTION * eps + (2 * self.off_product / cap).clamp_max(1.0)
        score = torch.where(self.see, content - self.bias, -math.inf)
        off = torch.where(self.see, off + eps * (3 * self.bias.abs() + 2 * score.abs()) + self._off_distance(), 0.0)
        lse = score.logsumexp(-1, keepdim=True)
        rows = lse > -math.inf
        self.weights = torch.exp(score - torch.where(rows, lse, 0.0))
        off_lse = torch.where(rows, (score - lse + off).logsumexp(-1, keepdim=True), 0.0)
        off_lse = off_lse.clamp_min(0.0) + eps * (g(self.problem.keys) + _FUNCTION + 2 * lse.abs())
        off_lse = torch.where(rows, off_lse, 0.0)
        relative = torch.expm1((off + off_lse + _FUNCTION * eps).clamp_max(600))
        # Below eps^3 a weight may be anything up to it, and beyond 10^12 scores leave the weights here too few digits.
        off_weights = torch.where(lse.abs() > 1e12, 1.0, self.weights * relative + eps**3)
        self.off_weights = off_weights.clamp_max(1.0) * self.see
        shared = self.share * self.weights
        self.out = shared @ self.value
        spread = (self.share * self.off_weights + eps * g(self.problem.keys) * shared) @ self.value.abs()
        largest = self.value.abs().amax((2, 3), keepdim=True) if self.value.numel() else 0.0
        self.off_out = spread + self.stored * self.out.abs() + 2 * self.tau * largest / (1 - options.dropout_p)
        self.off_lse = (off_lse + self.tau / (1 - self.tau)).squeeze(-1)

    def _off_distance(self) -> Tensor | float:
        """Of a bias, where coordinates are rounded."""
        if self.problem.options.metric is None:
            return 0.0
        assert self.operands.query_positions is not None and self.operands.key_positions is not None
        sizes = [
            each.nan_to_num(0.0).abs().sum(-1) for each in (self.operands.query_positions, self.operands.key_positions)
        ]
        slopes = self.operands.slopes.abs()
        slopes = torch.where(slopes.isfinite(), slopes, 0.0)[:, :, None, None]
        return 8 * self.eps * slopes * (sizes[0][:, None, :, None] + sizes[1][:, None, None, :])

    def bounds(self) -> dict[str, Tensor]:
        """By how much each result may be off, element by element, by `linbias.testing`'s names."""
        keys, queries, eps = self.problem.keys, self.problem.queries, self.eps
        size = self.share * (self.grad_out.abs() @ self.value.abs().mT)
        off_size = eps * g(self.problem.value_dim) * size
        delta = (self.weights * size).sum(-1, keepdim=True)
        off_delta = (self.off_weights * size + self.weights * off_size).sum(-1, keepdim=True) + eps * g(keys) * delta
        off_delta = off_delta + self._off_given_output()
        core = size + delta + self.grad_lse.abs()
        scores = self.weights * core
        off_scores = self.off_weights * core + self.weights * (off_size + off_delta) + 3 * eps * scores
        scale = abs(self.problem.options.scale)
        products = scale * self.inner * scores
        off_products = scale * (self.inner * off_scores + self.off_inner * scores) + 3 * eps * products
        skipped = scale * self.tau * core * self.see
        all_rows = g(queries * self.problem.group)
        found = {
            "out": self.off_out,
            "lse": self.off_lse,
            "grad_query": (off_products + eps * g(keys) * products) @ self.key.abs()
            + _largest(skipped, -1) * _largest(self.key.abs(), 2),
            "grad_key": self._of_keys(
                (off_products + eps * all_rows * products).mT @ self.query.abs()
                + _largest(skipped, -2).mT * _largest(self.query.abs(), 2)
            ),
            "grad_value": self._of_keys(
                (self.share * (self.off_weights + eps * all_rows * self.weights)).mT @ self.grad_out.abs()
                + self.tau * _largest(self.grad_out.abs(), 2) / (1 - self.problem.options.dropout_p)
            ),
        }
        return found | self._of_slopes(off_scores + eps * (g(queries * keys) + 8) * scores, core)

    def _off_given_output(self) -> Tensor:
        """What a backward that is given the output, as it was stored, makes of its product with the gradient."""
        off = self.off_out + self.eps * g(self.problem.value_dim) * self.out.abs()
        return (self.grad_out.abs() * off).sum(-1, keepdim=True)

    def _of_slopes(self, off: Tensor, core: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, distance in _distances(self.inputs, self.problem, self.operands).items():
            given = getattr(self.inputs, name)
            steep = torch.where((given > 0) & given.isfinite(), given, math.inf).double().abs()
            rows = _largest(torch.where(self.see, core, 0.0), -1).sum((2, 3))
            found[f"grad_{name}"] = (off * distance.flip(-1)).sum((2, 3)).sum_to_size(given.shape)
            found[f"grad_{name}"] += (self.tau * rows / steep).sum_to_size(given.shape)
        return found

    def _of_keys(self, of_heads: Tensor) -> Tensor:
        return of_heads.unflatten(1, (self.problem.kv_heads, self.problem.group)).sum(2)


def _largest(tensor: Tensor, dim: int) -> Tensor:
    """The maximum along one dimension, which stays; 0 of nothing."""
    return tensor.amax(dim, keepdim=True) if tensor.shape[dim] else tensor.sum(dim, keepdim=True)


def tolerance_of(inputs: Inputs) -> float:
    """What the call allows; the default is `linbias.alibi_attention`'s."""
    return inputs.options.get("tolerance", torch.finfo(inputs.dtype_of("lse")).eps / 4)


def bounds_of(inputs: Inputs) -> dict[str, Tensor]:
    """By how much each result may be off; without gradients where the tolerance is coarse.

    Those have bounds of their own, tested beside the ledgers that keep them.
    """
    bounds = Room.of(inputs).bounds()
    coarse = tolerance_of(inputs) > torch.finfo(inputs.dtype_of("lse")).eps
    return {name: bound for name, bound in bounds.items() if name in ("out", "lse") or not coarse}


def assert_right(found: dict[str, Tensor], exact: dict[str, Tensor], inputs: Inputs, bounds: dict[str, Tensor]) -> None:
    """Every result has its shape and dtype, and is off by no more than its bound."""
    for name, bound in bounds.items():
        one, other = found[name], exact[name]
        wanted = inputs.dtype_of(name)
        assert one.dtype == wanted, f"{name}: dtype {one.dtype}, expected {wanted}"
        assert one.shape == other.shape, f"{name}: shape {tuple(one.shape)}, expected {tuple(other.shape)}"
        room, most = bound + torch.finfo(wanted).eps * other.abs() + torch.finfo(wanted).tiny, torch.finfo(wanted).max
        error = torch.where(one.double() == other, 0.0, (one.double() - other).abs())
        overflown = one.isinf() & (one * other > 0) & (other.abs() + room >= most)
        wrong = ~(error <= room) & ~overflown
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0].tolist()}: "
            f"{one[wrong][0]:.9g} for {other[wrong][0]:.9g}, which may be off by {room[wrong][0]:.2g}"
        )
