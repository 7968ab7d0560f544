# SPDX-License-Identifier: Apache-2.0
"""Large calls under a metric, given to a backend along a space-filling curve and handed back in the caller's order.

In the order of a slide's rows a tile of 64 tokens is a line through it, near to almost every other tile; along a curve
it is a patch, and what its heads cannot see is skipped. It is done here, around a backend's passes, so that tracers,
autograd and vmap see the caller's order alone, and nothing that autograd saves is kept twice.
"""

import torch
from torch import Tensor

from ..semantics.curve import curve_order
from ..semantics.problem import Gradients, Operands, Problem, Result
from ..semantics.tokens import Tokens
from . import Backend

_PAIRS = 1 << 27
"""Below so many pairs a head little is far enough to be skipped: no faster at 10,000 tokens (docs/models/slides.md)."""


def forward(backend: Backend, problem: Problem, operands: Operands) -> Result:
    """`backend.forward`, the call ordered where that pays."""
    if not _pays(problem, operands):
        return backend.forward(problem, operands)
    orders = _orders(operands)
    result = backend.forward(*_ordered(problem, operands, orders))
    back = _inverse(orders[0])
    rows = {name: _taken(getattr(result, name), back, 2) for name in ("out", "lse", "lse_low", "skipped")}
    return result._replace(**rows)


def output(backend: Backend, problem: Problem, operands: Operands) -> Tensor:
    """`backend.output`, the call ordered where that pays."""
    if not _pays(problem, operands):
        return backend.output(problem, operands)
    orders = _orders(operands)
    return _taken(backend.output(*_ordered(problem, operands, orders)), _inverse(orders[0]), 2)


def backward(  # noqa: PLR0913, PLR0917  (a backend's)
    backend: Backend,
    problem: Problem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    needs: tuple[bool, ...],
) -> Gradients:
    """`backend.backward`, in the order of its forward."""
    if not _pays(problem, operands):
        return backend.backward(problem, operands, out, lse, lse_low, grad_out, grad_lse, needs)
    orders = _orders(operands)
    out, lse, lse_low = (_taken(each, orders[0], 2) for each in (out, lse, lse_low))
    grad_out, grad_lse = (_if_given(each, orders[0], 2) for each in (grad_out, grad_lse))
    found = backend.backward(*_ordered(problem, operands, orders), out, lse, lse_low, grad_out, grad_lse, needs)
    rows, keys = map(_inverse, orders)
    return found._replace(
        query=_if_given(found.query, rows, 2), key=_if_given(found.key, keys, 2), value=_if_given(found.value, keys, 2)
    )


def _pays(problem: Problem, operands: Operands) -> bool:
    """Whether this is a large call of points of which something may be skipped.

    Dropout keeps pairs by their number and attn_mask hides them by it; putting a mask of pairs in order would cost a
    second one.
    """
    return (
        problem.options.metric is not None
        and problem.queries * problem.keys >= _PAIRS
        and problem.options.tolerance > 0
        and operands.seed is None
        and operands.attn_mask is None
    )


def _orders(operands: Operands) -> tuple[Tensor, Tensor]:
    """(b, T) and (b, S): which query and which key comes where."""
    return curve_order(Tokens.queries_of(operands)), curve_order(Tokens.keys_of(operands))


def _ordered(problem: Problem, operands: Operands, orders: tuple[Tensor, Tensor]) -> tuple[Problem, Operands]:
    """The call with its tokens in order. Bounds of the caller's blocks are of no use for other blocks."""
    rows, keys = orders
    changed: dict[str, Tensor | None] = {"bound_norms": None, "query": _taken(operands.query, rows, 2)}
    for name in ("key", "value"):
        changed[name] = _taken(getattr(operands, name), keys, 2)
    for name in ("positions", "segments", "unbiased"):
        for side, order in (("query", rows), ("key", keys)):
            changed[f"{side}_{name}"] = _if_given(getattr(operands, f"{side}_{name}"), order, 1)
    changed["key_mask"] = _if_given(operands.key_mask, keys, 1)
    options = problem.options._replace(bounds_block=0)
    return problem._replace(options=options), operands._replace(**changed)


def _taken(tensor: Tensor, order: Tensor, dim: int) -> Tensor:
    """A tensor (b, ..., N, ...) with its N tokens in an order (b, N) of their own for each item, or of one for all."""
    if order.shape[0] == 1:
        return tensor.index_select(dim, order[0])
    index = order.reshape(len(order), *(1,) * (dim - 1), -1, *(1,) * (tensor.dim() - dim - 1))
    return torch.take_along_dim(tensor.expand(len(order), *tensor.shape[1:]), index, dim)


def _if_given(tensor: Tensor | None, order: Tensor, dim: int) -> Tensor | None:
    return None if tensor is None else _taken(tensor, order, dim)


def _inverse(order: Tensor) -> Tensor:
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)
