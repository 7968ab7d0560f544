# SPDX-License-Identifier: Apache-2.0
"""Slopes against the lists that the authors' code and the published checkpoints use."""

import math

import pytest
import torch

from linbias import alibi_slopes
from tests.flat import assert_close


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (5, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
    ],
)
def test_press_exactly(heads: int, expected: list[float]):
    assert alibi_slopes(heads).tolist() == expected


def test_press_of_twelve_heads():
    found = alibi_slopes(12)
    assert found[:8].equal(alibi_slopes(8))
    torch.testing.assert_close(
        found[8:], torch.tensor([0.70710678, 0.35355339, 0.17677670, 0.08838835]), rtol=0, atol=3e-8
    )


def test_press_of_forty_heads():
    found = alibi_slopes(40)
    assert found[:32].equal(alibi_slopes(32))
    torch.testing.assert_close(found[:3], torch.tensor([0.84089642, 0.70710678, 0.59460356]), rtol=0, atol=6e-8)
    tail = [0.91700404, 0.77110541, 0.64841978, 0.54525387, 0.45850202, 0.38555271, 0.32420989, 0.27262693]
    torch.testing.assert_close(found[32:], torch.tensor(tail), rtol=0, atol=6e-8)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [(12, [0.629961, 0.39685, 0.25]), (3, [0.157490, 0.024803, 0.003906])],
)
def test_geometric(heads: int, expected: list[float]):
    found = alibi_slopes(heads, rule="geometric")
    torch.testing.assert_close(found[:3], torch.tensor(expected), rtol=0, atol=5e-7)
    assert found[-1] == 2**-8


@pytest.mark.parametrize("heads", [1, 3, 8, 24, 71, 112, 241])
@pytest.mark.parametrize("max_bias", [8.0, 16.0, 5.5])
def test_press_by_the_construction_from_above(heads: int, max_bias: float):
    # The other way published code builds the list: the next power of two, every second slope first, cut to length.
    above = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-max_bias * h / above) for h in range(1, above + 1)]
    if above != heads:
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    found = alibi_slopes(heads, max_bias=max_bias)
    assert found.tolist() == torch.tensor(slopes, dtype=torch.float64).float().tolist(), "more than one rounding"


@pytest.mark.parametrize("rule", ["press", "geometric"])
def test_double_max_bias_squares_every_slope(rule: str):
    squared = alibi_slopes(24, rule=rule).double() ** 2
    torch.testing.assert_close(alibi_slopes(24, rule=rule, max_bias=16.0).double(), squared, rtol=2**-22, atol=0)


def test_biased_heads():
    assert alibi_slopes(6, biased_heads=4).tolist() == [*alibi_slopes(4).tolist(), 0.0, 0.0]
    assert alibi_slopes(5, biased_heads=0).tolist() == [0.0] * 5
    assert alibi_slopes(6, biased_heads=3, rule="geometric").tolist()[:3] == alibi_slopes(3, rule="geometric").tolist()
    assert alibi_slopes(6, biased_heads=6).equal(alibi_slopes(6))


def test_where_and_in_what_the_slopes_live():
    found = alibi_slopes(3, device="meta")
    assert found.device.type == "meta" and found.shape == (3,) and found.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert alibi_slopes(3).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert alibi_slopes(3).device.type == "meta"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_heads": -3}, "num_heads must be an int >= 0, got -3"),
        ({"num_heads": 4, "max_bias": 0.0}, "max_bias must be a positive finite number, got 0.0; the paper uses 8.0"),
        ({"num_heads": 4, "max_bias": math.inf}, "max_bias must be a positive finite number, got inf"),
        ({"num_heads": 4, "max_bias": math.nan}, "max_bias must be a positive finite number, got nan"),
        ({"num_heads": 4, "biased_heads": 5}, "biased_heads must be between 0 and num_heads=4, got 5; None means all"),
        ({"num_heads": 4, "biased_heads": -1}, "biased_heads must be an int >= 0, got -1"),
        ({"num_heads": 4, "biased_heads": 2.0}, "biased_heads must be an int >= 0, got 2.0"),
        ({"num_heads": 4, "rule": "alibi"}, "rule must be 'press' or 'geometric', got 'alibi'"),
    ],
)
def test_errors(arguments: dict, says: str):
    with pytest.raises(ValueError) as caught:
        alibi_slopes(**arguments)
    assert says in str(caught.value)


@pytest.mark.parametrize("heads", [2.5, "4", 8.0, True, torch.tensor(4), None])
def test_a_head_count_is_an_int(heads: object):
    with pytest.raises(ValueError, match="num_heads must be an int >= 0, got"):
        alibi_slopes(heads)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 10, 12, 20, 40, 71, 112])
def test_every_head_has_a_slope_of_its_own_between_0_and_1(heads: int):
    found = alibi_slopes(heads)
    assert found.shape == (heads,) and len(set(found.tolist())) == heads
    assert ((found > 0) & (found < 1)).all()


def test_twelve_heads_are_not_one_geometric_series():
    series = [2 ** (-8 * h / 12) for h in range(1, 13)]
    assert_close(torch.tensor(series[:3]), [0.62996, 0.39685, 0.25], atol=1e-5)
    assert not torch.isclose(alibi_slopes(12), torch.tensor(series)).all()
    expected = [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert_close(alibi_slopes(12), expected, atol=3e-8)


def test_the_order_is_that_of_the_checkpoints():
    found = alibi_slopes(10).tolist()
    assert found[:8] == alibi_slopes(8).tolist()
    assert_close(torch.tensor(found[8:]), [2**-0.5, 2**-1.5], atol=3e-8)
    assert found != sorted(found, reverse=True)


def test_max_bias_16_of_32_heads():
    found = alibi_slopes(32, max_bias=16.0)
    assert_close(found, [2 ** (-h / 2) for h in range(1, 33)], atol=3e-8)
    assert found[-1] == 2**-16 and alibi_slopes(32)[-1] == 2**-8


def test_slopes_of_a_rank_are_a_slice():
    assert alibi_slopes(8).chunk(2)[1].tolist() == [1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(4).tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert_close(alibi_slopes(12).chunk(2)[1], [0.0078125, 0.00390625, 0.7071068, 0.3535534, 0.1767767, 0.0883883])
    assert_close(alibi_slopes(40).chunk(2)[1][0], 0.02627801, atol=1e-8)
