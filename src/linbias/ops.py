# SPDX-License-Identifier: Apache-2.0
"""The torch operators of linbias, declared once; a backend fills them.

``linbias::attention`` and ``linbias::attention_backward`` take the fields of `Operands`, then those of `Options`, then
the backend's name, so their schemas are written by those named tuples. Schema, shapes for tracing, gradient and vmap
rule live here and nowhere else. The composite backend needs none of this: autograd and the tracers see through it.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .backends import Backend, ordered, select
from .errors import BackendUnavailable
from .semantics.checks import PLAIN_TENSORS, autocast_enabled, unwatched
from .semantics.pages import spelled_out
from .semantics.problem import (
    OPERAND_NAMES,
    OPTION_NAMES,
    TRANSFORMED,
    Operands,
    Options,
    Problem,
    Result,
    accumulating_dtype,
)

GRADIENT_NAMES: tuple[str, ...] = ("query", "key", "value", "slopes", "future_slopes")
_NOTHING = nullcontext()
_REQUIRED = ("query", "key", "value", "slopes")
_OPTION_TYPES = {
    "causal": "bool",
    "left": "SymInt?",
    "right": "SymInt?",
    "sinks": "SymInt",
    "prefix": "SymInt",
    "metric": "str?",
    "scale": "float",
    "softcap": "float?",
    "dropout_p": "float",
    "tolerance": "float",
    "bounds_block": "SymInt",
    "paged_keys": "SymInt",
}
_CALL_SCHEMA = ", ".join(
    [f"Tensor{'' if name in _REQUIRED else '?'} {name}" for name in OPERAND_NAMES]
    + [f"{_OPTION_TYPES[name]} {name}" for name in OPTION_NAMES]
    + ["str backend"]
)
_FORWARD, _BACKWARD = "linbias::attention", "linbias::attention_backward"

# The schemas must be defined before the decorators below name them.
torch.library.define(
    _FORWARD,
    f"({_CALL_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    _BACKWARD,
    f"(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor lse_low, {_CALL_SCHEMA}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attention(problem: Problem, operands: Operands, backend: Backend) -> Result:
    """Run `backend.forward`, differentiably."""
    problem, operands = _fitted(problem, operands, backend)
    watched = _watched(problem, operands, backend)
    if watched is not None:
        return watched
    with full_precision(problem):
        return ordered.forward(backend, problem, operands)


def output(problem: Problem, operands: Operands, backend: Backend) -> Tensor:
    """The output of `attention`, without what only `Aux` and a gradient need, where nothing else asks for it."""
    problem, operands = _fitted(problem, operands, backend)
    watched = _watched(problem, operands, backend)
    if watched is not None:
        return watched.out
    with full_precision(problem):
        return ordered.output(backend, problem, operands)


def _fitted(problem: Problem, operands: Operands, backend: Backend) -> tuple[Problem, Operands]:
    """The call without pages and lengths for a backend that reads neither, and where pages are to get a gradient."""
    if operands.block_table is None and operands.key_lengths is None:
        return problem, operands
    wanted = torch.is_grad_enabled() and (operands.key.requires_grad or operands.value.requires_grad)
    if backend.READS_PAGES and not (wanted and operands.block_table is not None):
        return problem, operands
    operands, options = spelled_out(operands, problem.options)
    return Problem.of(operands, options, transformed=TRANSFORMED in problem.features), operands


def _watched(problem: Problem, operands: Operands, backend: Backend) -> Result | None:
    """The result by the operator or its gradient; None where calling the backend itself is the same."""
    if backend.COMPOSITE:
        return None
    if not _is_plain(operands):
        return Result(*torch.ops.linbias.attention(*operands, *problem.options, backend.NAME))
    if torch.is_grad_enabled():
        for tensor in operands:
            if tensor is not None and tensor.requires_grad:
                return Result(*_Eager.apply(*operands, *problem.options, backend.NAME))
    return None


def full_precision(problem: Problem) -> AbstractContextManager[Any]:
    """Autocast off: scores and bias stay in the accumulating dtype, which it would lower inside the products."""
    kind = problem.device.type
    return torch.autocast(kind, enabled=False) if autocast_enabled(kind) else _NOTHING


def _is_plain(tensors: Iterable[Tensor | None]) -> bool:
    """No tracer, transform or mode is watching real tensors, so the dispatcher's detour can be saved.

    It costs several times a small call. Tensors that are negative or zero by a mark, not by their memory, need it.
    """
    if not unwatched():
        return False
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in PLAIN_TENSORS
            or tensor.is_meta
            or tensor.is_neg()
            or tensor._is_zerotensor()
            or torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore
            or torch._C._functorch.is_legacy_batchedtensor(tensor)  # pyright: ignore
        ):
            return False
    return True


def _unpack(args: tuple[Any, ...]) -> tuple[Backend, Problem, Operands]:
    """The inverse of how `attention` spells a call."""
    operands = Operands(*args[: len(OPERAND_NAMES)])
    problem = Problem.of(operands, Options(*args[len(OPERAND_NAMES) : -1]))
    backend = select(args[-1], problem)
    return backend, *_fitted(problem, operands, backend)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    backend, problem, operands = _unpack(args)
    with full_precision(problem):
        result = ordered.forward(backend, problem, operands)
    return tuple(result)


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    operands = Operands(*args[: len(OPERAND_NAMES)])
    query, value = operands.query, operands.value
    rows, accumulator = query.shape[:3], accumulating_dtype(query.dtype)
    return (
        query.new_empty((*rows, value.shape[3])),
        query.new_empty(rows, dtype=accumulator),
        query.new_empty(rows, dtype=accumulator),
        query.new_empty(rows, dtype=accumulator),
        query.new_empty(rows[:2], dtype=torch.int64),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[: len(OPERAND_NAMES)], *output[:3])
    ctx.rest = inputs[len(OPERAND_NAMES) :]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, lse_low = ctx.saved_tensors
    needs = [ctx.needs_input_grad[OPERAND_NAMES.index(name)] for name in GRADIENT_NAMES]
    if grad_out is None and grad_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    call = (grad_out, grad_lse, out, lse, lse_low, *tensors, *ctx.rest, needs)
    # Where a gradient of gradients is asked for, the operator is what refuses it.
    direct = not torch.is_grad_enabled() and _is_plain((grad_out, grad_lse, out, *tensors))
    gradients = _backward(*call) if direct else torch.ops.linbias.attention_backward(*call)
    found = {name: got for name, got, need in zip(GRADIENT_NAMES, gradients, needs, strict=True) if need}
    return (*(found.get(name) for name in OPERAND_NAMES), *(None,) * len(ctx.rest))


class _Eager(torch.autograd.Function):
    """The operator with its gradient, without the dispatcher: the same functions."""

    forward = staticmethod(_forward)
    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)  # pyright: ignore[reportAssignmentType]  (each output has a name)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    grad_out, grad_lse, out, lse, lse_low, *call, needs = args
    if call[_TABLE] is not None and (needs[1] or needs[2]):
        raise BackendUnavailable(
            "no gradient flows to key and value in pages (block_table): give alibi_attention keys side by side"
        )
    backend, problem, operands = _unpack(tuple(call))
    with full_precision(problem):
        saved = (out, lse, lse_low, grad_out, grad_lse)
        found = ordered.backward(backend, problem, operands, *saved, tuple(needs))
    return tuple(
        out.new_empty(0) if gradient is None else gradient
        for gradient in (getattr(found, name) for name in GRADIENT_NAMES)
    )


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    _, _, out, _, _, *call, needs = args
    operands = Operands(*call[: len(OPERAND_NAMES)])
    return tuple(
        torch.empty_like(getattr(operands, name), memory_format=torch.contiguous_format) if need else out.new_empty(0)
        for name, need in zip(GRADIENT_NAMES, needs, strict=True)
    )


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.backend = inputs[-2]


def _refuse_second_order(ctx: Any, *_: Tensor | None) -> None:
    raise BackendUnavailable(
        f"backend {ctx.backend!r} has no second derivative: its backward recomputes tile by tile; "
        f"call with backend='reference', which is differentiable to any order; linbias.flash has no such argument: "
        f"call linbias.alibi_attention or alibi_attention_varlen in its place; for a patched model, "
        f"linbias.patch(model, fidelity='checkpoint') (Falcon within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)); "
        f"models of linbias.hf.models cannot be asked for another backend: take differences of first derivatives there"
    )


def _fold(tensor: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """(b, ...) under vmap as (size * B, ...): the examples become part of the batch."""
    examples = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return examples.expand(size, batch, *examples.shape[2:]).flatten(0, 1)


def _folded_call(
    size: int, batch: int, dims: tuple[int | None, ...], call: tuple[Any, ...], full: tuple[str, ...]
) -> list[Any]:
    """The operator's arguments with all examples in one batch; a shared b = 1 keeps broadcasting unless in `full`."""
    folded: list[Any] = []
    paged = call[_TABLE] is not None
    # Pages stay what they are while no example has its own: then all of them lie in one pool, example by example.
    pooled = paged and any(dims[place] is not None for place in _POOLS)
    pages = _rows(call[_POOLS[0]], dims[_POOLS[0]]) if pooled else 0
    for place, (name, tensor, dim) in enumerate(zip(OPERAND_NAMES, call, dims, strict=False)):
        pool = paged and place in _POOLS
        if tensor is None or (dim is None and tensor.shape[:1] == (1,) and name not in full) or (pool and not pooled):
            folded.append(tensor)
        else:
            folded.append(_fold(tensor, dim, size, pages if pool else batch))
    if pooled:
        first = pages * torch.arange(size, device=folded[_TABLE].device).repeat_interleave(batch)
        folded[_TABLE] = folded[_TABLE].clamp(0, max(pages - 1, 0)) + first[:, None]
    return folded + list(call[len(OPERAND_NAMES) :])


_SEED, _TABLE = (OPERAND_NAMES.index(name) for name in ("seed", "block_table"))
_POOLS = tuple(OPERAND_NAMES.index(name) for name in ("key", "value", "bound_norms"))
_FULL = ("query", "key", "value", "bound_norms", "block_table")


def _rows(tensor: Tensor, dim: int | None) -> int:
    """The first size of one example."""
    return tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1]


def _one_by_one(operator: Any, size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """For dropout, whose mask goes by the index in the batch: folded, an example would have another than alone."""
    rows = [
        operator(*(arg.select(dim, n) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)))
        for n in range(size)
    ]
    outputs = tuple(torch.stack(examples) for examples in zip(*rows, strict=True))
    return outputs, (0,) * len(outputs)


def _vmap_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    size, batch = info.batch_size, _rows(args[0], in_dims[0])
    if args[_SEED] is not None:
        return _one_by_one(torch.ops.linbias.attention, size, in_dims, args)
    folded = _folded_call(size, batch, in_dims, args, _FULL)
    outputs = torch.ops.linbias.attention(*folded)
    return tuple(tensor.unflatten(0, (size, batch)) for tensor in outputs), (0,) * len(outputs)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    size, needs = info.batch_size, args[-1]
    call, dims = args[5:-1], in_dims[5:-1]
    if call[_SEED] is not None:
        return _one_by_one(torch.ops.linbias.attention_backward, size, in_dims, args)
    batch = _rows(call[0], dims[0])
    saved = [
        None if tensor is None else _fold(tensor, dim, size, batch)
        for tensor, dim in zip(args[:5], in_dims[:5], strict=True)
    ]
    # Slopes shared by the batch still need a gradient an example.
    folded = _folded_call(size, batch, dims, call, (*_FULL, "slopes", "future_slopes"))
    outputs = torch.ops.linbias.attention_backward(*saved, *folded, needs)
    unfolded: list[Tensor] = []
    for name, need, gradient in zip(GRADIENT_NAMES, needs, outputs, strict=True):
        if not need:
            unfolded.append(gradient.expand(size, 0))
            continue
        place = OPERAND_NAMES.index(name)
        examples = gradient.unflatten(0, (size, batch))
        unfolded.append(examples.sum(1, keepdim=True) if _rows(call[place], dims[place]) == 1 else examples)
    return tuple(unfolded), (0,) * len(unfolded)


torch.library.impl(_FORWARD, "CompositeExplicitAutograd", _forward)
torch.library.impl(_BACKWARD, "CompositeExplicitAutograd", _backward)
torch.library.register_fake(_FORWARD, _fake_forward)
torch.library.register_fake(_BACKWARD, _fake_backward)
torch.library.register_autograd(_FORWARD, _differentiate, setup_context=_save)
torch.library.register_autograd(_BACKWARD, _refuse_second_order, setup_context=_save_nothing)
torch.library.register_vmap(_FORWARD, _vmap_forward)
torch.library.register_vmap(_BACKWARD, _vmap_backward)
