# SPDX-License-Identifier: Apache-2.0
"""torch's mask conventions in `nn.MultiheadAttention`."""

import pytest
import torch
from torch import nn

from linbias.nn import MultiheadAttention
from tests.nn.small import BATCH, HEADS, TOKENS, attention, by_hand, close, inputs, padding


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_float_masks_of_zero_and_minus_infinity_are_boolean_ones(dtype: torch.dtype):
    module, tokens = attention(), inputs()
    masks = {"key_padding_mask": padding(), "attn_mask": torch.rand(TOKENS, TOKENS) > 0.6}
    floats = {name: torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf) for name, mask in masks.items()}
    assert torch.equal(module(tokens, tokens, tokens, **floats)[0], module(tokens, tokens, tokens, **masks)[0])


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
@pytest.mark.parametrize("value", [-1e4, 1.0, torch.finfo(torch.float32).min, torch.inf, torch.nan])
def test_other_floats_are_refused(name: str, value: float):
    module, tokens = attention(), inputs()
    mask = torch.zeros(BATCH if name == "key_padding_mask" else TOKENS, TOKENS)
    mask[1, 2] = value
    with pytest.raises(ValueError, match=f"{name} must hold nothing but 0 and -inf"):
        module(tokens, tokens, tokens, **{name: mask})


def test_masks_of_another_kind_or_shape_are_refused():
    module, tokens = attention(), inputs()
    with pytest.raises(TypeError, match="key_padding_mask must be bool"):
        module(tokens, tokens, tokens, key_padding_mask=padding().long())
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(3, 7\), got \(7, 3\)"):
        module(tokens, tokens, tokens, key_padding_mask=padding().T)
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(7, 7\) or \(12, 7, 7\), got \(3, 7, 7\)"):
        module(tokens, tokens, tokens, attn_mask=torch.zeros(BATCH, TOKENS, TOKENS, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"key must have shape \(batch, tokens, 12\).*got \(3, 7, 11\)"):
        module(tokens, tokens[..., 1:], tokens)


def test_a_row_that_sees_nothing_is_the_output_bias():
    module, tokens = attention(), inputs()
    out, weights = module(tokens, tokens, tokens, key_padding_mask=padding((7, 0, 2)))
    close(out[1], module.out_proj.bias.expand(TOKENS, -1))
    assert weights[1].eq(0).all() and out.isfinite().all()


def test_appended_keys_have_no_position_and_no_mask():
    """Flat scores: with V of the appended key alone nonzero, its weight shows in every row."""
    module = MultiheadAttention(2, 1, add_bias_kv=True, batch_first=True, causal=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    tokens = torch.ones(1, 3, 2)
    _, weights = module(tokens, tokens, tokens)
    slope = 2.0**-8
    rows = torch.tensor([[1, 0, 0, 1], [-slope, 0, 0, 0], [-2 * slope, -slope, 0, 0]]).exp()
    expected = torch.tensor([[1.0, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1]])
    expected[1, :2], expected[2, :3] = rows[1, :2], rows[2, :3]
    close(weights[0], expected / expected.sum(-1, keepdim=True))
    hidden = module(tokens, tokens, tokens, key_padding_mask=torch.ones(1, 3, dtype=torch.bool))[1]
    assert hidden[0].tolist() == [[0.0, 0.0, 0.0, 1.0]] * 3


def test_causal_option_hint_and_mask_agree():
    module, tokens = attention(), inputs()
    above = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    expected = by_hand(module, tokens, above)
    floats = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    calls = (
        {"attn_mask": above},
        {"attn_mask": floats},
        {"is_causal": True},
        {"attn_mask": above, "is_causal": True},
        {"attn_mask": floats, "is_causal": True},
    )
    for call in calls:
        close(module(tokens, tokens, tokens, **call)[0], expected)
    module.causal = True
    close(module(tokens, tokens, tokens)[0], expected)


def test_a_mask_that_says_more_than_causal_is_never_dropped():
    module, tokens = attention(), inputs()
    above = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    more = above.clone()
    more[5, 2] = True
    close(module(tokens, tokens, tokens, attn_mask=more, is_causal=True)[0], by_hand(module, tokens, more))
    less = torch.zeros_like(above)
    less[6, 0] = True
    close(module(tokens, tokens, tokens, attn_mask=less, is_causal=True)[0], by_hand(module, tokens, less | above))
    per_head = torch.rand(BATCH * HEADS, TOKENS, TOKENS) > 0.6
    per_head.diagonal(dim1=1, dim2=2).fill_(False)
    out = module(tokens, tokens, tokens, attn_mask=per_head, is_causal=True)[0]
    close(out, by_hand(module, tokens, per_head.unflatten(0, (BATCH, HEADS)) | above))


def test_is_causal_aligns_ends_and_defers_to_a_mask_of_another_shape():
    module, tokens = attention(), inputs()
    whole = module(tokens, tokens, tokens, is_causal=True)[0]
    close(module(tokens[:, 5:], tokens, tokens, is_causal=True)[0], whole[:, 5:])
    mask = torch.ones(2, TOKENS, dtype=torch.bool).triu(1)
    promised = module(tokens[:, 5:], tokens, tokens, attn_mask=mask, is_causal=True)[0]
    close(promised, module(tokens[:, 5:], tokens, tokens, attn_mask=mask)[0])
    module.causal = True  # aligns ends, and hides less than this mask
    close(module(tokens[:, 5:], tokens, tokens, attn_mask=mask)[0], promised)


def test_a_mask_elsewhere_is_named():
    module, tokens = attention(), inputs()
    with pytest.raises(ValueError, match="key_padding_mask must be on the query's device cpu, got meta"):
        module(tokens, tokens, tokens, key_padding_mask=padding().to("meta"))
