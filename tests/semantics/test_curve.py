# SPDX-License-Identifier: Apache-2.0
"""The curve: through every cell once, from neighbour to neighbour, whatever the coordinates are."""

import pytest
import torch

from linbias import grid_positions
from linbias.semantics.curve import curve_order, hilbert_codes
from linbias.semantics.tokens import Tokens

CPU = torch.device("cpu")


def order_of(points: torch.Tensor, **facts: torch.Tensor) -> list[int]:
    return curve_order(Tokens(points.shape[1], 0, CPU, points, **facts))[0].tolist()


@pytest.mark.parametrize(("side", "axes"), [(16, 1), (16, 2), (8, 3), (4, 4)])
def test_one_step_at_a_time_through_every_cell(side: int, axes: int):
    cells = torch.cartesian_prod(*[torch.arange(side)] * axes).view(1, -1, axes).float()
    walked = cells[0, curve_order(Tokens(cells.shape[1], 0, CPU, cells))[0]]
    assert ((walked[1:] - walked[:-1]).abs().sum(1) == 1).all()
    assert walked.unique(dim=0).shape == walked.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("scale", "shift"), [(256.0, -7.0), (0.25, -3.0), (2.0**40, 2.0**60), (2.0**-100, 0.0)])
def test_neither_place_nor_size_matters(scale: float, shift: float, dtype: torch.dtype):
    cells = grid_positions(16, 16)[None].to(dtype)
    assert order_of(cells * scale + shift) == order_of(cells)


def test_aligned_patches_of_a_grid_stay_together():
    order = torch.tensor(order_of(grid_positions(32, 32)[None].float()))
    patches = grid_positions(32, 32)[order].view(-1, 64, 2)
    assert (patches.amax(1) - patches.amin(1) == 7).all()


def test_who_is_near_everything_comes_first_and_who_is_not_there_last():
    points = torch.tensor([[[9.0, 9.0], [0.0, 0.0], [torch.nan, 1e38], [0.0, 1.0], [8.0, 9.0], [5.0, 5.0]]])
    marks = {"unbiased": torch.arange(6)[None] == 5, "real": torch.arange(6)[None] != 2}
    found = order_of(points, **marks)
    assert found[0] == 5 and found[-1] == 2 and {found[1], found[2]} in ({1, 3}, {0, 4})
    segments = torch.tensor([[1, -3, 1, 1, -3, -3]])
    found = order_of(points, **marks, segment=segments)
    assert segments[0, found].tolist() == [-3, -3, -3, 1, 1, 1] and found[0] == 5 and found[-1] == 2


def test_what_has_no_order_keeps_the_caller_s():
    for points in (torch.full((1, 7, 2), 3.0), torch.full((1, 7, 2), torch.inf), torch.zeros(1, 7, 0)):
        assert order_of(points) == list(range(7))
    assert order_of(torch.zeros(1, 0, 2)) == []


def test_an_item_s_order_is_its_own():
    points = torch.randn(3, 37, 2, generator=torch.Generator().manual_seed(0))
    orders = curve_order(Tokens(37, 0, CPU, points))
    for item, order in zip(points, orders, strict=True):
        assert order.tolist() == order_of(item[None])


def test_more_coordinates_than_bits():
    codes = hilbert_codes(torch.randn(1, 11, 70, generator=torch.Generator().manual_seed(0)))
    assert codes.shape == (1, 11) and (codes >= 0).all() and len(codes.unique()) > 5
