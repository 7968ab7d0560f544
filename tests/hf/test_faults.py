# SPDX-License-Identifier: Apache-2.0
"""Faults of transformers that the patch repairs: each test shows the fault first, then its absence.

A test that fails in its first half is good news: transformers has repaired the fault, and docs/models should say so.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import linbias
from linbias.testing import largest_error
from tests.hf.tiny import base, every_family, exactly, generate, lengths_mask, make, tokens, transformers


def logits(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options).logits


class TestFalcon:
    def test_eager_adds_the_bias_twice(self):
        """Eager and sdpa disagree; asking for attentions changes the output."""
        model, ids = make("falcon", heads=4), tokens(2, 13)
        right = logits(model, ids)
        assert largest_error(logits(model, ids, output_attentions=True), right) > 0.1
        model.config._attn_implementation = "eager"
        assert largest_error(logits(model, ids), right) > 0.1
        linbias.patch(model)
        for options in ({}, {"output_attentions": True}):
            torch.testing.assert_close(logits(model, ids, **options), right, atol=1e-5, rtol=0)

    def test_slope_times_position_in_bfloat16(self):
        """In a float32 model too; 1.5 logits off at a thousand tokens for slope 1/2."""
        modeling = transformers.models.falcon.modeling_falcon
        row = modeling.build_alibi_tensor(torch.ones(1, 1000, dtype=torch.int64), 8, torch.float32)[0, 0]
        assert row.dtype == torch.float32
        assert (row - 0.5 * torch.arange(1000)).abs().max() == 1.0
        slope = modeling.build_alibi_tensor(torch.ones(1, 1000, dtype=torch.int64), 16, torch.float32)[0, 0]
        true = linbias.alibi_slopes(16)[0].bfloat16().float() * torch.arange(1000)
        assert (slope - true).abs().max() > 1.0
        model, ids = make("falcon", heads=12, layers=2), tokens(1, 600)
        mask = torch.ones_like(ids)
        with exactly(model) as exact_model:
            exact = logits(exact_model, ids, mask)
        assert largest_error(logits(model, ids), exact) > 1e-2
        linbias.patch(model)
        assert largest_error(logits(model, ids), exact) < 1e-4

    def test_generation_with_a_static_cache_fails(self):
        model, ids, mask = make("falcon"), tokens(2, 9), lengths_mask(9, 5)
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
        expected = generate(model, ids, **options)
        with pytest.raises(ValueError, match="too many values to unpack"):
            generate(model, ids, cache_implementation="static", **options)
        linbias.patch(model)
        assert torch.equal(generate(model, ids, cache_implementation="static", **options), expected)

    def test_flash_attention_refuses_alibi(self):
        modeling = transformers.models.falcon.modeling_falcon
        model, ids = make("falcon"), tokens(2, 9)
        right = logits(model, ids)
        for block in base(model).h:
            flash = modeling.FalconFlashAttention2(model.config, layer_idx=block.self_attention.layer_idx).eval()
            flash.load_state_dict(block.self_attention.state_dict())
            block.self_attention = flash
        with pytest.raises(ValueError, match="alibi. is not supported"):
            logits(model, ids)
        with linbias.patch(model):
            torch.testing.assert_close(logits(model, ids), right, atol=1e-5, rtol=0)
        assert type(base(model).h[0].self_attention) is modeling.FalconFlashAttention2


class TestMpt:
    def test_alibi_bias_max_is_ignored(self):
        """StoryWriter-65k was trained with 16."""
        model, ids = make("mpt"), tokens(2, 13)
        steep = make("mpt", attn_config={"alibi_bias_max": 16})
        steep.load_state_dict(model.state_dict())
        assert torch.equal(logits(model, ids), logits(steep, ids))
        with exactly(steep) as exact_model:
            exact = logits(exact_model, ids, torch.ones_like(ids))
        linbias.patch(steep)
        assert largest_error(logits(steep, ids), exact) < 1e-5
        assert largest_error(logits(steep, ids), logits(model, ids)) > 0.1

    def test_fails_beyond_max_seq_len(self):
        model, ids = make("mpt"), tokens(1, 65)
        with pytest.raises(RuntimeError, match="size of tensor"):
            logits(model, ids)
        linbias.patch(model)
        assert logits(model, ids).shape == (1, 65, 53)
        assert logits(model, tokens(1, 200)).shape == (1, 200, 53)

    @pytest.mark.parametrize("option", [{"alibi": False}, {"qk_ln": True}, {"prefix_lm": True}], ids=str)
    def test_options_that_change_nothing(self, option: dict[str, bool]):
        model, ids = make("mpt"), tokens(2, 13)
        other = make("mpt", attn_config=option)
        other.load_state_dict(model.state_dict())
        assert torch.equal(logits(model, ids), logits(other, ids))
        with pytest.raises(ValueError, match=f"attn_config.{next(iter(option))}="):
            linbias.patch(other)

    def test_boolean_masks_are_read_upside_down(self):
        """In the rest of transformers True in a 4-D mask is visible."""
        model, ids = make("mpt", layers=1), tokens(1, 7)
        causal = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
        right = logits(model, ids)
        assert largest_error(logits(model, ids, ~causal), right) == 0
        assert largest_error(logits(model, ids, causal), right) > 0.1
        linbias.patch(model)
        torch.testing.assert_close(logits(model, ids, causal), right, atol=1e-5, rtol=0)


class TestBloom:
    def test_bfloat16_bias_ties(self):
        """The last eight of 4,096 keys get one bias, though half a logit lies between neighbours."""
        modeling = transformers.models.bloom.modeling_bloom
        rows = modeling.build_alibi_tensor(torch.ones(1, 4096, dtype=torch.int64), 8, torch.bfloat16)[:, 0]
        assert rows[0, -8:].unique().tolist() == [2048.0]
        assert ((rows.double() - rows.double()[:, -1:]) - _relative(8, 4096)).abs().max() > 4
        ours = linbias.alibi_bias(linbias.alibi_slopes(8), torch.tensor([4095]), torch.arange(4096))[0, :, 0]
        assert (ours.double() - _relative(8, 4096)).abs().max() < 1e-4

    @pytest.mark.parametrize("shape", [(1, 1, 9, 9), (2, 1, 9, 9), (2, 6, 9, 9)], ids=str)
    def test_4d_masks_crash(self, shape: tuple[int, ...]):
        model, ids = make("bloom"), tokens(2, 9)
        right = logits(model, ids)
        mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(shape)
        with pytest.raises(ValueError, match="too many values to unpack"):
            logits(model, ids, mask)
        linbias.patch(model)
        torch.testing.assert_close(logits(model, ids, mask), right, atol=1e-5, rtol=0)

    def test_a_custom_attention_name_drops_the_causal_mask(self):
        """Also one that came in with the configuration: it is accepted, and never called."""
        model, ids = make("bloom"), tokens(1, 9)
        model.config._attn_implementation = "mine"
        changed = ids.clone()
        changed[0, 6] = (changed[0, 6] + 1) % 53
        assert largest_error(logits(model, ids)[:, :6], logits(model, changed)[:, :6]) > 1e-3, "the future shows"
        linbias.patch(model)
        assert torch.equal(logits(model, ids)[:, :6], logits(model, changed)[:, :6])


def _relative(heads: int, length: int) -> Tensor:
    """(H, S): minus slope times distance from the last key, in float64."""
    return linbias.alibi_slopes(heads).double()[:, None] * (torch.arange(length) - (length - 1)).double()


@every_family
def test_contents_of_padding_leak(kind: str):
    """0 * NaN is NaN, so one bad number under the padding spoils the text; here nobody ever reads it."""
    model, mask = make(kind, layers=2), lengths_mask(9, 5)
    embedded = torch.randn(2, 9, 48)
    spoiled = embedded.masked_fill(mask[..., None] == 0, math.nan)

    def real(embedded: Tensor) -> Tensor:
        with torch.no_grad():
            return model(inputs_embeds=embedded, attention_mask=mask).logits[mask.bool()]

    assert real(spoiled).isnan().any()
    linbias.patch(model)
    assert torch.equal(real(spoiled), real(embedded))
