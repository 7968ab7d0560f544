# SPDX-License-Identifier: Apache-2.0
"""`model.generate` with a patched model: every strategy, every cache, prompts of different lengths, and no end."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import linbias
from linbias.hf import decoder
from linbias.hf.cache import AlibiCache
from tests.hf.tiny import (
    CACHE,
    KINDS,
    base,
    checkpoint_activations,
    every_family,
    every_kind,
    generate,
    lengths_mask,
    make,
    tokens,
    transformers,
)

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 7, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "no cache": {"do_sample": False, "use_cache": False},
    "several": {"do_sample": True, "num_return_sequences": 3},
}
# Every strategy on one model, and on every model the one that reorders its cache.
RAGGED = [
    pytest.param(kind, strategy, marks=() if kind == "bloom" or strategy == "beams" else pytest.mark.slow)
    for kind in KINDS
    for strategy in STRATEGIES
]


def run(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    torch.manual_seed(3)
    return generate(model, ids, attention_mask=mask, max_new_tokens=7, **options)


@pytest.mark.parametrize("kind, strategy", RAGGED)
def test_ragged_prompts(kind: str, strategy: str):
    """The same text as unpatched: on DynamicCache, on ours, and on ours with pages that beams share."""
    model, ids, mask = make(kind, layers=2), tokens(3, 9), lengths_mask(9, 4, 7)
    options = STRATEGIES[strategy]
    expected = run(model, ids, mask, **options)
    linbias.patch(model)
    assert torch.equal(run(model, ids, mask, **options), expected)
    if strategy != "no cache":
        assert torch.equal(run(model, ids, mask, cache=AlibiCache(), **options), expected)
        assert torch.equal(run(model, ids, mask, cache=AlibiCache(page_size=4), **options), expected)


@pytest.mark.parametrize("strategy", ["greedy", "beams", "several"])
@every_kind
def test_static_cache(kind: str, strategy: str):
    model, ids, mask = make(kind, layers=2), tokens(3, 9), lengths_mask(9, 4, 7)
    expected = run(model, ids, mask, **STRATEGIES[strategy])
    linbias.patch(model)
    assert torch.equal(run(model, ids, mask, cache_implementation="static", **STRATEGIES[strategy]), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every_kind
def test_a_prompt_in_pieces(kind: str, cache: str):
    """transformers then makes room in a static cache beforehand, for as many heads as it takes a model to have."""
    model, ids, mask = make(kind, layers=2), tokens(3, 9), lengths_mask(9, 4, 7)
    expected = run(model, ids, mask, do_sample=False)
    linbias.patch(model)
    options = {"do_sample": False, "prefill_chunk_size": 4, "cache_implementation": cache}
    assert torch.equal(run(model, ids, mask, **options), expected)


@pytest.mark.parametrize("fidelity", ["exact", "checkpoint"])
@every_kind
def test_static_cache_of_a_base_model_patched_alone(kind: str, fidelity: str):
    """generate then makes a 4-D mask for it, in which Falcon must still count tokens and not places."""
    model, ids = make(kind, layers=2), tokens(3, 12)
    mask = lengths_mask(12, 9, 11) * (torch.arange(12) % 5 != 3)
    expected = scores(model, ids, mask)
    linbias.patch(base(model), fidelity=fidelity)
    torch.testing.assert_close(scores(model, ids, mask), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(scores(model, ids, mask, cache_implementation="static"), expected, atol=2e-4, rtol=0)


def scores(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """(B, new tokens, vocabulary)."""
    settings = {"max_new_tokens": 7, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    return torch.stack(generate(model, ids, attention_mask=mask, **settings, **options).scores, 1)


@pytest.mark.parametrize("sampled", [False, True], ids=["", "sampled"])
@pytest.mark.parametrize("ours", [False, True], ids=["dynamic", "ours"])
@every_kind
def test_assisted(kind: str, ours: bool, sampled: bool):
    """Several new tokens at once on a cache, and tokens taken back: a draft model that is often wrong."""
    model, draft, ids = make(kind, layers=2), make(kind, layers=1), tokens(1, 9)
    # A draft decides which numbers a sample is drawn with, so that one is held against the unpatched pair's.
    expected = run(model, ids, do_sample=sampled, **({"assistant_model": draft} if sampled else {}))
    linbias.patch(model)
    linbias.patch(draft)
    cache = AlibiCache() if ours else None
    assert torch.equal(run(model, ids, do_sample=sampled, assistant_model=draft, cache=cache), expected)


@every_family
def test_a_cache_is_carried_on(kind: str):
    """A second call of generate goes on where the first stopped."""
    model, ids = make(kind, layers=2), tokens(2, 9)
    linbias.patch(model)
    whole = generate(model, ids, max_new_tokens=12, do_sample=False)
    cache = AlibiCache()
    first = generate(model, ids, max_new_tokens=5, do_sample=False, cache=cache)
    assert cache.get_seq_length() == 9 + 5 - 1
    assert torch.equal(generate(model, first, max_new_tokens=7, do_sample=False, cache=cache), whole)


class TestEndless:
    """A window with sinks: constant memory, and what a mask over the whole text would give."""

    @pytest.mark.parametrize("sinks", [0, 2])
    @every_kind
    def test_window_is_a_mask_over_the_text(self, kind: str, sinks: int):
        """Left = 6 keeps seven keys. One layer, so that nothing older comes in through other tokens."""
        model, ids = make(kind, layers=1), tokens(2, 40)
        linbias.patch(model)
        distance = torch.arange(40)[:, None] - torch.arange(40)
        shown = (distance >= 0) & ((distance <= 6) | (torch.arange(40) < sinks))
        cache = AlibiCache(window=(6, 0), sinks=sinks)
        with torch.no_grad():
            whole = model(ids, attention_mask=shown[None, None]).logits
            pieces, start = [], 0
            for stop in (9, 10, 11, 18, 19, *range(20, 41)):
                pieces.append(model(ids[:, start:stop], use_cache=True, **{CACHE: cache}).logits)
                start = stop
        torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=2e-5, rtol=0)

    def test_memory_does_not_grow(self):
        model, ids, mask = make("bloom", layers=2), tokens(2, 9), lengths_mask(9, 6)
        linbias.patch(model)
        cache = AlibiCache(window=(15, 0), sinks=2)
        sizes = []
        for total in (100, 200, 300):
            generate(model, ids, attention_mask=mask, cache=cache, max_length=total, do_sample=False)
            ids = torch.cat([ids, tokens(2, total - ids.shape[1])], 1)
            mask = torch.nn.functional.pad(mask, (0, total - mask.shape[1]), value=1)
            cache.crop(cache.get_seq_length() - total if cache.get_seq_length() > total else 0)
            sizes.append([layer.store.nbytes for layer in cache.layers])
        assert sizes[0] == sizes[1] == sizes[2]
        assert all(int(layer.store.lengths.max()) <= 2 + 15 + 64 for layer in cache.layers)

    def test_window_at_least_as_long_as_the_text_is_no_window(self):
        model, ids = make("mpt", layers=2), tokens(2, 9)
        linbias.patch(model)
        expected = run(model, ids, do_sample=False)
        assert torch.equal(run(model, ids, do_sample=False, cache=AlibiCache(window=(16, 0), sinks=3)), expected)

    def test_ragged_prompts_in_a_window(self):
        """A sequence streams the same alone as in a padded batch."""
        model, ids, mask = make("bloom", layers=2), tokens(2, 9), lengths_mask(9, 5)
        linbias.patch(model)
        options = {"do_sample": False}
        both = run(model, ids, mask, cache=AlibiCache(window=(5, 0), sinks=1), **options)
        alone = run(model, ids[1:, 4:], cache=AlibiCache(window=(5, 0), sinks=1), **options)
        assert torch.equal(both[1, 9:], alone[0, 5:])

    @pytest.mark.parametrize("distance", ["text", "cache"])
    def test_drafts_in_a_window(self, distance: str):
        """Tokens taken back come out of what is kept, in pieces as in steps; beams share pages of it."""
        model, draft, ids, mask = make("bloom", layers=2), make("bloom", layers=1), tokens(2, 9), lengths_mask(9, 5)
        linbias.patch(model)
        linbias.patch(draft)

        def streamed(ids: Tensor, mask: Tensor | None = None, page_size: int | None = None, **options: Any) -> Tensor:
            cache = AlibiCache(window=(5, 0), sinks=2, distance=distance, page_size=page_size)
            return generate(model, ids, attention_mask=mask, cache=cache, max_new_tokens=20, do_sample=False, **options)

        assert torch.equal(streamed(ids[:1], assistant_model=draft), streamed(ids[:1]))
        assert torch.equal(streamed(ids, mask, prefill_chunk_size=4), streamed(ids, mask))
        assert torch.equal(streamed(ids, mask, page_size=4, num_beams=3), streamed(ids, mask, num_beams=3))

    def test_distance_in_the_cache(self):
        """StreamingLLM's form differs from distances in the text as soon as something was dropped, not before."""
        model, ids = make("bloom", layers=1), tokens(1, 30)
        linbias.patch(model)
        logits = []
        for distance in ("text", "cache"):
            cache = AlibiCache(window=(6, 0), sinks=2, distance=distance)
            with torch.no_grad():
                logits.append([model(ids[:, n : n + 1], use_cache=True, **{CACHE: cache}).logits for n in range(30)])
        differs = [not torch.allclose(text, cached, atol=2e-5) for text, cached in zip(*logits, strict=True)]
        assert not any(differs[:9]) and all(differs[10:])


@pytest.mark.parametrize("fidelity", ["exact", "checkpoint"])
@every_family
def test_a_dynamic_cache_changes_sides(kind: str, fidelity: str):
    """Their caches hold plain keys, so a text may be patched, and unpatched, in the middle."""
    model, ids = make(kind, layers=2), tokens(2, 9)
    with torch.no_grad():
        expected = model(ids).logits
        cache = transformers.DynamicCache(config=model.config)
        pieces = [model(ids[:, :3], use_cache=True, **{CACHE: cache}).logits]
        with linbias.patch(model, fidelity=fidelity):
            pieces.append(model(ids[:, 3:6], use_cache=True, **{CACHE: cache}).logits)
        pieces.append(model(ids[:, 6:], use_cache=True, **{CACHE: cache}).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=2e-5, rtol=0)


class TestUseCache:
    """MPT's default configuration has use_cache=False: generate then hands in the whole text for every token."""

    @staticmethod
    def model(kind: str, **options: Any) -> Any:
        model = make(kind, layers=2, use_cache=False, **options)
        assert model.config.use_cache is False and model.generation_config.use_cache is False
        return model

    def test_mpt_has_it_off(self):
        assert transformers.MptConfig().use_cache is False

    @pytest.mark.parametrize("ours", [False, True], ids=["dynamic", "ours"])
    @pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
    @every_family
    def test_a_cache_without_it_is_refused(self, kind: str, masked: bool, ours: bool):
        model, ids, mask = self.model(kind), tokens(2, 9), lengths_mask(9, 6) if masked else None
        linbias.patch(model)
        cache = AlibiCache() if ours else transformers.DynamicCache(config=model.config)
        with pytest.raises(ValueError, match="use_cache=False and a cache contradict each other.*Pass use_cache=True"):
            run(model, ids, mask, do_sample=False, cache=cache)

    @every_family
    def test_asked_for_it_is_right(self, kind: str):
        model, ids = self.model(kind), tokens(2, 9)
        linbias.patch(model)
        expected, cache = run(model, ids, do_sample=False), AlibiCache()
        assert torch.equal(run(model, ids, do_sample=False, cache=cache, use_cache=True), expected)
        assert cache.get_seq_length() == 9 + 7 - 1

    @every_family
    def test_a_model_called_with_a_cache_uses_it(self, kind: str):
        """Where nothing says it should not: one pass adds its tokens once, whatever the configuration has."""
        model, ids = self.model(kind), tokens(2, 9)
        linbias.patch(model)
        cache = AlibiCache()
        with torch.no_grad():
            expected = model(ids).logits[:, 5:]
            model(ids[:, :5], **{CACHE: cache})
            actual = model(ids[:, 5:], **{CACHE: cache}).logits
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)

    @every_family
    def test_gradient_checkpointing_would_drop_it(self, kind: str):
        """Where a gradient is recorded, and before transformers 5.24 in all of training mode."""
        model, ids = make(kind, layers=2), tokens(2, 9)
        linbias.patch(model)
        checkpoint_activations(model, reentrant=False)
        cache = transformers.DynamicCache()
        with torch.no_grad():
            expected = model(ids).logits[:, 5:]
            model(ids[:, :5], **{CACHE: cache})
        with pytest.raises(ValueError, match="gradient checkpointing in training mode uses no cache"):
            model.train()(ids[:, 5:], **{CACHE: cache})
        with torch.no_grad():
            with mock.patch.object(decoder, "_KEPT_WITHOUT_GRADIENT", False):
                with pytest.raises(ValueError, match="gradient checkpointing in training mode uses no cache"):
                    model(ids[:, 5:], **{CACHE: cache})
            actual = model.eval()(ids[:, 5:], **{CACHE: cache}).logits
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)

    @pytest.mark.skipif(CACHE != "cache", reason="before transformers 5.24 blocks drop the cache")
    @pytest.mark.parametrize("fidelity", ["exact", "checkpoint"])
    @every_family
    def test_generation_while_training(self, kind: str, fidelity: Any):
        """As loops do that train on what they generate: the text, and the cache, of evaluation mode."""
        model, ids, mask = make(kind, layers=2), tokens(2, 9), lengths_mask(9, 6)
        linbias.patch(model, fidelity=fidelity)
        expected = run(model, ids, mask, do_sample=False)
        checkpoint_activations(model.train(), reentrant=False)
        caches = [None, transformers.DynamicCache()] + ([AlibiCache()] if fidelity == "exact" else [])
        for cache in caches:
            assert torch.equal(run(model, ids, mask, do_sample=False, cache=cache), expected)
        assert caches[1].get_seq_length() == 9 + 7 - 1
        loss = model(ids, attention_mask=mask, labels=ids).loss
        loss.backward()


@every_family
def test_the_paged_cache_is_named(kind: str):
    """What generate_batch hands in is no transformers cache of layers; use_cache has nothing to do with it."""
    paged = type("PagedAttentionCache", (), {})()
    model, ids = make(kind, layers=1), tokens(1, 5)
    linbias.patch(model)
    for options in ({"use_cache": False}, {"use_cache": True}, {}):
        with pytest.raises(
            TypeError, match="got PagedAttentionCache: the paged cache of generate_batch .* call generate"
        ):
            model(ids, **{CACHE: paged}, **options)
