# SPDX-License-Identifier: Apache-2.0
"""Attention on a plane against dense models of the published form, in float64, and in half precision."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from linbias import grid_positions
from linbias.nn import slides
from linbias.testing import assert_within_budget
from tests.nn.published_slides import GEOMETRIC, Croma, CromaSelf, Moozy, Titan, bias_of, grid


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().double()


def tissue(*shape: int) -> Tensor:
    return drawn(*shape) > -0.3


PLACES = drawn(2, 17, 2) * 900
CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], tuple[Tensor | None, ...]]] = {
    "croma": (Croma, slides.use_in_croma, (drawn(2, 25, 24), drawn(2, 25, 24) + 1)),
    "titan": (Titan, slides.use_in_titan, (drawn(12), drawn(1, 5, 7, 12))),
    "titan tissue": (Titan, slides.use_in_titan, (drawn(12), drawn(1, 5, 7, 12), tissue(1, 5, 7))),
    "titan batch": (Titan, slides.use_in_titan, (drawn(12), drawn(3, 5, 7, 12), tissue(3, 5, 7))),
    "titan one tile": (Titan, slides.use_in_titan, (drawn(12), drawn(1, 1, 1, 12))),
    "titan one row, strided": (Titan, slides.use_in_titan, (drawn(12), drawn(12, 7, 1, 3).permute(3, 2, 1, 0))),
    "titan all background": (
        Titan,
        slides.use_in_titan,
        (drawn(12), drawn(1, 5, 7, 12), torch.zeros(1, 5, 7, dtype=torch.bool)),
    ),
    "titan a slide of background in a batch": (
        Titan,
        slides.use_in_titan,
        (drawn(12), drawn(2, 5, 7, 12), torch.tensor([False, True])[:, None, None].expand(2, 5, 7)),
    ),
    "titan crops": (Titan, slides.use_in_titan, (drawn(12), drawn(2, 6, 6, 12))),
    "moozy": (Moozy, slides.use_in_moozy, (drawn(2, 20, 12), PLACES, torch.tensor([224.0, 56.0]))),
    "moozy mask": (
        Moozy,
        slides.use_in_moozy,
        (drawn(2, 20, 12), PLACES, torch.tensor([224.0, 0.0]), nn.functional.pad(tissue(2, 17), (3, 0), value=True)),
    ),
    "moozy no tile": (Moozy, slides.use_in_moozy, (drawn(2, 3, 12), drawn(2, 0, 2), torch.tensor([224.0, 56.0]))),
    "moozy one tile": (Moozy, slides.use_in_moozy, (drawn(1, 4, 12), drawn(1, 1, 2), torch.tensor([224.0]))),
    "moozy nothing valid": (
        Moozy,
        slides.use_in_moozy,
        (drawn(2, 20, 12), PLACES, torch.tensor([224.0, 56.0]), (torch.arange(20) < 3).expand(2, 20)),
    ),
    "moozy duplicates": (
        Moozy,
        slides.use_in_moozy,
        (drawn(1, 20, 12), (drawn(1, 17, 2) * 2).round() * 2.0**20, torch.tensor([2.0**19])),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_output_and_gradients_are_the_dense_model_s(name: str):
    kind, use, inputs = CALLS[name]
    published = made(kind)
    ours = use(copy.deepcopy(published))
    assert {key for key, _ in ours.named_parameters()} == {key for key, _ in published.named_parameters()}
    outs = published(*inputs), ours(*inputs)
    close(outs[1], outs[0])
    weight = drawn(*outs[0].shape)
    for out in outs:
        (out * weight).sum().backward()
    gradients = dict(published.named_parameters())
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None, key
        close(parameter.grad, gradients[key].grad)


def close(actual: Tensor, expected: Tensor | None) -> None:
    """To the rounding of a few hundred float64 terms."""
    assert expected is not None
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * max(1.0, largest))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cross", [False, True])
@torch.no_grad()
def test_half_precision_on_an_odd_grid(cross: bool, dtype: torch.dtype):
    dense = made(lambda: CromaSelf(24, 6, cross=cross)).to(dtype)
    ours = slides.CromaAttention.of(dense, num_heads=6)
    points, tokens = grid(5, 7), [drawn(2, 35, 24).to(dtype) for _ in range(2 if cross else 1)]
    bias = bias_of(GEOMETRIC[6], points)
    exact = copy.deepcopy(dense).double()(*(each.double() for each in tokens), bias)
    assert_within_budget(ours(*tokens, points), exact, dense(*tokens, bias), f"cross {cross}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["titan batch", "titan tissue", "moozy mask"])
@torch.no_grad()
def test_models_in_half_precision(name: str, dtype: torch.dtype):
    kind, use, (*tokens, last) = CALLS[name]
    # Places and patch sizes stay as they are, as the published encoder keeps them in float32.
    halves = [part if kind is Moozy and part.shape[-1] != 12 else part.to(dtype) for part in tokens]
    dense = made(kind).to(dtype)
    exact = copy.deepcopy(dense).double()(*(part.double() for part in halves), last)
    ours, plain = use(copy.deepcopy(dense))(*halves, last), dense(*halves, last)
    assert_within_budget(ours, exact, plain, name)


def test_no_tiles_are_an_empty_answer():
    ours = slides.CromaAttention(24, 6)
    assert ours(torch.ones(2, 0, 24), grid_positions(0, 3)).shape == (2, 0, 24)
    titan = slides.use_in_titan(made(Titan))
    assert titan(drawn(12), drawn(1, 0, 5, 12)).shape == (1, 1, 12)


def test_modules_made_anew_have_the_published_names():
    for cross in (False, True):
        ours = slides.CromaAttention(24, 6, cross=cross)
        ours.load_state_dict(CromaSelf(24, 6, cross=cross).state_dict())
    titan = slides.TitanAttention(24, 6)
    assert set(titan.state_dict()) == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    assert titan(torch.ones(1, 36, 24), slides.tile_points(5, 7)).shape == (1, 36, 24)


def test_croma_takes_larger_images_than_it_was_built_for():
    small, large = made(Croma), made(lambda: Croma(side=7))
    tokens = drawn(1, 49, 24), drawn(1, 49, 24) - 1
    close(slides.use_in_croma(small, side=7)(*tokens), large(*tokens))
    assert set(small.state_dict()) == set(large.state_dict()) - {"attn_bias"}


def test_far_tiles_in_half_precision_are_where_they_are():
    """Column 2,049 is none in float16, in which TITAN would have its bias."""
    points = slides.tile_points(1, 2051)
    moved = points.repeat(1, 1, 1, 1).type(torch.float16).to("cpu")
    assert moved.points[-2:].tolist() == [[0, 2049], [0, 2050]]


@pytest.mark.parametrize("name", ["croma", "titan tissue", "moozy"])
def test_a_changed_model_is_copied_and_pickled(name: str):
    kind, use, inputs = CALLS[name]
    model = use(made(kind))
    wanted = model(*inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(*inputs), wanted)


def test_models_of_another_form_are_refused():
    for use in (slides.use_in_croma, slides.use_in_titan, slides.use_in_moozy):
        with pytest.raises(ValueError, match="model must .* got Linear"):
            use(nn.Linear(3, 5))
    titan = made(Titan)
    titan.pos_encode_type = "abs"  # pyright: ignore
    with pytest.raises(ValueError, match="pos_encode_type 'alibi', got Titan with 'abs'"):
        slides.use_in_titan(titan)
    for name in ("croma", "titan", "moozy"):
        kind, use, _ = CALLS[name]
        with pytest.raises(ValueError, match=rf"model has \w+ already: {kind.__name__} was changed before"):
            use(use(made(kind)))
    with pytest.raises(ValueError, match="dim must be a multiple of num_heads, got 10 and 3"):
        slides.CromaAttention(10, 3)


def test_arguments_of_another_kind_are_refused():
    tokens = torch.ones(1, 36, 24)
    with pytest.raises(TypeError, match=r"attn_bias must be tile_points\(width, height\), got Tensor"):
        slides.TitanAttention(24, 6)(tokens, torch.zeros(1, 6, 36, 36))
    # As numbers, the first two tiles: 0 and 1.
    with pytest.raises(TypeError, match=r"bg_mask must be bool, True = tissue, got torch.int64"):
        slides.tile_points(5, 7, torch.ones(1, 5, 7, dtype=torch.int64))
    with pytest.raises(TypeError, match="this attention takes x and positions, got 1 tensors"):
        slides.CromaAttention(24, 6)(tokens)
    with pytest.raises(TypeError, match="this attention takes x, context and positions, got 2 tensors"):
        slides.CromaAttention(24, 6, cross=True)(tokens, grid(6, 6))
