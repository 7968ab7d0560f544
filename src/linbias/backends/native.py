# SPDX-License-Identifier: Apache-2.0
"""Backend `native`: the C++ kernels of csrc/, on CPU.

This file allocates results and hands tensors over; the kernels do the rest. Nothing is copied: any strides are read
where they are.
"""

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..errors import BackendUnavailable
from ..semantics.problem import OPERAND_NAMES, OPTION_NAMES, Gradients, Operands, Problem, Result

NAME = "native"
COMPOSITE = False
READS_PAGES = True
SUPPORTS = frozenset(
    (
        *("future_slopes", "query_positions", "key_positions", "query_segments", "key_segments"),
        *("key_mask", "attn_mask", "key_ranks", "query_unbiased", "key_unbiased", "bound_norms", "seed"),
        *("causal", "left", "right", "sinks", "prefix", "metric", "scale", "softcap", "dropout_p", "tolerance"),
        *("bounds_block", "key_lengths", "block_table", "paged_keys"),
    )
)
"""The features of a problem that these kernels honour."""

_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
# Looked for, not loaded: asking why_not imports no kernel.
INSTALLED = find_spec("linbias._native") is not None


def why_not(problem: Problem) -> str | None:
    """The reason this call cannot run here, or None."""
    if problem.device.type != "cpu":
        return f"runs on CPU tensors, got {problem.device.type!r}"
    if not INSTALLED:
        return (
            "its kernels were not built, for want of a working C++17 compiler; reinstall linbias with one: "
            "pip install --force-reinstall --no-deps --no-cache-dir, since pip keeps the wheel without kernels"
        )
    if problem.dtype not in _DTYPES:
        return f"supports float32, float64, bfloat16 and float16, got {problem.dtype}"
    return problem.beyond(SUPPORTS)


def forward(problem: Problem, operands: Operands) -> Result:
    """One pass over the visible tiles; see csrc/forward.h."""
    # Sizes one by one and no keywords: a small call costs little more than its results.
    rows = (problem.batch, problem.heads, problem.queries)
    sums = operands.slopes
    result = Result(
        operands.query.new_empty(*rows, problem.value_dim),
        sums.new_empty(*rows),
        sums.new_empty(*rows),
        sums.new_empty(*rows),
        sums.new_empty(rows[:2], dtype=torch.int64),
    )
    _kernels().forward(operands, problem.options, result, torch.get_num_threads(), _variant)
    return result


def output(problem: Problem, operands: Operands) -> Tensor:
    """The same pass, which then writes nothing but the output."""
    out = operands.query.new_empty(problem.batch, problem.heads, problem.queries, problem.value_dim)
    _kernels().forward(operands, problem.options, (out, None, None, None, None), torch.get_num_threads(), _variant)
    return out


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
    """Gradients in one pass of five products a tile, recomputed from the saved output and lse; see csrc/backward.h."""
    rows = (problem.batch, problem.heads)
    shapes = (operands.query.shape, operands.key.shape, operands.value.shape, rows, rows)
    dtypes = (problem.dtype,) * 3 + (problem.accumulator,) * 2
    found = Gradients(
        *(
            torch.empty(shape, dtype=dtype, device="cpu") if need else None
            for shape, dtype, need in zip(shapes, dtypes, needs, strict=True)
        )
    )
    saved = (out, lse, lse_low, grad_out, grad_lse)
    _kernels().backward(operands, problem.options, *saved, found, torch.get_num_threads(), _variant)
    return found._replace(
        slopes=_over_batch(found.slopes, operands.slopes),
        future_slopes=_over_batch(found.future_slopes, operands.future_slopes),
    )


def _over_batch(gradient: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    """Slopes that the batch shares sum what the items found."""
    if gradient is None or slopes is None or slopes.shape[0] != 1:
        return gradient
    return gradient.sum(0, keepdim=True)


# Which build of the kernels runs; "": the widest this processor has. Tests compare them all.
_variant = ""


@cache
def _kernels() -> ModuleType:
    from linbias import _native

    names = (OPERAND_NAMES, OPTION_NAMES, Result._fields, Gradients._fields)
    try:
        unknown = SUPPORTS.difference(_native.bind(Tensor.__dlpack_c_exchange_api__, *names))  # pyright: ignore
    except (AttributeError, KeyError, TypeError, ValueError) as reason:
        raise _other_sources(f"{type(reason).__name__}: {reason}") from reason
    if unknown:
        raise _other_sources(f"they know nothing of {', '.join(sorted(unknown))}")
    return _native


def _other_sources(reason: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"backend 'native' cannot use its kernels, which were built for other sources of linbias ({reason}); install "
        f"linbias again (in a checkout: make setup), or pass backend='tiled'"
    )
