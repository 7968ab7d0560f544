# SPDX-License-Identifier: Apache-2.0
"""Sections A, J and K: slopes."""

import math

import pytest
import torch

from linbias import alibi_attention, alibi_bias, alibi_slopes, reach
from tests.cases.flat import FOUR, HALF, assert_close, flat
from tests.every import every_backend


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 10, 12, 20, 40, 71, 112])
def test_a1_head_counts_that_are_no_power_of_two(heads: int):
    found = alibi_slopes(heads)
    assert found.shape == (heads,) and len(set(found.tolist())) == heads
    assert ((found > 0) & (found < 1)).all()


def test_a1_twelve_heads_are_not_one_geometric_series():
    series = [2 ** (-8 * h / 12) for h in range(1, 13)]
    assert_close(torch.tensor(series[:3]), [0.62996, 0.39685, 0.25], atol=1e-5)
    assert not torch.isclose(alibi_slopes(12), torch.tensor(series)).all()
    expected = [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert_close(alibi_slopes(12), expected, atol=3e-8)


def test_a2_heads_count_from_one():
    found = alibi_slopes(8).tolist()
    assert found[0] == 0.5 and found[-1] == 2**-8 and 1.0 not in found


def test_a4_the_order_is_that_of_the_checkpoints():
    found = alibi_slopes(10).tolist()
    assert found[:8] == alibi_slopes(8).tolist()
    assert_close(torch.tensor(found[8:]), [2**-0.5, 2**-1.5], atol=3e-8)
    assert found != sorted(found, reverse=True)


def test_a5_bias_of_six_heads_and_of_heads_without_one():
    at = torch.arange(5)
    assert alibi_bias(alibi_slopes(6), at, at).shape == (1, 6, 5, 5)
    partial = alibi_bias(alibi_slopes(6, biased_heads=4), at, at)
    assert (partial[:, 4:] == 0).all()
    assert partial[:, :4].equal(alibi_bias(alibi_slopes(4), at, at))


def test_a7_the_first_head_has_a_bias():
    at = torch.arange(5)
    assert (alibi_bias(alibi_slopes(4), at, at)[0, 0] != 0).sum() == 20
    with pytest.raises(TypeError):
        alibi_bias(0, at, at)


def test_a8_another_max_bias():
    found = alibi_slopes(32, max_bias=16.0)
    assert_close(found, [2 ** (-h / 2) for h in range(1, 33)], atol=3e-8)
    assert found[-1] == 2**-16 and alibi_slopes(32)[-1] == 2**-8


@every_backend
def test_a9_a_bias_before_the_scale_is_a_smaller_slope(backend: str):
    # Falcon divides bias and product by sqrt(64) alike.
    assert_close(flat(HALF, 4, 4, causal=True, backend=backend)[0, 0, 3], FOUR)
    found = flat(HALF / 8, 4, 4, causal=True, backend=backend)[0, 0, 3]
    assert_close(found, [0.2270728, 0.2417178, 0.2573072, 0.2739021])


def test_a9_dividing_both_and_multiplying_back_is_nothing():
    query, key = torch.randn(2, 4, 64, dtype=torch.float64), torch.randn(2, 4, 64, dtype=torch.float64)
    bias = alibi_bias(HALF.double(), torch.arange(4), torch.arange(4))[0]
    product = query @ key.mT
    torch.testing.assert_close((product / 7 + bias / 7) * 7, product + bias)


@every_backend
def test_a10_key_index_and_relative_form_agree_under_causal(backend: str):
    query, key, value = (torch.randn(2, 4, 9, 8) for _ in range(3))
    slopes = alibi_slopes(4)
    scores = query @ key.mT / math.sqrt(8) + slopes[:, None, None] * torch.arange(9)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    assert_close(alibi_attention(query, key, value, slopes, causal=True, backend=backend), expected.double())


def test_j1_slopes_of_a_rank_are_a_slice():
    assert alibi_slopes(8).chunk(2)[1].tolist() == [1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(4).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert_close(alibi_slopes(12).chunk(2)[1], [0.0078125, 0.00390625, 0.7071068, 0.3535534, 0.1767767, 0.0883883])
    assert_close(alibi_slopes(40).chunk(2)[1][0], 0.02627801, atol=1e-8)


@every_backend
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 8, 2), (12, 6, 3), (40, 8, 4)])
def test_j2_ranks_together_are_the_whole(backend: str, heads: int, kv_heads: int, ranks: int):
    query = torch.randn(1, heads, 5, 8)
    key, value = torch.randn(1, kv_heads, 7, 8), torch.randn(1, kv_heads, 7, 8)
    slopes = alibi_slopes(heads)
    parts = zip(query.chunk(ranks, 1), key.chunk(ranks, 1), value.chunk(ranks, 1), slopes.chunk(ranks), strict=True)
    found = torch.cat([alibi_attention(*part, causal=True, backend=backend) for part in parts], 1)
    torch.testing.assert_close(found, alibi_attention(query, key, value, slopes, causal=True, backend=backend))


@every_backend
def test_j4_a_query_head_keeps_its_slope_in_its_group(backend: str):
    slopes = alibi_slopes(8)
    query = torch.zeros(1, 8, 1, 4)
    key, value = torch.zeros(1, 2, 4, 4), torch.eye(4).expand(1, 2, 4, 4).clone()
    value[:, 1] *= 10  # head 5 reads kv head 1
    found = alibi_attention(query, key, value, slopes, causal=True, backend=backend)
    expected = (-slopes[5].item() * torch.tensor([3.0, 2.0, 1.0, 0.0])).softmax(-1)
    assert_close(found[0, 5, 0], 10 * expected.double(), atol=1e-5)


def test_k3_how_far_a_head_looks():
    slopes = alibi_slopes(8)
    assert (1 / slopes).tolist() == [2, 4, 8, 16, 32, 64, 128, 256]
    # exp(-m * 1024): little is left at slope 2**-8, nearly everything at 2**-16.
    assert_close(torch.exp(alibi_bias(slopes[-1:], torch.tensor([1024]), torch.tensor([0])))[0, 0, 0], [0.0183156])
    assert_close(torch.exp(-1024 * alibi_slopes(32, max_bias=16.0)[-1]), 0.984496)
    # Beyond its reach a flat head has no more than the tolerance left.
    for slope, distance in zip(slopes.tolist(), reach(slopes, tolerance=1e-6).tolist(), strict=True):
        tail = math.exp(-slope * (distance + 1)) / (1 - math.exp(-slope))
        assert tail <= 1e-6 < tail * math.exp(slope)
