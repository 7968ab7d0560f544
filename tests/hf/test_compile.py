# SPDX-License-Identifier: Apache-2.0
"""Patched models under torch.compile and torch.export: whole graphs, no recompiling from token to token."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import linbias
from tests.hf.tiny import CACHE, every_family, gradients, labels_of, lengths_mask, make, tokens, transformers

slow = pytest.mark.slow
# Dynamo instantiates the autograd function of BLOOM's own GELU, and torch warns of that.
of_torch = pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
# What they share, one family shows; recording programs takes seconds.
one_quick = pytest.mark.parametrize("kind", ["bloom", *(pytest.param(kind, marks=slow) for kind in ("mpt", "falcon"))])


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("fidelity", ["exact", pytest.param("checkpoint", marks=[slow, of_torch])])
@one_quick
def test_compiled_once_for_any_length(kind: str, fidelity: Any):
    """At most two compilations for four lengths; fullgraph, so a graph break is an error."""
    model = make(kind, layers=1)
    linbias.patch(model, fidelity=fidelity)
    count = CompileCounter()
    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (13, 17, 29, 31):
            ids, mask = tokens(2, length), lengths_mask(length, length - 5)
            real = mask.bool()
            expected = model(ids, attention_mask=mask, use_cache=False).logits[real]
            actual = compiled(ids, attention_mask=mask, use_cache=False).logits[real]
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    assert count.frame_count <= 2


@slow
@every_family
def test_compiled_training(kind: str):
    model, ids, mask = make(kind, layers=1), tokens(2, 13), lengths_mask(13, 8)
    linbias.patch(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def loss(run: Any) -> Tensor:
        return run(ids, attention_mask=mask, labels=labels_of(ids, mask), use_cache=False).loss

    expected = gradients(model, loss)
    actual = gradients(model, lambda _: loss(compiled))
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@one_quick
def test_no_recompile_between_steps(kind: str):
    """Steps on a static cache are one program, whose positions are data."""
    model, ids = make(kind, layers=1), tokens(2, 16)
    linbias.patch(model)
    count = CompileCounter()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        expected = model(ids).logits
        model(ids[:, :7], use_cache=True, **{CACHE: cache})
        for n in range(7, 16):
            step = compiled(ids[:, n : n + 1], use_cache=True, **{CACHE: cache}).logits
            torch.testing.assert_close(step[:, 0], expected[:, n], atol=2e-5, rtol=0)
    assert count.frame_count == 1


@pytest.mark.parametrize("fidelity", ["exact", pytest.param("checkpoint", marks=[slow, of_torch])])
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=slow)])
@one_quick
def test_export_with_any_batch_and_length(kind: str, strict: bool, fidelity: Any):
    model, ids, mask = make(kind, layers=1), tokens(2, 13), lengths_mask(13, 8)
    linbias.patch(model, fidelity=fidelity)
    free = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=4096)}
    program = torch.export.export(
        model,
        (ids,),
        {"attention_mask": mask, "use_cache": False},
        dynamic_shapes={"input_ids": free, "attention_mask": free, "use_cache": None},
        strict=strict,
    )
    ids, mask = tokens(3, 37), lengths_mask(37, 21, 30)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        actual = program.module()(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@slow
@every_family
def test_inductor(kind: str):
    model, ids = make(kind, layers=2), tokens(2, 21)
    linbias.patch(model)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, atol=5e-5, rtol=0)


@every_family
def test_functional_call_and_vmap(kind: str):
    """Several sets of weights at once."""
    model, ids = make(kind, layers=1), tokens(2, 9)
    linbias.patch(model)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    several = {name: torch.stack([tensor, tensor * 1.1]) for name, tensor in weights.items()}

    def run(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (ids,), {"use_cache": False}).logits

    with torch.no_grad():
        both = torch.func.vmap(run)(several)
        for n in range(2):
            alone = run({name: tensor[n] for name, tensor in several.items()})
            torch.testing.assert_close(both[n], alone, atol=2e-5, rtol=0)
