# SPDX-License-Identifier: Apache-2.0
"""RoPE's scalings against transformers' own functions."""

import math

import pytest
import torch

from linbias.lab.schemes.rotary import DynamicRotary, LinearRotary, NtkRotary, Rotary, YarnRotary

TRAINED, LENGTH = 96, 352
KINDS = [
    (LinearRotary, {"rope_type": "linear", "factor": LENGTH / TRAINED}, None),
    (NtkRotary, {"rope_type": "dynamic", "factor": 1.0}, LENGTH),
    (DynamicRotary, {"rope_type": "dynamic", "factor": 2.0}, LENGTH),
    (
        YarnRotary,
        {"rope_type": "yarn", "factor": LENGTH / TRAINED, "original_max_position_embeddings": TRAINED},
        None,
    ),
]


def theirs(parameters, head_dim, length):
    pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head_dim * 3,
        num_attention_heads=3,
        max_position_embeddings=TRAINED if parameters["rope_type"] == "dynamic" else LENGTH,
        rope_parameters={"rope_theta": 10_000.0, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("head_dim", [4, 16, 26, 64, 128])
@pytest.mark.parametrize(("kind", "parameters", "length"), KINDS, ids=lambda value: getattr(value, "__name__", None))
def test_frequencies_are_transformers(kind, parameters, length, head_dim):
    """Ours are made in fp64, theirs in fp32: an exponent is off by half an epsilon of itself, at most 1, and the power
    by that times the logarithm of the base; the power, two divisions and a product are rounded besides."""
    expected, amplitude = theirs(parameters, head_dim, length)
    found = kind(TRAINED).rates(head_dim // 2, LENGTH)
    base = 10_000.0 * (2 * LENGTH / TRAINED) ** (head_dim / (head_dim - 2))
    # Where YaRN mixes two rates, the weights are rounded too: twice as many roundings.
    budget = (math.log(base) + 2 * 4) * torch.finfo(torch.float32).eps / 2
    assert ((found - expected.double()) / found).abs().max() <= budget
    assert kind(TRAINED).amplitude(LENGTH) == amplitude


@pytest.mark.parametrize("kind", [kind for kind, _, _ in KINDS])
@pytest.mark.parametrize("length", [1, 33, TRAINED])
def test_up_to_the_training_length_nothing_changes(kind, length):
    query, key, value = torch.randn(3, 2, 3, length, 16).unbind()
    assert torch.equal(kind(TRAINED).attend(query, key, value), Rotary().attend(query, key, value))


def test_attention_is_that_of_a_llama_with_yarn():
    """Angles, halves and the factor on cosines and sines, all at once."""
    pytest.importorskip("transformers", reason="transformers (extra hf) is not installed")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    parameters = KINDS[-1][1]
    rates, amplitude = theirs(parameters, 16, None)
    assert amplitude == pytest.approx(0.1 * math.log(LENGTH / TRAINED) + 1)
    query, key, value = torch.randn(3, 2, 3, LENGTH, 16).double().unbind()
    angles = torch.arange(LENGTH)[:, None] * rates.double()
    angles = torch.cat((angles, angles), dim=-1)[None]
    turned = apply_rotary_pos_emb(query, key, angles.cos() * amplitude, angles.sin() * amplitude)
    expected = Rotary.__mro__[1].attend(Rotary(), *turned, value)
    found = YarnRotary(TRAINED).attend(query, key, value)
    # fp32 angles below 2 pi on our side and fp32 rates times positions up to LENGTH on theirs; scores are linear in
    # them, with rows whose squares add up to about head_dim.
    error = LENGTH * (math.log(10_000.0) + 8) * torch.finfo(torch.float32).eps
    assert (found - expected).abs().max() <= error * 16
    assert (Rotary().attend(query, key, value) - expected).abs().max() > 0.1


def test_the_ntk_base_interpolates_the_slowest_angle_only():
    slow = NtkRotary(TRAINED).rates(8, LENGTH)
    plain = Rotary().rates(8, LENGTH)
    assert slow[0] == plain[0]
    torch.testing.assert_close(slow[-1], plain[-1] * TRAINED / LENGTH)
    assert NtkRotary(TRAINED).rates(1, LENGTH).tolist() == [1.0]
