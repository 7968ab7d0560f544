# SPDX-License-Identifier: Apache-2.0
"""Tokens of one side: positions, ranks, marks, and parts of them."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from linbias import grid_positions, positions_from_mask
from linbias.semantics.tokens import Tokens, key_ranks, unbiased_marks

CPU = torch.device("cpu")


def test_positions_that_are_not_given_follow_one_by_one():
    assert Tokens(4, -2, CPU).places().tolist() == [[-2, -1, 0, 1]]
    given = torch.tensor([[5, 5, 2]])
    assert Tokens(3, 7, CPU, given).places() is given


def full() -> Tokens:
    """Everything given, for two items, but positions for both."""
    number = torch.arange(14).reshape(2, 7)
    return Tokens(7, 0, CPU, number[:1] * 3, number % 3, number + 20, number % 2 == 0, number % 5 == 0)


def test_a_part_is_of_every_field():
    tokens = full()
    for span in (slice(2, 5), torch.tensor([6, 0, 0, 3])):
        part = tokens.part(span)
        for name in ("position", "segment", "rank", "real", "unbiased"):
            assert getattr(part, name).equal(getattr(tokens, name)[:, span]), name
        assert part.length == part.position.shape[1] and not part.counted
    plain = Tokens(7, -3, CPU)
    assert plain.part(slice(2, 5)).position is None and plain.part(slice(2, 5)).places().tolist() == [[-1, 0, 1]]
    chosen = plain.part(torch.tensor([6, 0]))
    assert chosen.places().tolist() == [[3, -3]] and chosen.counted


def test_stretches_are_of_their_items():
    tokens, items, starts = full(), torch.tensor([1, 0, 1]), torch.tensor([0, 4, 3])
    found = tokens.stretches(items, starts, 3)
    for n, (item, start) in enumerate(zip(items.tolist(), starts.tolist(), strict=True)):
        for name in ("position", "segment", "rank", "real", "unbiased"):
            given = getattr(tokens, name)
            assert getattr(found, name)[n].equal(given[item % given.shape[0], start : start + 3]), name
    plain = Tokens(7, -3, CPU).stretches(items, starts, 2)
    assert plain.places().tolist() == [[-3, -2], [1, 2], [0, 1]] and plain.counted and plain.real is None


def test_shared_by_the_batch():
    assert Tokens(7, 0, CPU).shared and full().part(slice(0, 2))._replace(segment=None).shared is False
    assert Tokens(7, 0, CPU, torch.arange(7)[None]).shared


def test_marks_of_tokens_without_bias():
    assert unbiased_marks(0, 3, 5, CPU) == (None, None)
    # Three queries on five keys stand at the last three places.
    queries, keys = unbiased_marks(3, 3, 5, CPU)
    assert queries.tolist() == [[True, False, False]] and keys.tolist() == [[True] * 3 + [False] * 2]


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
