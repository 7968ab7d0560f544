# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from linbias.lab.config import ALL_SCHEMES, TEST_SCHEMES, ModelConfig
from linbias.lab.model import build_decoder
from linbias.lab.positions import SCHEMES, Alibi, Learned, Positions, Rotary, Sinusoidal, why_not
from tests.lab.small import MODEL


def random_qkv(length: int, heads: int = 3, head_dim: int = 6) -> list[torch.Tensor]:
    return [torch.randn(2, heads, length, head_dim) for _ in range(3)]


def plain_attention(query, key, value, bias):
    """Causal softmax attention with bias(head, distance) added to scores, one pair at a time."""
    batch, heads, length, head_dim = query.shape
    out = torch.zeros_like(value)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                scores = [
                    (query[b, h, i] @ key[b, h, j] / math.sqrt(head_dim)).item() + bias(h, i - j) for j in range(i + 1)
                ]
                weights = torch.tensor(scores).softmax(0)
                out[b, h, i] = weights @ value[b, h, : i + 1]
    return out


def test_alibi_is_the_formula():
    query, key, value = random_qkv(7)
    slopes = [2**-4, 2**-8, 2**-2]
    expected = plain_attention(query, key, value, lambda h, distance: -slopes[h] * distance)
    torch.testing.assert_close(Alibi(heads=3).attend(query, key, value), expected)


def test_alibi_window_counts_the_query_s_own_key():
    query, key, value = random_qkv(7)
    slopes = [2**-4, 2**-8, 2**-2]
    expected = plain_attention(
        query, key, value, lambda h, distance: -slopes[h] * distance if distance < 3 else -math.inf
    )
    torch.testing.assert_close(Alibi(heads=3, window=3).attend(query, key, value), expected)


def test_no_positions_is_plain_causal_attention():
    query, key, value = random_qkv(5)
    expected = plain_attention(query, key, value, lambda h, distance: 0.0)
    torch.testing.assert_close(Positions().attend(query, key, value), expected)


def test_rotary_turns_pairs_by_position_times_frequency():
    query, key, value = random_qkv(5, head_dim=6)
    rates = torch.tensor([10_000.0 ** (-f / 3) for f in range(3)], dtype=torch.float64)
    turns = torch.polar(torch.ones(5, 3, dtype=torch.float64), torch.arange(5.0, dtype=torch.float64)[:, None] * rates)

    def turned(x):
        first, second = x.double().chunk(2, dim=-1)
        z = torch.complex(first, second) * turns
        return torch.cat((z.real, z.imag), dim=-1).float()

    expected = plain_attention(turned(query), turned(key), value, lambda h, distance: 0.0)
    torch.testing.assert_close(Rotary().attend(query, key, value), expected)


def test_sinusoids_have_the_amplitude_and_wavelengths_of_the_paper():
    width = 8
    waves = Sinusoidal().embed(torch.zeros(1, 40, width))[0] * math.sqrt(width)
    for position, frequency in [(0, 0), (1, 0), (17, 2), (39, 3)]:
        angle = position * 10_000 ** (-frequency / 4)
        assert waves[position, frequency].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert waves[position, 4 + frequency].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_learned_table_ends_where_training_ended():
    scheme = Learned(width=8, length=16)
    torch.nn.init.normal_(scheme.table)
    hidden = torch.randn(2, 16, 8)
    torch.testing.assert_close(scheme.embed(hidden), hidden + scheme.table)
    with pytest.raises(ValueError, match="at most 16 tokens, .* got 17"):
        scheme.embed(torch.randn(2, 17, 8))


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_no_scheme_sees_the_future(scheme):
    decoder = build_decoder(MODEL, scheme, length=12, seed=3)
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 8:] = torch.randint(256, (2, 4))
    before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert (before[:, 8:] - after[:, 8:]).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", [scheme for scheme in ALL_SCHEMES if scheme != "none"])
def test_every_scheme_but_none_tells_orders_apart(scheme):
    """One layer without positions cannot: its last output is the same for any order of the earlier bytes."""
    tokens = torch.tensor([[11, 22, 33, 44, 55, 66]])
    swapped = torch.tensor([[22, 11, 44, 33, 55, 66]])

    def last(name):
        decoder = build_decoder(ModelConfig(layers=1, width=24, heads=3), name, length=6, seed=3)
        return [decoder(order)[0, -1] for order in (tokens, swapped)]

    torch.testing.assert_close(*last("none"))
    one, other = last(scheme)
    assert (one - other).abs().max() > 1e-3


def test_only_the_learned_table_limits_the_length():
    for name in SCHEMES:
        assert SCHEMES[name].name == name
        reason = why_not(name, MODEL, trained=16, length=17)
        assert (reason is not None) == (name == "learned")
        assert why_not(name, MODEL, trained=16, length=16) is None
    assert why_not("learned", MODEL, trained=1600, length=1601) == "its table ends at the training length, 1,600"


@pytest.mark.parametrize("name", TEST_SCHEMES)
def test_a_scheme_of_test_time_is_its_base_up_to_the_training_length_and_says_what_it_changes(name):
    base = SCHEMES[name].trained_as
    decoders = [build_decoder(MODEL, each, length=16, seed=3) for each in (name, base)]
    decoders[0].load_state_dict(decoders[1].state_dict())
    tokens = torch.randint(256, (2, 45))
    found, expected = (decoder(tokens[:, :16]) for decoder in decoders)
    torch.testing.assert_close(found, expected)
    found, expected = (decoder(tokens) for decoder in decoders)
    assert (found - expected).abs().max() > 1e-3
    assert SCHEMES[name].change and base in ALL_SCHEMES


@pytest.mark.parametrize("length", [1, 16, 17, 33])
def test_case_f1_alibi_runs_at_any_length(length):
    decoder = build_decoder(MODEL, "alibi", length=16, seed=3)
    assert decoder(torch.randint(256, (3, length))).shape == (3, length, 256)
