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
    exact = answers(inputs)
    assert_rounded(own.exact, exact, inputs, torch.float64)
    single = torch.float64 if inputs.query.dtype == torch.float64 else torch.float32
    for name, error in own.plain_error.items():
        if "slopes" not in name:  # whose budget is made of terms
            stored = torch.finfo(inputs.dtype_of(name)).eps * max(1.0, _largest(exact[name]))
            assert error <= rounding(exact, name, inputs, single) + stored, f"{name} of the plain formula: {error:.2e}"
    return replace(own, exact=exact)


def rounding(exact: dict[str, Tensor], name: str, inputs: Inputs, dtype: torch.dtype) -> float:
    """More than rounding can do: a result is a sum of products with exponentials of scores, each rounded in dtype."""
    (_, heads, queries, dim), (_, _, keys, width) = inputs.query.shape, inputs.value.shape
    scores, largest = (max(1.0, _largest(exact[which])) for which in ("lse", name))
    return (queries * keys * heads + dim + width) * torch.finfo(dtype).eps * scores * largest


def assert_rounded(found: dict[str, Tensor], exact: dict[str, Tensor], inputs: Inputs, dtype: torch.dtype) -> None:
    """Nothing but rounding in dtype lies between what was found and the oracle."""
    assert found.keys() == exact.keys()
    for name, wanted in exact.items():
        assert found[name].shape == wanted.shape, f"{name}: {tuple(found[name].shape)}, expected {tuple(wanted.shape)}"
        error, bound = largest_error(found[name], wanted), rounding(exact, name, inputs, dtype)
        assert error <= bound, f"{name}: {error:.2e} from the oracle, at most {bound:.2e} is rounding"


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
