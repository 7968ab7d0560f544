# SPDX-License-Identifier: Apache-2.0
"""A long text's MLP in blocks of rows: the same results, and nothing that could tell gets less than the whole."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import linbias
from linbias.hf import bloom, falcon, mlp, mpt
from tests.hf.tiny import base, every_kind, make, tokens, transformers

BATCH, LENGTH, ROWS = 3, 11, 4
PATCHED = (bloom.BloomMLP, mpt.MptMLP, falcon.FalconMLP)
BLOCKS = -(-BATCH * LENGTH // ROWS)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "_LEAST_ROWS", ROWS)
    monkeypatch.setattr(mlp, "_BLOCK", 0)


def layers(model: Any) -> list[Any]:
    return [part for part in model.modules() if type(part) in PATCHED]


def original_of(layer: Any) -> Any:
    """transformers' class of it."""
    return type(layer).__mro__[2]


def blocks_of(model: Any, run: Any) -> tuple[Any, int]:
    """What `run` returns, and how often the first layer's MLP was run for it."""
    original = original_of(layers(model)[0])
    seen: list[object] = []
    forward = original.forward

    def counted(self: object, *inputs: Tensor) -> Tensor:
        seen.append(self)
        return forward(self, *inputs)

    with mock.patch.object(original, "forward", counted):
        result = run()
    return result, sum(one is layers(model)[0] for one in seen)


def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


@every_kind
def test_blocks_change_nothing(kind: str):
    model, ids = make(kind), tokens(BATCH, LENGTH)
    with torch.no_grad():
        linbias.patch(model)
        found, count = blocks_of(model, lambda: logits(model, ids))
        with mock.patch.object(mlp, "_LEAST_ROWS", BATCH * LENGTH):
            whole, once = blocks_of(model, lambda: logits(model, ids))
    assert (count, once) == (BLOCKS, 1)
    # A product of another height may sum in another order.
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def test_slices_of_the_training_run():
    """BLOOM's slow_but_exact sums its projection by slices, which blocks leave alone."""
    model = make("bloom", pretraining_tp=2, slow_but_exact=True)
    ids = tokens(BATCH, LENGTH)
    with torch.no_grad():
        expected = logits(model, ids)
        linbias.patch(model)
        found, count = blocks_of(model, lambda: logits(model, ids))
    assert count == BLOCKS
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@every_kind
def test_autocast_keeps_its_types(kind: str):
    model, ids = make(kind), tokens(BATCH, LENGTH)
    linbias.patch(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, count = blocks_of(model, lambda: base(model)(ids, use_cache=False)[0])
        with mock.patch.object(mlp, "_LEAST_ROWS", BATCH * LENGTH):
            whole = base(model)(ids, use_cache=False)[0]
    assert count == BLOCKS
    assert found.dtype == whole.dtype
    # One bfloat16 rounding of a differently summed product, in each of three layers.
    torch.testing.assert_close(found, whole, atol=3 * 2**-8 * float(whole.abs().max()), rtol=0)


def watch(part: Any) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    part.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.shape)))
    return shapes


@pytest.mark.parametrize("index", [0, 1, 2], ids=["up", "activation", "down"])
@every_kind
def test_hooks_see_the_whole_text(kind: str, index: int):
    model, ids = make(kind), tokens(BATCH, LENGTH)
    linbias.patch(model)
    children = [part for _, part in layers(model)[0].named_children()]
    shapes = watch(children[index])
    with torch.no_grad():
        logits(model, ids)
    assert [shape[:2] for shape in shapes] == [(BATCH, LENGTH)]


def test_hooks_on_every_module_see_the_whole_text():
    model, ids = make("mpt"), tokens(BATCH, LENGTH)
    linbias.patch(model)
    shapes: list[tuple[int, ...]] = []

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if module is layers(model)[0].up_proj:
            shapes.append(tuple(output.shape[:2]))

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        with torch.no_grad():
            logits(model, ids)
    finally:
        handle.remove()
    assert shapes == [(BATCH, LENGTH)]


class Adapted(nn.Linear):
    """Any layer that is not the model's own may look at all rows at once, as LLM.int8 does."""


class Levels(nn.Module):
    """An activation with one scale for all rows, as a quantiser fitted on the fly has."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max() / 127
        return (x / scale).round() * scale


class Weight(Tensor):
    """A weight of its own class, which may do anything to the input, as torchao's do."""

    def detach(self) -> Tensor:
        return self


WHYS = (
    "gradients",
    "training",
    "adapter",
    "weight",
    "activation",
    "hook within the activation",
    "replaced forward",
    "short",
)


@pytest.mark.parametrize("why", WHYS)
def test_whole_where_blocks_could_be_told(why: str):
    model = make("falcon")
    linbias.patch(model)
    first = layers(model)[0]
    if why == "adapter":
        first.dense_h_to_4h = Adapted(first.dense_h_to_4h.in_features, first.dense_h_to_4h.out_features)
    if why == "weight":
        weight = first.dense_4h_to_h.weight.detach().as_subclass(Weight)
        first.dense_4h_to_h.weight = nn.Parameter(weight, requires_grad=False)
    if why == "activation":
        first.act = Levels()
    if why == "hook within the activation":
        first.act = nn.Sequential(first.act)
        watch(first.act[0])
    if why == "replaced forward":
        first.act.forward = torch.tanh
    model.train(why == "training")
    ids = tokens(1, ROWS) if why == "short" else tokens(BATCH, LENGTH)
    with torch.set_grad_enabled(why == "gradients"):
        _, count = blocks_of(model, lambda: logits(model, ids))
    assert count == 1


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
@torch.no_grad()
def test_residual_that_broadcasts(kind: str):
    model = make(kind)
    linbias.patch(model)
    hidden, residual = torch.randn(BATCH, LENGTH, 48), torch.randn(48)
    first = layers(model)[0]
    assert torch.equal(first(hidden, residual), original_of(first).forward(first, hidden, residual))


def test_checkpoint_fidelity_keeps_the_original():
    model = make("bloom")
    linbias.patch(model, fidelity="checkpoint")
    assert not layers(model)
    assert any(type(part) is transformers.models.bloom.modeling_bloom.BloomMLP for part in model.modules())
