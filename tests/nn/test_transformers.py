# SPDX-License-Identifier: Apache-2.0
"""`nn.MultiheadAttention` inside torch's encoder and decoder layers.

torch's fused inference path would leave the bias out, and training hands boolean masks on as floats.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from linbias.nn import MultiheadAttention, Slopes
from tests.nn.small import BATCH, HEADS, TOKENS, WIDTH, close, inputs, padding


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, **({"dropout": 0.0, "batch_first": True} | options))
    layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
    return layer


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_training_and_inference_agree_and_carry_the_bias(batch_first: bool, norm_first: bool):
    encoder = nn.TransformerEncoder(
        encoder_layer(batch_first=batch_first, norm_first=norm_first), 2, enable_nested_tensor=False
    )
    tokens = inputs() if batch_first else inputs().transpose(0, 1)
    real = ~padding() if batch_first else ~padding().T
    for masks in ({}, {"src_key_padding_mask": padding()}):
        trained = encoder.train()(tokens, **masks)
        with torch.no_grad():
            inferred = encoder.eval()(tokens, **masks)
            plain = copy.deepcopy(encoder)
            for layer in plain.layers:
                layer.self_attn.slopes = Slopes(HEADS, biased_heads=0)
            assert (plain(tokens, **masks) - inferred)[real].abs().max() > 1e-2
        close(inferred[real], trained[real])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_an_encoder_that_nests_its_input():
    """Replaced after the encoder was built, which by then wants nested tensors."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True), 2)
    for layer in encoder.layers:
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
    assert encoder.use_nested_tensor
    tokens, real = inputs(), ~padding()
    trained = encoder.train()(tokens, src_key_padding_mask=padding())
    with torch.no_grad():
        inferred = encoder.eval()(tokens, src_key_padding_mask=padding())
    close(inferred[real], trained[real])
    assert inferred[~real].eq(0).all()


def test_causal_masks_reach_the_layers():
    encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    tokens, mask = inputs(), nn.Transformer.generate_square_subsequent_mask(TOKENS)
    for mode in (encoder.train(), encoder.eval()):
        with torch.no_grad():
            out = mode(tokens, mask=mask)
            close(mode(tokens, mask=mask, is_causal=True), out)
            close(mode(tokens[:, :4], mask=mask[:4, :4]), out[:, :4])


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
def test_a_whole_transformer():
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 24, dropout=0.0, batch_first=True)
    for layer in model.encoder.layers:
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
    for layer in model.decoder.layers:
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn, causal=True)
    source, target = inputs(), inputs(BATCH, 5, WIDTH)
    call = {"src_key_padding_mask": padding(), "memory_key_padding_mask": padding()}
    trained = model.train()(source, target, **call)
    trained.sum().backward()
    with torch.no_grad():
        inferred = model.eval()(source, target, **call)
        close(inferred, trained)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        close(model(source, target, tgt_mask=mask, tgt_is_causal=True, **call), trained)
        close(model(source, target[:, :3], **call), trained[:, :3])


def test_a_shifted_block_gives_the_same_output():
    """True of ALiBi alone; an absolute position embedding added before the encoder breaks it."""
    encoder = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False).eval()
    block, shift = inputs(1, 5, WIDTH), 4
    shifted = torch.cat([inputs(1, shift, WIDTH), block], dim=1)
    hidden = (torch.arange(shift + 5) < shift)[None]
    embedding = nn.Embedding(16, WIDTH)(torch.arange(16))
    with torch.no_grad():
        close(encoder(shifted, src_key_padding_mask=hidden)[:, shift:], encoder(block))
        moved = encoder(shifted + embedding[: shift + 5], src_key_padding_mask=hidden)[:, shift:]
        assert (moved - encoder(block + embedding[:5])).abs().max() > 1e-2
