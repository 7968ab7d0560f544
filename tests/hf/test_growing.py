# SPDX-License-Identifier: Apache-2.0
"""transformers' DynamicCache, appended to in place: what it shows is what a DynamicLayer shows, always."""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import linbias
from linbias.attention import output, run
from linbias.hf import growing as growing_module
from linbias.hf.growing import GrowingLayer, grow_in_place
from tests.hf.tiny import CACHE, every_family, every_kind, make, store, tokens, transformers

DynamicLayer = transformers.cache_utils.DynamicLayer
HEADS, WIDTH = 2, 3

ACTIONS: dict[str, Callable[[Any, int], object]] = {
    "crop": lambda layer, n: layer.crop(-n),
    "reorder": lambda layer, n: layer.reorder_cache(torch.arange(layer.keys.shape[0]).roll(n)),
    "repeat": lambda layer, n: layer.batch_repeat_interleave(2),
    "select": lambda layer, n: layer.batch_select_indices(torch.tensor([0, 0])),
    "reset": lambda layer, n: layer.reset(),
    "replace": lambda layer, n: vars(layer).update(keys=layer.keys[:, :, n:], values=layer.values[:, :, n:]),
}
APPEND = st.tuples(st.just("append"), st.integers(1, 80))
CHANGE = st.tuples(st.sampled_from(list(ACTIONS)), st.integers(1, 3))


def pair(tensors: Any) -> tuple[Tensor, Tensor]:
    return tensors[0], tensors[1]


@given(
    seed=st.integers(0, 2**16),
    actions=st.lists(APPEND | CHANGE, max_size=12),
)
def test_any_history_shows_what_a_dynamic_layer_shows(seed: int, actions: list[tuple[str, int]]):
    """What was shown before stays as it was, whoever has kept it; and the bounds are those of the keys."""
    noise = torch.Generator().manual_seed(seed)
    plain, growing = DynamicLayer(), GrowingLayer()
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), mock.patch.object(growing_module, "_LEAST_MEASURED", 9):
        for name, number in [("append", 5), *actions]:
            if name == "append":
                batch = 1 if not plain.get_seq_length() else plain.keys.shape[0]
                key, value = torch.randn(2, batch, HEADS, number, WIDTH, generator=noise)
                expected, found = pair(plain.update(key, value)), pair(growing.update(key, value))
                assert found[0] is growing.keys and found[1] is growing.values
                assert all(map(torch.equal, found, expected))
                kept += [(part, part.clone()) for part in found]
                bounds = growing.bounds()
                assert (bounds is None) == (growing.keys.shape[2] < 9 or growing._grown is None)
                if bounds is not None:
                    torch.testing.assert_close(bounds.norms, linbias.key_bounds(growing.keys).norms, rtol=0, atol=0)
            elif plain.get_seq_length() > number:
                for layer in (plain, growing):
                    ACTIONS[name](layer, number)
            assert growing.get_seq_length() == plain.get_seq_length()
    for part, copied in kept:
        assert torch.equal(part, copied)


def appended(layer: Any, count: int, **options: Any) -> Any:
    for _ in range(count):
        layer.update(*torch.randn(2, 1, HEADS, 1, WIDTH, **options))
    return layer


def place(layer: Any) -> tuple[int, int]:
    return layer.keys.data_ptr(), layer.values.data_ptr()


@torch.no_grad()
def test_moves_seldom():
    layer = appended(GrowingLayer(), 2)
    places = set()
    for _ in range(600):
        places.add(place(appended(layer, 1)))
    # Each move makes room for at least 64 more, and from 512 tokens on for an eighth.
    assert len(places) <= 600 // 64 + 1


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["copy", "deepcopy", "pickle"],
)
@torch.no_grad()
def test_copies_part_ways(copied: Callable[[Any], Any]):
    layer = appended(GrowingLayer(), 3)
    other = copied(layer)
    before = layer.keys.clone()
    appended(other, 2)
    appended(layer, 1)
    assert torch.equal(layer.keys[:, :, :3], before) and torch.equal(other.keys[:, :, :3], before)
    assert (layer.get_seq_length(), other.get_seq_length()) == (4, 5)
    assert place(layer) != place(other)


def test_gradients_see_what_they_saw():
    """Under autograd nothing is written to memory that a backward may still need."""
    layer = GrowingLayer()
    with torch.no_grad():
        appended(layer, 3)
    weight = torch.randn(1, HEADS, 1, WIDTH, requires_grad=True)
    keys, _ = layer.update(*torch.randn(2, 1, HEADS, 1, WIDTH))
    loss = (keys * weight).square().sum()
    expected = 2 * (keys.square() * weight).sum(2, keepdim=True).detach()
    with torch.no_grad():
        appended(layer, 3)
    loss.backward()
    torch.testing.assert_close(weight.grad, expected)
    keys, _ = layer.update(*torch.randn(2, 1, HEADS, 1, WIDTH, requires_grad=True))
    assert keys.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_bounds_of_keys_that_somebody_wrote_to(mode: Any):
    """Whoever changes keys in place makes them larger than the bounds that were kept."""
    layer = GrowingLayer()
    with mode():
        appended(layer, 2).update(*torch.randn(2, 1, HEADS, 600, WIDTH))
        before = layer.bounds().norms.clone()
        layer.keys[:, :, 70] *= 100
        after = layer.bounds().norms
        assert (after[:, :, 1] > before[:, :, 1]).all() and torch.equal(after, linbias.key_bounds(layer.keys).norms)
        layer.keys[:, :, 7] *= 100
        appended(layer, 1)
        assert torch.equal(layer.bounds().norms, linbias.key_bounds(layer.keys).norms)


@pytest.mark.parametrize("tokens_before", [500, 600], ids=["measured inside", "measured outside"])
def test_bounds_into_inference_mode_and_back(tokens_before: int):
    """What inference mode makes counts no writes, and takes none outside of it; this memory and its bounds do both."""
    layer = GrowingLayer()
    with torch.no_grad():
        appended(layer, 2).update(*torch.randn(2, 1, HEADS, tokens_before, WIDTH))
        assert (layer.bounds() is None) == (tokens_before < 512)
    for mode, count in ((torch.inference_mode, 12), (torch.inference_mode, 80), (torch.no_grad, 1)):
        with mode():
            assert torch.equal(appended(layer, count).bounds().norms, linbias.key_bounds(layer.keys).norms)


OTHER_MEMORY: dict[str, Callable[[Any], object]] = {
    "larger": lambda layer: setattr(layer.keys, "data", 3 * layer.keys),
    "reordered": lambda layer: [setattr(part, "data", part.flip(0)) for part in (layer.keys, layer.values)],
    "cropped": lambda layer: [setattr(part, "data", part[:, :, :9]) for part in (layer.keys, layer.values)],
    "set_": lambda layer: layer.keys.set_(2 * layer.keys),
}


@pytest.mark.parametrize("change", OTHER_MEMORY.values(), ids=list(OTHER_MEMORY))
@torch.no_grad()
def test_the_same_tensor_with_other_memory(change: Callable[[Any], object]):
    pieces = torch.randn(3, 2, 2, HEADS, 600, WIDTH).unbind()
    plain, growing = DynamicLayer(), GrowingLayer()
    for layer in (plain, growing):
        for piece in pieces[:2]:
            layer.update(*piece)
    before = growing.bounds().norms, growing.keys.detach()
    copied = before[1].clone()
    for layer in (plain, growing):
        change(layer)
    assert growing.bounds() is None
    for layer in (plain, growing):
        layer.update(*pieces[2])
    assert torch.equal(growing.keys, plain.keys) and torch.equal(growing.values, plain.values)
    assert torch.equal(growing.bounds().norms, linbias.key_bounds(plain.keys).norms)
    assert torch.equal(before[1], copied)


@torch.no_grad()
def test_attributes_copied_by_hand():
    """Two layers that show the same tensors: one writes behind them, the other copies them."""
    layer, other = appended(GrowingLayer(), 3), GrowingLayer()
    vars(other).update(vars(layer))
    kept = appended(other, 1).keys
    copied = kept.clone()
    appended(layer, 1)
    assert torch.equal(kept, copied)


@pytest.mark.parametrize("name", ["reorder", "repeat", "select"])
@torch.no_grad()
def test_another_batch_gives_the_memory_back(name: str):
    """Beam search must not hold each layer's tokens twice."""
    layer = appended(GrowingLayer(), 3)
    whole = weakref.ref(layer._grown[0].whole)
    ACTIONS[name](layer, 1)
    assert whole() is None


class Rescaled(transformers.DynamicCache):
    """Somebody's own, which hands out other keys than it keeps."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states / 64, value_states, *args, **kwargs)
        return keys * 64, values


@every_family
@torch.no_grad()
def test_no_bounds_of_other_keys_than_were_returned(kind: str):
    model, ids = make(kind, layers=2), tokens(1, 1003)
    linbias.patch(model)
    bounds: list[object] = []

    def noted(problem: Any, operands: Any, backend: str) -> Any:
        bounds.append(operands.bound_norms)
        return output(problem, operands, backend)

    with mock.patch("linbias.hf.attention.output", noted):
        _, cache = steps(model, ids, 3, Rescaled())
    assert type(cache.layers[0]) is GrowingLayer and len(bounds) == 2 * 4 and not any(bounds)


@every_family
@torch.no_grad()
def test_steps_read_only_what_heads_can_see(kind: str):
    """The logits of the whole text at once, from fewer pairs than there are keys."""
    model, ids = make(kind, layers=2), tokens(1, 1003)
    linbias.patch(model)
    expected = model(ids, use_cache=False).logits
    computed: list[float] = []

    def counted(problem: Any, operands: Any, backend: str) -> Any:
        result = run(problem, operands, backend)
        computed.append(float(result.computed.sum()) / (problem.keys * problem.heads * problem.queries))
        return result.out

    with mock.patch("linbias.hf.attention.output", counted):
        found, _ = steps(model, ids, 3)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert max(computed[2:]) < 0.9 and len(computed) == 2 * 4


def test_inference_mode_and_back():
    layer = GrowingLayer()
    with torch.inference_mode():
        appended(layer, 3)
        inside = layer.keys.clone()
    with torch.no_grad():
        appended(layer, 2)
    assert torch.equal(layer.keys[:, :, :3], inside) and layer.get_seq_length() == 5
    with torch.inference_mode():
        assert appended(layer, 1).get_seq_length() == 6


@torch.no_grad()
def test_other_type_or_batch_is_joined_as_before():
    layer = appended(GrowingLayer(), 3)
    keys, _ = layer.update(*torch.randn(2, 1, HEADS, 1, WIDTH, dtype=torch.float64))
    assert keys.dtype == torch.float64 and keys.shape[2] == 4  # torch.cat promotes
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        layer.update(*torch.randn(2, 2, HEADS, 1, WIDTH))


def steps(model: Any, ids: Tensor, count: int, cache: Any = None) -> tuple[Tensor, Any]:
    """Logits of a prompt and then of single tokens, and the cache."""
    cache = transformers.DynamicCache(config=model.config) if cache is None else cache
    parts = [model(ids[:, :-count], use_cache=True, **{CACHE: cache}).logits]
    parts += [model(ids[:, i, None], use_cache=True, **{CACHE: cache}).logits for i in range(-count, 0)]
    return torch.cat(parts, 1), cache


@every_kind
@torch.no_grad()
def test_a_patched_model_appends_in_place(kind: str):
    model, ids = make(kind), tokens(2, 13)
    expected, _ = steps(model, ids, 6)
    linbias.patch(model)
    found, cache = steps(model, ids, 6)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    with mock.patch("linbias.hf.attention.grow_in_place"):
        _, plain = steps(model, ids, 6)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert type(layer) is GrowingLayer and type(other) is DynamicLayer
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-5, rtol=1e-5)
    at = [place(layer) for layer in cache.layers]
    steps(model, ids, 6, cache)
    assert [place(layer) for layer in cache.layers] == at


@torch.no_grad()
def test_the_cache_outlives_the_patch():
    model, ids = make("bloom"), tokens(2, 13)
    more = tokens(2, 5)
    expected, _ = steps(model, more, 3, steps(model, ids, 6)[1])
    with linbias.patch(model):
        _, cache = steps(model, ids, 6)
    found, _ = steps(model, more, 3, cache)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_left_alone_under_autograd():
    model, ids = make("mpt"), tokens(2, 13)
    linbias.patch(model)
    _, cache = steps(model, ids, 2)
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    output = model(ids[:, :1], use_cache=True, **{CACHE: cache})
    assert store(output).layers[0].keys.requires_grad


@torch.no_grad()
def test_left_alone_when_offloaded():
    """transformers moves the tensors of such a layer to another device and back."""
    cache = transformers.DynamicCache()
    cache.update(*torch.randn(2, 1, HEADS, 3, WIDTH), 0)
    cache.offloading = True
    grow_in_place(cache, 0)
    assert type(cache.layers[0]) is DynamicLayer
    cache.offloading = False
    grow_in_place(cache, 0)
    assert type(cache.layers[0]) is GrowingLayer
