# SPDX-License-Identifier: Apache-2.0
"""`AlibiCache` between a patched model and transformers: masks, tokens taken back, changing batches, and refusals."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch

import linbias
from linbias.hf.cache import AlibiCache, AlibiLayer
from tests.hf.tiny import CACHE, base, every_family, generate, lengths_mask, make, store, tokens


def test_steps_are_one_pass():
    model, ids, mask = make("falcon", layers=2), tokens(3, 16), lengths_mask(16, 9, 11)
    linbias.patch(model)
    cache, pieces, start = AlibiCache(), [], 0
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        for stop in (9, 10, 11, 15, 16):
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache})
            assert store(out) is cache
            pieces.append(out.logits)
            start = stop
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, 1)[real], whole[real], atol=2e-5, rtol=0)


@every_family
def test_holes(kind: str):
    """As the family counts them: out for BLOOM and Falcon, in for MPT."""
    model, ids, mask = make(kind, layers=2), tokens(2, 12), lengths_mask(12, 9) * (torch.arange(12) % 5 != 3)
    linbias.patch(model)
    cache, pieces, start = AlibiCache(), [], 0
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        for stop in (7, 8, 9, 12):
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache})
            pieces.append(out.logits)
            start = stop
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, 1)[real], whole[real], atol=2e-5, rtol=0)


def test_holes_that_a_window_cannot_count():
    model, ids = make("mpt", layers=1), tokens(1, 5)
    linbias.patch(model)
    with pytest.raises(ValueError, match="attention_mask has holes.*leave the window out"):
        model(ids, attention_mask=torch.tensor([[1, 0, 1, 1, 1]]), **{CACHE: AlibiCache(window=(3, 0))})


def test_4d_mask():
    model, ids = make("mpt", layers=2), tokens(2, 9)
    linbias.patch(model)
    mask = (torch.rand(2, 1, 9, 9) < 0.7).tril() | torch.eye(9, dtype=torch.bool)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        actual = model(ids, attention_mask=mask, **{CACHE: AlibiCache()}).logits
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="4-D attention_mask names every key"):
        model(ids, attention_mask=mask, **{CACHE: AlibiCache(window=(3, 0))})


def test_rollback():
    model, ids = make("bloom", layers=2), tokens(2, 12)
    linbias.patch(model)
    cache = AlibiCache()
    with torch.no_grad():
        expected = model(ids).logits
        model(ids[:, :7], **{CACHE: cache})
        model(tokens(2, 3), **{CACHE: cache})
        cache.crop(-3)
        assert cache.get_seq_length() == 7
        actual = model(ids[:, 7:], **{CACHE: cache}).logits
    torch.testing.assert_close(actual, expected[:, 7:], atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="must be negative, minus the number of tokens, got 2"):
        cache.crop(2)


def test_rollback_into_padding():
    model = make("bloom", layers=1)
    linbias.patch(model)
    cache = AlibiCache()
    with torch.no_grad():
        model(tokens(2, 5), attention_mask=lengths_mask(5, 3, side="right"), **{CACHE: cache})
    with pytest.raises(ValueError, match="cannot take back 2 tokens: only the last 0 are free of padding"):
        cache.crop(-2)


def test_padding_goes_with_the_sequence_that_had_it():
    model, ids = make("bloom", layers=2), tokens(2, 9)
    linbias.patch(model)
    cache = AlibiCache()
    with torch.no_grad():
        model(ids[:, :6], attention_mask=lengths_mask(6, 4, side="right"), **{CACHE: cache})
        assert cache.padded
        cache.batch_select_indices(torch.tensor([0]))
        assert not cache.padded
        cache.crop(-2)
        actual = model(ids[:1, 4:], **{CACHE: cache}).logits
        expected = model(ids[:1]).logits[:, 4:]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def test_batch_changes():
    model, ids = make("bloom", layers=2), tokens(2, 9)
    linbias.patch(model)
    cache = AlibiCache()
    with torch.no_grad():
        model(ids[:, :6], **{CACHE: cache})
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        cache.reorder_cache(torch.tensor([1, 1]))
        actual = model(ids[[0, 0], 6:], **{CACHE: cache}).logits
        expected = model(ids[:1]).logits[:, 6:]
    torch.testing.assert_close(actual, expected.expand(2, -1, -1), atol=2e-5, rtol=0)


def test_reset():
    model, ids = make("bloom", layers=2), tokens(2, 9)
    linbias.patch(model)
    cache = AlibiCache()
    with torch.no_grad():
        expected = model(ids, **{CACHE: cache}).logits
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(model(ids, **{CACHE: cache}).logits, expected)


def test_what_it_is_not_for():
    model, ids = make("bloom", layers=1), tokens(1, 5)
    with pytest.raises(TypeError, match="only models patched by linbias.patch can use it"):
        model(ids, **{CACHE: AlibiCache()})
    with linbias.patch(model), pytest.raises(ValueError, match="an AlibiCache does not keep; use DynamicCache"):
        model(ids, output_attentions=True, **{CACHE: AlibiCache()})
    with linbias.patch(model), pytest.raises(RuntimeError, match="must not require a gradient"):
        model(ids, **{CACHE: AlibiCache()})
    with linbias.patch(model, fidelity="checkpoint"), pytest.raises(ValueError, match="fidelity='exact' only"):
        model(ids, **{CACHE: AlibiCache()})
    with pytest.raises(ValueError, match="need window="):
        AlibiCache(sinks=4)
    with pytest.raises(TypeError, match="cannot be offloaded"):
        AlibiCache().layer(0).offload()


def test_copies():
    """A prompt's cache, filled once and gone on from twice."""
    model, ids = make("bloom", layers=2), tokens(1, 9)
    linbias.patch(model)
    prompt = AlibiCache()
    with torch.no_grad():
        model(ids[:, :6], **{CACHE: prompt})
        twin = copy.deepcopy(prompt)
        first, second = (model(ids[:, 6:], **{CACHE: cache}).logits for cache in (prompt, twin))
    assert torch.equal(first, second)
    assert isinstance(prompt.layers[0], AlibiLayer) and repr(base(model)).count("BloomAttention") == 1


@every_family
def test_rollback_after_padding(kind: str):
    """Padding before a text does not keep the tokens after it from being taken back."""
    model, ids, mask = make(kind, layers=2), tokens(2, 12), lengths_mask(12, 9)
    linbias.patch(model)
    cache = AlibiCache()
    junk = torch.cat([mask[:, :7], torch.ones(2, 3, dtype=torch.long)], 1)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model(ids[:, :7], attention_mask=mask[:, :7], **{CACHE: cache})
        model(tokens(2, 3), attention_mask=junk, **{CACHE: cache})
        cache.crop(-3)
        actual = model(ids[:, 7:], attention_mask=mask, **{CACHE: cache}).logits
    torch.testing.assert_close(actual, expected[:, 7:], atol=2e-5, rtol=0)


@every_family
def test_assisted_with_a_padded_prompt(kind: str):
    model, draft, ids = make(kind, layers=2), make(kind, layers=1), tokens(1, 9)
    linbias.patch(model)
    linbias.patch(draft)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = generate(model, ids, **options)
    assert torch.equal(generate(model, ids, assistant_model=draft, cache=AlibiCache(), **options), expected)


@every_family
def test_what_was_padding_stays_padding(kind: str):
    """The cache has dropped it, so a pass that calls it real, or real tokens padding, would get something else."""
    model, ids, more = make(kind, layers=1), tokens(2, 6), tokens(2, 2)
    linbias.patch(model)
    ones, padded = torch.ones(2, 8, dtype=torch.long), lengths_mask(8, 6)
    hidden = ones.clone()
    hidden[:, 2] = 0

    def after(mask: torch.Tensor | None, later: torch.Tensor | None) -> Any:
        cache = AlibiCache()
        with torch.no_grad():
            model(ids, attention_mask=mask, **{CACHE: cache})
            return model(more, attention_mask=later, **{CACHE: cache})

    after(None, None), after(None, ones), after(padded[:, :6], padded)
    with pytest.raises(ValueError, match=r"attention_mask\[0, 2\] calls padding what .* taken in as a token"):
        after(None, hidden)
    with pytest.raises(ValueError, match=r"attention_mask\[1, 0\] calls a token what .* taken in as padding"):
        after(padded[:, :6], ones)
    with pytest.raises(ValueError, match=r"attention_mask\[1, 0\] calls a token what .* taken in as padding"):
        after(padded[:, :6], padded.flip(1))  # as many real tokens as before
    with pytest.raises(ValueError, match=r"holds a padded text.*no attention_mask would.*shape \(2, 8\)"):
        after(padded[:, :6], None)
    with pytest.raises(ValueError, match=r"holds a padded text.*a 4-D attention_mask would"):
        after(padded[:, :6], torch.ones(2, 1, 2, 8, dtype=torch.bool))


def test_a_pass_that_failed_midway():
    model, ids = make("bloom", layers=2), tokens(1, 6)
    linbias.patch(model)
    cache, broken = AlibiCache(), base(model).h[1].self_attention.query_key_value
    with torch.no_grad():
        expected = model(ids).logits
        with mock.patch.object(broken, "forward", side_effect=MemoryError), pytest.raises(MemoryError):
            model(ids, **{CACHE: cache})
        with pytest.raises(ValueError, match=r"hold \[6\] tokens, and the model has 2 layers: a pass failed"):
            model(ids, **{CACHE: cache})
        cache.reset()
        assert torch.equal(model(ids, **{CACHE: cache}).logits, expected)
