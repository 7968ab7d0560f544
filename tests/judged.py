# SPDX-License-Identifier: Apache-2.0
"""`linbias.testing`'s budgets around the answers of tests/oracle.py, which shares no rule with what it judges."""

from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from linbias.testing import Inputs, Judge, largest_error
from tests.oracle import attend


def answers(inputs: Inputs) -> dict[str, Tensor]:
    """What docs/semantics.md makes of a call: output, lse and gradients by name, in float64."""
    given = {each.name: getattr(inputs, each.name) for each in fields(inputs) if each.name not in ("options", "bounds")}
    found = attend(**given, **inputs.options)
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}


def judged(inputs: Inputs) -> Judge:
    """`Judge.of`, with the oracle's answers for the reference's.

    The plain formula, from which the budget comes, is linbias's own, so it must itself be off by no more than rounding:
    a wrong rule in it would widen the budget until everything fits.
    """
    own = Judge.of(inputs)
    judge = replace(own, exact=answers(inputs))
    single = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    assert own.exact.keys() == judge.exact.keys()
    for name, found in own.exact.items():
        assert_rounded(found, judge, name, torch.float64)
        if "slopes" not in name:  # their budget is made of terms
            stored = torch.finfo(inputs.dtype_of(name)).eps * max(1.0, _largest(judge.exact[name]))
            assert judge.plain_error[name] <= rounding(judge, name, single) + stored, f"{name} of the plain formula"
    return judge


def rounding(judge: Judge, name: str, dtype: torch.dtype) -> float:
    """More than rounding can do: every result is a sum of products of exponentials of scores, each rounded in dtype."""
    inputs = judge.inputs
    (_, heads, queries, dim), (_, _, keys, width) = inputs.query.shape, inputs.value.shape
    scores = max(1.0, _largest(judge.exact["lse"]))
    summands = queries * keys * heads + dim + width
    return summands * torch.finfo(dtype).eps * scores * max(1.0, _largest(judge.exact[name]))


def assert_rounded(found: Tensor, judge: Judge, name: str, dtype: torch.dtype) -> None:
    """Nothing but rounding in dtype lies between what was found and the oracle."""
    exact = judge.exact[name]
    assert found.shape == exact.shape, f"{name}: shape {tuple(found.shape)}, expected {tuple(exact.shape)}"
    error = largest_error(found, exact)
    assert error <= rounding(judge, name, dtype), f"{name}: {error:.2e} from the oracle"


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
