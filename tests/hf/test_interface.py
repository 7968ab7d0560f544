# SPDX-License-Identifier: Apache-2.0
"""attention_interface: a model that asks transformers' registry, beside the formula in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linbias
from linbias.testing import assert_within_budget

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from tests.hf.tiny import CACHE  # noqa: E402

HEADS, GROUPS, DIM, TOKENS = 6, 2, 4, 13


class Config(PreTrainedConfig):
    model_type = "one_layer_of_alibi"
    num_hidden_layers: int = 1
    causal: bool = True
    sliding_window: int | None = None
    passes: str = "alibi_slopes"


class OneLayer(PreTrainedModel):
    """Attention and nothing else, as a library's or a user's own model calls it."""

    config_class = Config
    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.mix = nn.Linear(HEADS * DIM, (HEADS + 2 * GROUPS) * DIM)
        self.is_causal, self.dropout_p = config.causal, 0.0
        self.post_init()

    def forward(self, inputs_embeds: Tensor, attention_mask: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        make = create_causal_mask if self.config.causal else create_bidirectional_mask
        if self.config.sliding_window:
            make = create_sliding_window_causal_mask
        places = kwargs.pop("position_ids", None)
        more = {"position_ids": places} if self.config.causal else {}
        mask = make(self.config, inputs_embeds, attention_mask, **{CACHE: cache}, **more)
        query, key, value = self.heads(inputs_embeds)
        if cache is not None:
            key, value = cache.update(key, value, 0)
        slopes = {"alibi_slopes": linbias.alibi_slopes(HEADS)} if self.config.passes == "alibi_slopes" else {}
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        dropout = self.dropout_p if self.training else 0.0
        return attend(self, query, key, value, mask, scaling=0.3, dropout=dropout, **slopes, **kwargs)

    def heads(self, hidden: Tensor) -> tuple[Tensor, ...]:
        mixed = self.mix(hidden).unflatten(2, (-1, DIM)).transpose(1, 2)
        return mixed.split((HEADS, GROUPS, GROUPS), 1)


def model_of(**config: Any) -> OneLayer:
    torch.manual_seed(0)
    model = OneLayer(Config(**config)).eval()
    model.set_attn_implementation(linbias.hf.attention_interface())
    return model


def embedded(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randn(batch, tokens, HEADS * DIM, generator=torch.Generator().manual_seed(1))


def dense(model: OneLayer, hidden: Tensor, real: Tensor | None = None, left: int | None = None) -> Tensor:
    """(B, T, H, D): the formula, in the dtype of `hidden`."""
    query, key, value = model.heads(hidden)
    key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
    apart = torch.arange(hidden.shape[1])[:, None] - torch.arange(hidden.shape[1])
    scores = 0.3 * query @ key.mT - linbias.alibi_slopes(HEADS).to(hidden)[:, None, None] * apart.abs()
    visible = torch.ones_like(apart, dtype=torch.bool)[None, None]
    visible = visible & (apart >= 0) if model.is_causal else visible
    visible = visible if left is None else visible & (apart <= left)
    visible = visible if real is None else visible & real[:, None, None]
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2)


def assert_right(actual: Tensor, model: OneLayer, hidden: Tensor, *given: Any, rows: Any = slice(None)) -> None:
    plain = dense(model, hidden, *given)
    exact = dense(model.double(), hidden.double(), *given)
    model.float()
    assert_within_budget(actual, exact[:, rows], plain[:, rows], "out")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right", None])
@torch.no_grad()
def test_padding_and_both_directions(causal: bool, side: str | None):
    model, hidden = model_of(causal=causal), embedded()
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    if side is not None:
        real[1, slice(None, 4) if side == "left" else slice(-4, None)] = False
    out, weights = model(hidden, real if side else None)
    assert out.shape == (2, TOKENS, HEADS, DIM) and out.is_contiguous() and weights is None
    shown = real[:, :, None, None]
    exact, plain = dense(model.double(), hidden.double(), real), dense(model.float(), hidden, real)
    assert_within_budget(out * shown, exact * shown, plain * shown, "out")


@torch.no_grad()
def test_steps_on_a_cache_are_the_whole():
    model, hidden, cache = model_of(), embedded(), DynamicCache()
    parts = [model(hidden[:, start:stop], None, cache)[0] for start, stop in ((0, 5), (5, 6), (6, TOKENS))]
    assert_right(torch.cat(parts, 1), model, hidden)


@torch.no_grad()
def test_a_static_cache_is_refused_where_its_mask_is_made():
    model = model_of()
    cache = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="pass a DynamicCache"):
        model(embedded(), None, cache)


@torch.no_grad()
def test_a_window_and_packed_texts_come_as_masks():
    model, hidden = model_of(sliding_window=4), embedded()
    assert_right(model(hidden)[0], model, hidden, None, 3)
    model, hidden = model_of(), embedded(1, 12)
    out = model(hidden, position_ids=torch.tensor([[*range(5), *range(7)]]))[0]
    for part in (slice(0, 5), slice(5, 12)):
        assert_right(out[:, part], model, hidden[:, part])


@torch.no_grad()
def test_a_mask_that_numbers_documents():
    model, hidden = model_of(causal=False), embedded(1, 12)
    attend = ALL_ATTENTION_FUNCTIONS["linbias"]
    mask = torch.tensor([[1] * 5 + [2] * 7])
    out, _ = attend(model, *model.heads(hidden), mask, scaling=0.3, alibi_slopes=linbias.alibi_slopes(HEADS))
    for part in (slice(0, 5), slice(5, 12)):
        assert_right(out[:, part], model, hidden[:, part])


@torch.no_grad()
def test_a_window_by_keyword():
    model, hidden = model_of(), embedded()
    attend, slopes = ALL_ATTENTION_FUNCTIONS["linbias"], linbias.alibi_slopes(HEADS)
    out, _ = attend(model, *model.heads(hidden), None, scaling=0.3, alibi_slopes=slopes, sliding_window=4)
    assert_right(out, model, hidden, None, 3)
    with pytest.raises(ValueError, match="sliding_window=4 without is_causal needs a mask"):
        attend(model, *model.heads(hidden), None, alibi_slopes=slopes, sliding_window=4, is_causal=False)


@torch.no_grad()
def test_the_keyword_comes_before_the_attribute_and_weights_are_given():
    model, hidden = model_of(), embedded()
    out, weights = model(hidden, is_causal=False, output_attentions=True)
    model.is_causal = False
    assert_right(out, model, hidden)
    value = model.heads(hidden)[2].repeat_interleave(HEADS // GROUPS, 1)
    torch.testing.assert_close((weights @ value).transpose(1, 2), out)


def test_gradients_are_those_of_the_formula():
    model, hidden = model_of().double(), embedded().double().requires_grad_()
    found = torch.autograd.grad(model(hidden)[0].square().sum(), (hidden, model.mix.weight))
    wanted = torch.autograd.grad(dense(model, hidden).square().sum(), (hidden, model.mix.weight))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_dropout_is_that_of_training_only():
    model, hidden = model_of(), embedded()
    model.dropout_p = 0.5
    one, other = model(hidden)[0], model(hidden)[0]
    assert one.equal(other)
    model.train()
    assert not model(hidden)[0].equal(one)


def test_what_passes_no_slopes_or_a_dense_bias_is_refused():
    with pytest.raises(TypeError, match="OneLayer passes no alibi_slopes"):
        model_of(passes="nothing")(embedded())
    with pytest.raises(ValueError, match="position_bias from OneLayer cannot be honoured"):
        model_of()(embedded(), position_bias=torch.zeros(1, HEADS, TOKENS, TOKENS))
    attend, model, slopes = ALL_ATTENTION_FUNCTIONS["linbias"], model_of(), linbias.alibi_slopes(HEADS)
    bias = linbias.alibi_bias(slopes, torch.arange(TOKENS), torch.arange(TOKENS))
    with pytest.raises(ValueError, match="a bias, which a mask cannot carry"):
        attend(model, *model.heads(embedded()), bias, alibi_slopes=slopes)
    with pytest.raises(TypeError, match="slopes must be float32 or float64"):
        attend(model, *model.heads(embedded()), None, alibi_slopes=slopes.half())


def test_a_model_of_transformers_without_alibi_is_refused():
    config = transformers.LlamaConfig(
        vocab_size=19, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    model.set_attn_implementation(linbias.hf.attention_interface("alibi"))
    with pytest.raises(TypeError, match="LlamaAttention passes no alibi_slopes"):
        model(torch.tensor([[1, 2, 3]]))
