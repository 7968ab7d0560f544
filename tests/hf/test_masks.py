# SPDX-License-Identifier: Apache-2.0
"""What a model may be given as mask and cache, and what each becomes: `linbias.hf.mask`."""

from typing import Any

import pytest
import torch
from packaging.version import parse
from torch import Tensor

import linbias
from linbias.hf import mask as mask_module
from linbias.hf.mask import AttentionMask, check_cache, read_mask
from linbias.testing import assert_within_budget
from tests.hf.tiny import CACHE, every_family, every_kind, exactly, lengths_mask, make, store, tokens, transformers


def seen(mask: Tensor | None, cache: Any = None, tokens: int = 5, *, counted: bool = True) -> AttentionMask:
    return read_mask(mask, cache, torch.zeros(2, tokens, 8), torch.ones(3), causal=True, counted=counted)


def filled(cache: Any, tokens: int) -> Any:
    cache.update(torch.zeros(2, 1, tokens, 4), torch.zeros(2, 1, tokens, 4), 0)
    return cache


def static(capacity: int) -> Any:
    return transformers.StaticCache(config=make("bloom", layers=1).config, max_cache_len=capacity)


class TestRead:
    def test_without_padding_nothing_is_made(self):
        for mask in (None, torch.ones(2, 5), torch.ones(2, 5, dtype=torch.bool)):
            found = seen(mask)
            assert found.attn_mask is None and found.causal
            assert found.queries[3:] == found.keys[3:] == (None,) * 5 + (False,)

    def test_one_run_of_tokens_needs_no_positions(self):
        for side in ("left", "right"):
            found = seen(lengths_mask(5, 3, side=side)).keys
            assert found.position is None and found.real is not None and found.real.dtype == torch.bool

    def test_holes_are_counted_out(self):
        mask = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
        found = seen(mask)
        assert found.keys.position is not None and found.queries.position is not None
        assert found.keys.position.tolist() == [[-1, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
        assert torch.equal(found.queries.position, found.keys.position)
        assert seen(mask, counted=False).keys.position is None

    def test_queries_are_the_last_tokens_of_a_cache(self):
        mask = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        found = seen(mask, filled(transformers.DynamicCache(), 3), 2).queries
        assert found.position is not None and found.position.tolist() == [[2, 3], [3, 4]]

    def test_static_caches_place_their_slots(self):
        found = seen(None, filled(static(9), 3), 2)
        assert found.queries.position is not None and found.keys.position is not None
        assert found.queries.position.tolist() == [[3, 4]] and found.keys.position.tolist() == [list(range(9))]
        masked = seen(lengths_mask(5, 4), filled(static(9), 3), 2)
        assert masked.keys.real is not None and masked.queries.position is not None
        assert masked.keys.real.sum(1).tolist() == [5, 4]
        assert masked.queries.position.tolist() == [[3, 4], [2, 3]]

    def test_values_are_not_read_where_that_would_wait(self):
        """On a device, and while a program is recorded, a mask stays a mask, and may number documents."""
        mask, hidden = torch.ones(2, 5, device="meta"), torch.zeros(2, 5, 8, device="meta")
        found = read_mask(mask, None, hidden, torch.ones(3, device="meta"), causal=True, counted=True).keys
        assert found.real is not None and found.real.is_meta
        assert found.position is not None and found.segment is not None

    def test_other_devices(self):
        """What hooks that spread a model over devices do with a layer's inputs."""
        mask = seen(torch.tensor([[0, 1, 0, 1, 1], [1, 1, 2, 2, 2]]))
        mask.eager_bias = torch.zeros(1)
        moved = mask.to("meta", non_blocking=True)
        assert mask.to(torch.device("cpu")) is mask and moved.causal
        assert moved.slopes.is_meta and moved.eager_bias is not None and moved.eager_bias.is_meta
        for side in (moved.queries, moved.keys):
            assert side.device.type == "meta" and side.position is not None and side.position.is_meta
            assert side.segment is not None and side.segment.is_meta

    def test_floats_become_booleans(self):
        hidden = torch.finfo(torch.float16).min
        mask = torch.full((1, 1, 5, 5), hidden).triu(1)
        found = seen(mask)
        assert found.attn_mask is not None and not found.causal
        assert torch.equal(found.attn_mask, torch.ones(1, 1, 5, 5, dtype=torch.bool).tril())
        assert torch.equal(found.attn_mask, seen(found.attn_mask.long()).attn_mask)


class TestErrors:
    @pytest.mark.parametrize("shape", [(2, 4), (2, 6), (3, 5), (5,), (2, 1, 5)], ids=str)
    def test_shapes(self, shape: tuple[int, ...]):
        with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 5\).*got \("):
            seen(torch.ones(shape))

    def test_a_mask_of_new_tokens_alone(self):
        with pytest.raises(ValueError, match=r"must have shape \(2, 5\), over cached and new tokens"):
            seen(torch.ones(2, 2), filled(transformers.DynamicCache(), 3), 2)

    def test_a_mask_longer_than_a_static_cache(self):
        with pytest.raises(ValueError, match=r"must have shape \(2, 9\)"):
            seen(torch.ones(2, 10), filled(static(9), 3), 2)

    @pytest.mark.parametrize("shape", [(1, 1, 5, 4), (2, 3, 4, 5)], ids=str)
    def test_four_dimensions(self, shape: tuple[int, ...]):
        with pytest.raises(ValueError, match=r"4-D attention_mask must have shape \(batch or 1, heads or 1, 5, 5\)"):
            seen(torch.ones(shape, dtype=torch.bool))

    @pytest.mark.parametrize("mask", [[[1] * 5] * 2, torch.ones(2, 5).numpy()], ids=["list", "numpy"])
    @every_family
    def test_what_is_no_tensor(self, kind: str, mask: Any):
        model = make(kind, layers=1)
        linbias.patch(model)
        with pytest.raises(TypeError, match="attention_mask must be a tensor or None, got (list|ndarray); pass torch"):
            model(tokens(2, 5), attention_mask=mask)

    def test_a_bias_is_not_a_mask(self):
        with pytest.raises(ValueError, match="anything between is a bias, which a mask cannot carry"):
            seen(torch.full((1, 1, 5, 5), -0.5))

    def test_sliding_caches(self):
        layer = transformers.cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
        with pytest.raises(ValueError, match="sliding-window cache layers.*AlibiCache"):
            check_cache(transformers.cache_utils.Cache(layers=[layer]))

    def test_not_a_cache(self):
        with pytest.raises(TypeError, match="must be a transformers Cache made of layers, got tuple"):
            check_cache(((torch.zeros(1), torch.zeros(1)),))


class TestModels:
    @pytest.mark.parametrize("form", ["bool", "float", "per head"])
    @every_kind
    def test_a_4d_mask_is_what_it_says(self, kind: str, form: str):
        """Causal, and every fifth token hidden: as a 2-D mask would have it, were its distances not counted."""
        model, ids = make(kind, layers=2), tokens(2, 11)
        shown = torch.ones(11, 11, dtype=torch.bool).tril() & ((torch.arange(11) % 5 != 2) | torch.eye(11).bool())
        masks = {
            "bool": shown[None, None],
            "float": torch.zeros(1, 1, 11, 11).masked_fill(~shown, -torch.inf),
            "per head": shown.expand(2, 6, 11, 11),
        }
        linbias.patch(model)
        with torch.no_grad():
            actual = model(ids, attention_mask=masks[form]).logits
            # Hiding a token from the rest is the same as leaving it out, if nothing else tells its place.
            keep = torch.arange(11) % 5 != 2
            model.base_model.__class__ = type("Steady", (type(model.base_model),), {"alibi_slopes": _no_slopes})
            flat = model(ids, attention_mask=masks[form]).logits[:, keep]
            left_out = model(ids[:, keep]).logits
        assert actual.shape == (2, 11, 53)
        torch.testing.assert_close(flat, left_out, atol=2e-5, rtol=0)

    @every_family
    def test_later_keys_that_a_mask_shows_weigh_less_the_farther(self, kind: str):
        """The original's key bias would reward the future; a prefix that sees itself must not tell its order."""
        model, ids = make(kind, layers=1), tokens(1, 7)
        linbias.patch(model)
        everything = torch.ones(1, 1, 7, 7, dtype=torch.bool)
        with torch.no_grad():
            forward = model(ids, attention_mask=everything).logits
            backward = model(ids.flip(1), attention_mask=everything).logits.flip(1)
        torch.testing.assert_close(forward, backward, atol=2e-5, rtol=0)

    @every_kind
    def test_bidirectional_configuration(self, kind: str):
        """transformers' `is_causal=False`."""
        model, ids = make(kind, layers=2), tokens(1, 7)
        model.config.is_causal = False
        linbias.patch(model)
        with torch.no_grad():
            everything = model(ids, attention_mask=torch.ones(1, 1, 7, 7, dtype=torch.bool)).logits
            assert torch.equal(model(ids).logits, everything)

    @every_kind
    def test_4d_masks_on_a_cache(self, kind: str):
        model, ids = make(kind, layers=2), tokens(2, 11)
        causal = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
        linbias.patch(model)
        with torch.no_grad():
            whole = model(ids).logits
            for capacity in (None, 11):
                cache = capacity and transformers.StaticCache(config=model.config, max_cache_len=capacity)
                mask = causal[:, :, :6, : capacity or 6]
                first = model(ids[:, :6], attention_mask=mask, use_cache=True, **{CACHE: cache})
                mask = causal[:, :, 6:]
                second = model(ids[:, 6:], attention_mask=mask, use_cache=True, **{CACHE: store(first)})
                torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, atol=2e-5, rtol=0)

    def test_falcon_packs_by_position_ids(self):
        """Two texts in one row, as transformers' padding-free collator sends them; unpatched since 5.24 only."""
        model, ids = make("falcon", layers=2), tokens(1, 9)
        position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
        with torch.no_grad():
            alone = [model(part).logits for part in (ids[:, :4], ids[:, 4:])]
            plain = model(ids, position_ids=position_ids, use_cache=False).logits
            apart = torch.allclose(plain, torch.cat(alone, 1), atol=2e-5)
            assert apart == (parse(transformers.__version__) >= parse("5.24"))
            with exactly(model) as exact_model:
                exact = [
                    exact_model(part, attention_mask=torch.ones_like(part)).logits for part in ids.split([4, 5], 1)
                ]
            linbias.patch(model)
            packed = model(ids, position_ids=position_ids, use_cache=False).logits
        assert_within_budget(packed, torch.cat(exact, 1), torch.cat(alone, 1), "packed")

    def test_unfilled_slots_may_hold_anything(self):
        """NaN beyond what a static cache has filled."""
        model, ids, mask = make("bloom", layers=2), tokens(2, 6), lengths_mask(6, 4)
        linbias.patch(model)
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
            model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True, **{CACHE: cache})
            for layer in cache.layers:
                layer.keys[:, :, 5:] = layer.values[:, :, 5:] = torch.nan
            last = model(ids[:, 5:], attention_mask=mask, use_cache=True, **{CACHE: cache}).logits
        torch.testing.assert_close(last, expected[:, 5:], atol=2e-5, rtol=0)


def _no_slopes(self: Any) -> Tensor:
    return torch.zeros(6)


def test_readable_means_nothing_records():
    assert mask_module.readable(torch.ones(2))
    assert not mask_module.readable(torch.ones(2, device="meta"))
    assert not mask_module.readable(torch.nn.Parameter(torch.ones(2)))
    found: list[bool] = []
    torch.func.vmap(lambda row: (found.append(mask_module.readable(row)), row)[1])(torch.ones(2, 3))
    assert found == [False]
