# SPDX-License-Identifier: Apache-2.0
"""Calls of the native backend, and gradients of any."""

import torch
from torch import Tensor

from linbias import alibi_attention, alibi_slopes
from linbias.backends import native
from linbias.semantics.problem import Operands, Options, Problem, Result


def options(**changed: object) -> Options:
    """Causal attention with the defaults of the public operation."""
    given = dict(
        causal=True, left=None, right=None, sinks=0, prefix=0, metric=None, scale=0.25, softcap=None, dropout_p=0.0,
        tolerance=torch.finfo(torch.float32).eps / 4, bounds_block=0,
    )  # fmt: skip
    return Options(**(given | changed))


def run(operands: Operands, **changed: object) -> Result:
    return native.forward(Problem.of(operands, options(**changed)), operands)


def operands_of(heads: int, kv_heads: int, queries: int, keys: int, dim: int = 16, **more: Tensor) -> Operands:
    query, key, value = (torch.randn(2, *shape) for shape in (
        (heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, dim),
    ))  # fmt: skip
    return Operands(query, key, value, alibi_slopes(heads)[None], **more)


def grads_of(backend: str, loss: str, *given: Tensor, **changed: object) -> tuple[Tensor, ...]:
    """Gradients of a sum over the output or over lse."""
    leaves = [each.clone().requires_grad_() for each in given]
    out, aux = alibi_attention(*leaves, backend=backend, return_aux=True, **changed)  # pyright: ignore
    seen = out if loss == "out" else aux.lse
    weights = torch.arange(seen.numel()).to(seen).sin().view_as(seen)
    return torch.autograd.grad((seen * weights).sum(), leaves, materialize_grads=True)
