# SPDX-License-Identifier: Apache-2.0
"""Every backend on every problem, against the oracle in float64 and within the derived budget."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from linbias import alibi_attention, backends
from linbias.testing import PROBLEMS, Case, Inputs, Judge, evaluate, make_inputs
from tests.every import REQUIRED, every_backend, skip_unless_it_can
from tests.judged import judged

# One of each kind, for what need not be asked of every problem.
SAMPLE = (
    Case(heads=6, kv_heads=2, causal=True, future="steeper"),
    Case(batch=1, heads=3, kv_heads=1, queries=197, keys=203, causal=True, slopes="items", future="steeper"),
    Case(mask="full", segments="mixed", positions="items", future="items", unbiased=2, softcap=4.0, poison=True),
    Case(positions="points", metric="euclidean", padding="left", dropout_p=0.25, dtype=torch.float64),
    Case(heads=8, kv_heads=2, queries=1, keys=131, causal=True, window=(60, 0), sinks=3, dtype=torch.bfloat16),
)
sampled = pytest.mark.parametrize("case", SAMPLE, ids=str)


@lru_cache(maxsize=2)  # the backends of one problem follow each other
def judge_of(case: Case, silent: str | None = None) -> Judge:
    inputs = make_inputs(case)
    return judged(replace(inputs, **{silent: torch.zeros_like(getattr(inputs, silent))}) if silent else inputs)


@every_backend
@pytest.mark.parametrize("case", PROBLEMS, ids=str)
def test_output_and_gradients(case: Case, backend: str):
    judge = judge_of(case)
    skip_unless_it_can(backend, judge.inputs)
    judge.assert_conforms(backend)


def test_required_backends_exist():
    assert set(REQUIRED) <= set(backends.available())


@every_backend
@sampled
def test_same_call_same_bits(case: Case, backend: str):
    inputs = make_inputs(case)
    skip_unless_it_can(backend, inputs)
    (first, first_aux), (second, second_aux) = evaluate(inputs, backend), evaluate(inputs, backend)
    for name in first:
        assert first[name].equal(second[name]), name
    assert first_aux.skipped.equal(second_aux.skipped) and first_aux.computed.equal(second_aux.computed)


@every_backend
@pytest.mark.parametrize("source", ["out", "lse"])
@pytest.mark.parametrize(
    ("case", "wanted"),
    [(case, name) for case in SAMPLE for name in ("query", "key", "value", "slopes", "future_slopes")
     if name != "future_slopes" or case.future],
    ids=str,
)  # fmt: skip
def test_one_gradient_from_one_result(case: Case, backend: str, wanted: str, source: str):
    judge = judge_of(case, silent="grad_lse" if source == "out" else "grad_out")
    skip_unless_it_can(backend, judge.inputs)
    found = _one_gradient(judge.inputs, backend, wanted, source)
    if found is None:
        assert (wanted, source) == ("value", "lse"), "only the lse owes nothing, and only to the value"
    else:
        judge.assert_within(f"grad_{wanted}", found, f"{wanted} from {source} on {backend}")


def _one_gradient(inputs: Inputs, backend: str, wanted: str, source: str) -> torch.Tensor | None:
    tensors = {name: getattr(inputs, name) for name in ("query", "key", "value", "slopes", "future_slopes")}
    tensors[wanted] = tensors[wanted].detach().requires_grad_()
    with inputs.seeded():
        out, aux = alibi_attention(**tensors, **inputs.options, backend=backend, return_aux=True)
    result, gradient = (out, inputs.grad_out) if source == "out" else (aux.lse, inputs.grad_lse)
    if not result.requires_grad:
        return None
    return torch.autograd.grad(result, tensors[wanted], gradient, allow_unused=True)[0]


@every_backend
@sampled
def test_same_bits_with_and_without_a_gradient(case: Case, backend: str):
    inputs = make_inputs(case)
    skip_unless_it_can(backend, inputs)
    results, _ = evaluate(inputs, backend)
    call = (inputs.query, inputs.key, inputs.value, inputs.slopes)
    options = {"future_slopes": inputs.future_slopes, **inputs.options}
    with inputs.seeded():
        out, aux = alibi_attention(*call, **options, backend=backend, return_aux=True)
    assert out.equal(results["out"]) and aux.lse.equal(results["lse"])
    assert not out.requires_grad and not aux.lse.requires_grad


@every_backend
def test_the_bias_is_applied(backend: str):
    inputs = make_inputs(Case(causal=True, heads=4))
    skip_unless_it_can(backend, inputs)
    call = (inputs.query, inputs.key, inputs.value)
    biased = alibi_attention(*call, inputs.slopes, causal=True, backend=backend)
    unbiased = alibi_attention(*call, torch.zeros(4), causal=True, backend=backend)
    assert ((biased - unbiased).abs().amax((0, 2, 3)) > 1e-2).all()


@every_backend
@sampled
def test_strides_of_options_and_gradients_do_not_matter(case: Case, backend: str):
    inputs = make_inputs(case)
    skip_unless_it_can(backend, inputs)

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        """The same values, each element two apart and the last two dimensions swapped in memory."""
        if tensor.dim() < 2:
            return torch.stack((tensor, tensor), -1)[..., 0]
        return torch.stack((tensor.mT, tensor.mT), -1)[..., 0].mT

    others = {name: strided(tensor) for name, tensor in inputs.tensors().items() if hasattr(inputs, name)}
    options = {
        name: strided(given) if isinstance(given, torch.Tensor) else given for name, given in inputs.options.items()
    }
    judge = judge_of(case)
    Judge(
        replace(inputs, **others, options=options), judge.exact, judge.plain_error, judge.slope_terms
    ).assert_conforms(backend)


@every_backend
def test_an_expanded_gradient(backend: str):
    inputs = make_inputs(SAMPLE[0])
    skip_unless_it_can(backend, inputs)
    for shape in ((1, 1, 1, 1), (1, 1, 1, 16), (1, 6, 19, 1)):
        narrow = torch.randn(shape)
        wide = replace(inputs, grad_out=narrow.expand_as(inputs.grad_out))
        judged(wide).assert_conforms(backend)
