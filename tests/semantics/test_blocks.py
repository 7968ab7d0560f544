# SPDX-License-Identifier: Apache-2.0
"""The dense definitions: bias, positions and ranks."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from linbias import alibi_bias, alibi_slopes, grid_positions, positions_from_mask
from linbias.semantics.tokens import key_ranks

HALF = torch.tensor([0.5])


def test_distance_times_slope_on_both_sides():
    found = alibi_bias(torch.tensor([0.5, 2.0]), torch.tensor([0, 3]), torch.tensor([1, 3, 7]))
    assert found.tolist() == [[[[-0.5, -1.5, -3.5], [-1.0, 0.0, -2.0]], [[-2.0, -6.0, -14.0], [-4.0, 0.0, -8.0]]]]


def test_future_slopes_rule_later_keys_alone():
    found = alibi_bias(HALF, torch.tensor([2]), torch.arange(5), future_slopes=torch.tensor([3.0]))
    assert found.tolist() == [[[[-1.0, -0.5, 0.0, -3.0, -6.0]]]]


def test_slopes_of_zero_infinity_and_below_zero():
    slopes = torch.tensor([0.0, math.inf, -1.0])
    found = alibi_bias(slopes, torch.tensor([1]), torch.arange(3))
    assert found.tolist() == [[[[0.0, 0.0, 0.0]], [[-math.inf, 0.0, -math.inf]], [[1.0, 0.0, 1.0]]]]
    assert not torch.signbit(found[0, 0]).any(), "no negative zero, which prints as -0."


def test_unbiased_tokens_neither_give_nor_receive():
    found = alibi_bias(HALF, torch.arange(3), torch.arange(4), unbiased=1)
    # Three queries on four keys stand at the last three places, so only the first column is free.
    assert found[0, 0].tolist() == [[0.0, -0.5, -1.0, -1.5], [0.0, 0.0, -0.5, -1.0], [0.0, -0.5, 0.0, -0.5]]
    square = alibi_bias(HALF, torch.arange(4), torch.arange(4), unbiased=1)
    assert square[0, 0, 0].tolist() == [0.0] * 4 and square[0, 0, :, 0].tolist() == [0.0] * 4


@pytest.mark.parametrize(("metric", "expected"), [("euclidean", -2.5), ("manhattan", -3.5)])
def test_metrics(metric: str, expected: float):
    found = alibi_bias(HALF, torch.tensor([[1, 1]]), torch.tensor([[1, 1], [4, 5]]), metric=metric)
    assert found.tolist() == [[[[0.0, expected]]]]


def test_shapes_and_dtypes():
    slopes = torch.rand(2, 3)
    assert alibi_bias(slopes, torch.zeros(5).long(), torch.zeros(7).int()).shape == (2, 3, 5, 7)
    assert alibi_bias(slopes[0], torch.zeros(2, 5).long(), torch.zeros(2, 7).long()).shape == (2, 3, 5, 7)
    assert alibi_bias(slopes[0], torch.zeros(5).long(), torch.zeros(7).long()).shape == (1, 3, 5, 7)
    assert alibi_bias(slopes[0].double(), torch.zeros(5).long(), torch.zeros(0).long()).dtype == torch.float64
    coordinates = torch.rand(2, 5, 4)
    assert alibi_bias(slopes, coordinates, coordinates[:1], metric="euclidean").shape == (2, 3, 5, 5)


def test_differentiable_by_the_slopes():
    slopes = torch.tensor([0.5], requires_grad=True)
    alibi_bias(slopes, torch.tensor([3]), torch.arange(4)).sum().backward()
    assert slopes.grad.tolist() == [-6.0]


def test_distances_are_exact_integers_however_large():
    far = 2**53
    found = alibi_bias(torch.tensor([1.0], dtype=torch.float64), torch.tensor([far]), torch.tensor([far - 3, far + 1]))
    assert found.tolist() == [[[[-3.0, -1.0]]]]
    # 2**53 + 1 and 2**53 are one float64, and 4099 and 4100 are one float16.
    near = alibi_bias(torch.tensor([0.5]), torch.tensor([4100]), torch.arange(4))
    assert near.tolist() == [[[[-2050.0, -2049.5, -2049.0, -2048.5]]]]


def test_inputs_stay_as_they_were():
    slopes, positions = alibi_slopes(3), torch.arange(5)
    alibi_bias(slopes, positions, positions, unbiased=2, future_slopes=slopes)
    assert slopes.equal(alibi_slopes(3)) and positions.equal(torch.arange(5))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"slopes": HALF.half()}, TypeError, "slopes must be float32 or float64, got torch.float16"),
        ({"slopes": torch.zeros(1, 1, 1)}, ValueError, "slopes must have shape (H,), (1, H) or (B, H)"),
        ({"slopes": [0.5]}, TypeError, "slopes must be a torch.Tensor, got list"),
        ({"future_slopes": torch.zeros(2)}, ValueError, "future_slopes must have shape (1,), (1, 1) or (B, 1)"),
        ({"query_positions": torch.zeros(3)}, TypeError, "query_positions must be integers, got torch.float32"),
        ({"key_positions": torch.zeros(3, 2, 1).long()}, ValueError, "key_positions must have shape (T,) or (B, T)"),
        ({"key_positions": range(3)}, TypeError, "key_positions must be a torch.Tensor, got range"),
        ({"metric": "cosine"}, ValueError, "metric must be None, 'euclidean' or 'manhattan', got 'cosine'"),
        ({"unbiased": -1}, ValueError, "unbiased must be an int >= 0, got -1"),
        ({"unbiased": True}, ValueError, "unbiased must be an int >= 0, got True"),
    ],
)
def test_errors(change: dict, error: type[Exception], says: str):
    arguments = {"slopes": HALF, "query_positions": torch.arange(3), "key_positions": torch.arange(3)} | change
    with pytest.raises(error) as caught:
        alibi_bias(**arguments)
    assert says in str(caught.value)


def test_a_metric_has_no_later_side():
    points = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="future_slopes must be None under metric='euclidean'"):
        alibi_bias(HALF, points, points, metric="euclidean", future_slopes=HALF)


def test_batches_that_do_not_belong_together():
    with pytest.raises(ValueError, match="one batch size"):
        alibi_bias(torch.rand(2, 3), torch.zeros(3, 5).long(), torch.zeros(7).long())
    with pytest.raises(ValueError, match="number of coordinates"):
        alibi_bias(HALF, torch.zeros(3, 2), torch.zeros(3, 1), metric="euclidean")


def test_grid_positions():
    assert grid_positions(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert grid_positions(1, 2).tolist() == [[0, 0], [0, 1]]
    assert grid_positions(0, 3).shape == (0, 2) and grid_positions(3, 0).shape == (0, 2)
    assert grid_positions(2, 3).dtype == torch.int64
    assert grid_positions(2, 3, device="meta").device.type == "meta"
    with pytest.raises(ValueError, match="width must be an int >= 0, got -1"):
        grid_positions(2, -1)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([0, 0, 1, 1, 1], [0, 0, 0, 1, 2]),
        ([1, 1, 1, 0, 0], [0, 1, 2, 2, 2]),
        ([1, 0, 1, 0, 1], [0, 0, 1, 1, 2]),
        ([0, 0], [0, 0]),
        ([], []),
        ([[0, 1], [1, 1]], [[0, 0], [0, 1]]),
    ],
)
def test_positions_from_mask(mask: list, expected: list):
    for dtype in (torch.bool, torch.int64, torch.uint8):
        found = positions_from_mask(torch.tensor(mask, dtype=dtype))
        assert found.tolist() == expected and found.dtype == torch.int64


def test_positions_from_mask_refuses_floats():
    with pytest.raises(TypeError, match="mask must be bool or integers with 1 = real, got torch.float32"):
        positions_from_mask(torch.ones(3))
    with pytest.raises(TypeError, match=r"mask must be a torch.Tensor, got list"):
        positions_from_mask([1, 1])


@hypothesis.given(st.data())
def test_ranks_count_the_real_keys_before(data: st.DataObject):
    batch, keys = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 9))
    rows = st.lists(st.integers(-1, 2), min_size=keys, max_size=keys)
    mask = data.draw(st.none() | st.lists(rows.map(lambda row: [number > 0 for number in row]), min_size=1, max_size=1))
    segments = data.draw(st.none() | st.lists(rows, min_size=batch, max_size=batch))
    found = key_ranks(
        keys,
        None if mask is None else torch.tensor(mask, dtype=torch.bool).reshape(1, keys),
        None if segments is None else torch.tensor(segments, dtype=torch.int64).reshape(batch, keys),
        torch.device("cpu"),
    )
    real = (mask or [[True] * keys])[0]
    for found_row, numbers in zip(found.tolist(), segments or [[0] * keys], strict=True):
        assert found_row == [
            sum(real[other] and numbers[other] == numbers[j] for other in range(j)) for j in range(keys)
        ]
