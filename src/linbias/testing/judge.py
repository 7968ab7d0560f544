# SPDX-License-Identifier: Apache-2.0
"""The budget for an answer's error, derived and never tuned.

The oracle is the reference backend in float64, which the tests pin by literal answers and plain loops. A budget comes
from what the plain formula loses in the same dtype, so no problem needs a constant of its own:

    2 * error of the plain formula + eps * max|exact|  + 2 * tolerance * max|value| / (1 - dropout_p)   for the output
                                                       + tolerance / (1 - tolerance)                    for the lse

The plain formula is written in both forms it has (`recompute`), and the larger error counts. Half types accumulate in
float32 and round once, so there the plain formula does too. In float64 its error is the one it makes in float32 times
the ratio of the two eps. The gradient of a slope is one number summed over all pairs, whose plain error can be small by
luck; its budget is 4 * eps * sum |terms|.

>>> from linbias.testing import Case, conform
>>> conform(Case(heads=3, queries=5, keys=7, head_dim=16, causal=True, dtype=torch.bfloat16), "reference")
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import Aux, alibi_attention
from ..semantics.bounds import key_bounds
from ..semantics.problem import accumulating_dtype
from .cases import Case
from .inputs import Inputs, make_inputs
from .recompute import recompute

_LEAVES = ("query", "key", "value", "slopes", "future_slopes")


def evaluate(inputs: Inputs, backend: str = "reference") -> tuple[dict[str, Tensor], Aux]:
    """Output, lse and every gradient of one call, by name, and what else the call returned."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in _LEAVES if name in inputs.tensors()}
    options = dict(inputs.options)
    if inputs.bounds:
        options["key_bounds"] = key_bounds(inputs.key, inputs.bounds)
    with inputs.seeded():
        out, aux = alibi_attention(**leaves, **options, backend=backend, return_aux=True)
    gradients = torch.autograd.grad((out, aux.lse), tuple(leaves.values()), (inputs.grad_out, inputs.grad_lse))
    found = {"out": out.detach(), "lse": aux.lse.detach()}
    return found | {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}, aux


def largest_error(actual: Tensor, exact: Tensor) -> float:
    """max |actual - exact|: NaN if there is any, inf where only one is infinite, 0 if there is nothing to compare."""
    if actual.numel() == 0:
        return 0.0
    same = actual.double() == exact.double()  # two infinities differ by NaN
    return float(torch.where(same, 0.0, (actual.double() - exact.double()).abs()).max().detach())


def assert_within_budget(
    actual: Tensor, exact: Tensor, plain: Tensor | float, name: str, *, allowance: float = 0.0
) -> None:
    """Error of ``actual`` <= 2 * error of ``plain`` + eps * max|exact| + allowance, all against ``exact``.

    Args:
        actual: what is judged.
        exact: the same in float64.
        plain: the plain formula's result in the dtype of ``actual``, or its error.
        name: for the message.
        allowance: what the call may add to rounding (skipping within a tolerance).

    Raises:
        AssertionError: with the error and the budget. NaN is never within one.

    >>> assert_within_budget(torch.ones(2), torch.ones(2).double(), 0.0, "ones")
    """
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    plain_error = largest_error(plain, exact) if isinstance(plain, Tensor) else plain
    budget = 2 * plain_error + torch.finfo(actual.dtype).eps * _largest(exact) + allowance
    error = largest_error(actual, exact)
    assert error <= budget, f"{name}: error {error:.2e} > budget {budget:.2e} (plain formula: {plain_error:.2e})"


def conform(case: Case, backend: str, device: torch.device | str = "cpu") -> None:
    """Assert that ``backend`` solves ``case`` within the budget; `Judge` where several backends are judged.

    Raises:
        AssertionError: naming what is off, and by how much.
        BackendUnavailable: the backend cannot run this case.
    """
    Judge.of(make_inputs(case, device)).assert_conforms(backend)


@dataclass(frozen=True)
class Judge:
    """What the results of a call are held against, computed once for all backends."""

    inputs: Inputs
    exact: dict[str, Tensor]
    """From the oracle, in float64."""
    plain_error: dict[str, float]
    """What the plain formula loses in the dtype of the inputs."""
    slope_terms: dict[str, Tensor]
    """sum |terms| of the gradients of slopes and future slopes, in their shapes."""

    @staticmethod
    def of(inputs: Inputs) -> "Judge":
        """Run the oracle and both forms of the plain formula."""
        exact, single, dtype = evaluate(inputs.exactly())[0], inputs.exactly(torch.float32), inputs.query.dtype
        plain = (evaluate(single)[0], recompute(single, dtype)[0])
        if dtype == torch.float64:
            oracle = evaluate(single.exactly())[0]
            # Half as much again, because the oracle rounds in float64 itself.
            unit = 1.5 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        else:
            oracle, unit = exact, 1.0
            plain = [{name: made.to(inputs.dtype_of(name)) for name, made in form.items()} for form in plain]
        error = {name: unit * max(largest_error(form[name], oracle[name]) for form in plain) for name in exact}
        return Judge(inputs, exact, error, recompute(inputs.exactly(), torch.float64)[1])

    def assert_conforms(self, backend: str) -> None:
        """Run ``backend`` and hold output, lse and every gradient against the budget; see `conform`."""
        tensors = self.inputs.tensors()
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        actual, aux = evaluate(self.inputs, backend)
        for name, tensor in tensors.items():
            assert tensor.allclose(copies[name], 0, 0, equal_nan=True), f"{backend} modified {name}"
        _check_aux(aux, self.inputs, self.tolerance)
        # Gradients under a coarse tolerance have bounds of their own, tested beside the ledger that keeps them.
        coarse = self.tolerance > torch.finfo(accumulating_dtype(self.inputs.query.dtype)).eps
        for name in ("out", "lse") if coarse else self.exact:
            self.assert_within(name, actual[name], f"{name} on {backend}")

    def assert_within(self, name: str, found: Tensor, label: str) -> None:
        """Hold one result, by its name in ``exact``, against its budget."""
        exact, wanted = self.exact[name], self.inputs.dtype_of(name)
        assert found.dtype == wanted, f"{label}: dtype {found.dtype}, expected {wanted}"
        if name not in self.slope_terms:
            allowances = {
                "out": 2 * self.tolerance * _largest(self.inputs.value) / (1 - self.inputs.options["dropout_p"]),
                "lse": self.tolerance / (1 - self.tolerance),
            }
            assert_within_budget(found, exact, self.plain_error[name], label, allowance=allowances.get(name, 0.0))
            return
        assert found.shape == exact.shape, f"{label}: shape {tuple(found.shape)}, expected {tuple(exact.shape)}"
        eps = max(torch.finfo(dtype).eps for dtype in (self.inputs.query.dtype, wanted))
        excess = (found.double() - exact).abs() - 4 * eps * self.slope_terms[name]
        assert bool((excess <= 0).all()), f"{label}: {found.tolist()} for {exact.tolist()}, over by {excess.tolist()}"

    @property
    def tolerance(self) -> float:
        """What the call allows; the default is `linbias.alibi_attention`'s."""
        default = torch.finfo(accumulating_dtype(self.inputs.query.dtype)).eps / 4
        return self.inputs.options.get("tolerance", default)


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _check_aux(aux: Aux, inputs: Inputs, tolerance: float) -> None:
    """The promises about skipped and computed that need no oracle."""
    batch, heads, queries, _ = inputs.query.shape
    assert aux.skipped.shape == aux.lse.shape and aux.skipped.dtype == aux.lse.dtype and not aux.skipped.requires_grad
    assert bool(((aux.skipped >= 0) & (aux.skipped <= tolerance)).all()), f"skipped {aux.skipped.max()} > {tolerance}"
    assert aux.computed.shape == (heads,) and aux.computed.dtype == torch.int64
    pairs = batch * queries * inputs.key.shape[2]
    assert bool(((aux.computed >= 0) & (aux.computed <= pairs)).all()), f"computed {aux.computed.tolist()} of {pairs}"
