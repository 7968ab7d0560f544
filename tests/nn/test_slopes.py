# SPDX-License-Identifier: Apache-2.0
"""`nn.Slopes`: a rule that nothing rounds."""

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from linbias import alibi_attention, alibi_slopes
from linbias.nn import Slopes, weight_decay_groups
from tests.nn.small import close, inputs


def test_the_rule_is_the_functions():
    for options in ({}, {"rule": "geometric"}, {"max_bias": 16.0}, {"biased_heads": 5}):
        assert torch.equal(Slopes(12, **options)("cpu"), alibi_slopes(12, **options, device="cpu"))


@pytest.mark.parametrize("options", [{"rule": "none"}, {"max_bias": 0.0}, {"biased_heads": 9}, {"rank": 2, "world": 2}])
def test_what_makes_no_sense_fails_at_construction(options: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(options))):
        Slopes(8, **options)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="num_heads must divide among world=5"):
        Slopes(12, world=5)


def test_fixed_slopes_are_no_parameters_and_no_state():
    slopes = Slopes(8)
    assert not list(slopes.parameters()) and not list(slopes.buffers()) and not slopes.state_dict()


def test_learned_slopes_start_at_the_rule_and_stay_positive():
    slopes = Slopes(8, learned=True)
    assert torch.equal(slopes(), alibi_slopes(8))  # powers of two survive the logarithm
    assert slopes.log2_slopes is not None
    for _ in range(50):
        (gradient,) = torch.autograd.grad(slopes().sum(), slopes.log2_slopes)
        with torch.no_grad():
            slopes.log2_slopes.sub_(gradient)
    assert slopes().min() > 0 and slopes().max() < 0.1


def test_learned_slopes_of_any_count_start_within_rounding():
    torch.testing.assert_close(Slopes(12, learned=True)(), alibi_slopes(12), rtol=8 * 2**-23, atol=0.0)


def test_a_head_without_a_bias_is_not_learned():
    slopes = Slopes(4, biased_heads=2, learned=True)
    assert slopes().tolist() == [2**-4, 2**-8, 0.0, 0.0]
    assert [tuple(parameter.shape) for parameter in slopes.parameters()] == [(2,)]
    slopes().sum().backward()
    assert slopes.log2_slopes is not None and slopes.log2_slopes.grad is not None
    assert slopes.log2_slopes.grad.isfinite().all()


def test_the_configuration_makes_the_round_trip():
    slopes = Slopes(32, max_bias=16.0, biased_heads=24, rank=1, world=2)
    again = Slopes(**json.loads(json.dumps(slopes.config)))
    assert torch.equal(slopes(), again()) and again.config["max_bias"] == 16.0
    assert torch.equal(eval(repr(slopes), {"Slopes": Slopes})(), slopes())
    first = Slopes(32, max_bias=16.0)()
    assert first[0].item() == pytest.approx(0.70710678) and first[-1].item() == 2**-16
    assert Slopes(32).config["max_bias"] == 8.0


def test_some_heads_have_no_bias():
    assert Slopes(6, biased_heads=4)().tolist() == [*alibi_slopes(4).tolist(), 0.0, 0.0]
    assert not Slopes(6, biased_heads=0).uses_alibi and Slopes(6).uses_alibi


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("heads", "world"), [(8, 2), (12, 2), (40, 4), (6, 1), (6, 6)])
def test_ranks_tile_the_global_slopes(heads: int, world: int, learned: bool):
    for biased in (None, heads // 2 + 1):
        ranks = [Slopes(heads, biased_heads=biased, learned=learned, rank=rank, world=world) for rank in range(world)]
        whole = Slopes(heads, biased_heads=biased, learned=learned)
        assert torch.equal(torch.cat([part() for part in ranks]), whole())


def test_known_slices():
    assert Slopes(8, rank=1, world=2)().tolist() == [1 / 32, 1 / 64, 1 / 128, 1 / 256]
    expected = [0.0078125, 0.00390625, 0.70710678, 0.35355339, 0.17677670, 0.08838835]
    assert Slopes(12, rank=1, world=2)().tolist() == pytest.approx(expected)
    assert Slopes(40, rank=1, world=2)()[0].item() == pytest.approx(0.02627801)


def test_ranks_together_are_the_single_rank():
    query, key, value = (inputs(2, 8, 5, 4) for _ in range(3))
    whole = alibi_attention(query, key, value, Slopes(8)(), causal=True)
    parts = [
        alibi_attention(*(x[:, 4 * rank : 4 * rank + 4] for x in (query, key, value)), slopes(), causal=True)
        for rank, slopes in enumerate(Slopes(8, rank=rank, world=2) for rank in range(2))
    ]
    close(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("learned", [False, True])
def test_nothing_rounds_the_slopes(learned: bool):
    slopes, exact = Slopes(32, learned=learned), Slopes(32, learned=learned)()
    for change in (
        lambda module: module.half(),
        lambda module: module.bfloat16(),
        lambda module: module.to(torch.bfloat16),
        lambda module: module.to("cpu", torch.float16),
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: nn.Sequential(module).bfloat16()[0],
    ):
        slopes = change(slopes)
        assert slopes().dtype == torch.float32 and torch.equal(slopes(), exact)


def test_learned_slopes_keep_their_gradient_in_float32():
    slopes = Slopes(3, learned=True)
    slopes().sum().backward()
    parameter = slopes.half().log2_slopes
    assert parameter is not None and parameter.grad is not None
    assert parameter.dtype == parameter.grad.dtype == torch.float32
    assert slopes.double()().dtype == torch.float64


def test_learned_slopes_in_half_precision_are_refused():
    slopes = Slopes(8, learned=True)
    half = {name: tensor.bfloat16() for name, tensor in slopes.state_dict().items()}
    slopes.load_state_dict(half)  # copies into float32
    assert slopes().dtype == torch.float32
    slopes.load_state_dict(half, assign=True)
    with pytest.raises(TypeError, match="log2_slopes must be float32 or float64, got torch.bfloat16"):
        slopes()


@pytest.mark.parametrize("learned", [False, True])
def test_meta_initialisation(learned: bool):
    with torch.device("meta"):
        slopes = nn.Sequential(Slopes(12, learned=learned))
    slopes.to_empty(device="cpu")
    for part in slopes:
        part.reset_parameters()
    assert torch.equal(slopes[0]("cpu"), Slopes(12, learned=learned)("cpu"))


def test_learned_slopes_survive_a_checkpoint():
    slopes = Slopes(5, learned=True)
    with torch.no_grad():
        slopes.log2_slopes.add_(torch.randn(5))
    again = Slopes(5, learned=True)
    assert again.load_state_dict(slopes.state_dict()).missing_keys == []
    assert torch.equal(again(), slopes()) and not torch.equal(again(), alibi_slopes(5))


def test_autocast_leaves_slopes_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Slopes(32)(), alibi_slopes(32))
        learned = Slopes(32, learned=True)()
    assert torch.equal(learned, Slopes(32, learned=True)())


def test_the_device_is_the_one_asked_for():
    slopes = Slopes(4)
    assert slopes("meta").device.type == "meta" and slopes("cpu").device.type == "cpu"
    with torch.device("meta"):
        assert slopes().device.type == "meta"
    assert slopes().device.type == "cpu"
    with pytest.raises(ValueError, match="device must be the learned slopes' cpu, got meta"):
        Slopes(4, learned=True)("meta")


def test_changing_what_came_out_changes_nobody_elses():
    slopes = Slopes(4)
    slopes().mul_(0.0)
    assert torch.equal(slopes(), alibi_slopes(4))


def test_what_was_made_under_inference_mode_can_be_differentiated_through():
    slopes = Slopes(4)
    with torch.inference_mode():
        slopes()
    factor = torch.ones(4, requires_grad=True)
    (slopes() * factor).sum().backward()
    assert torch.equal(factor.grad, alibi_slopes(4))


def test_weight_decay_leaves_learned_slopes_alone():
    shared = Slopes(3, learned=True)
    model = nn.ModuleList([nn.Linear(2, 3), nn.ModuleList([shared]), shared, Slopes(5)])
    decayed, free = weight_decay_groups(model, 0.5)
    assert [id(x) for x in free["params"]] == [id(shared.log2_slopes)] and free["weight_decay"] == 0.0
    assert {id(x) for x in decayed["params"]} == {id(x) for x in model[0].parameters()}
    optimizer = torch.optim.AdamW([decayed, free], lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(shared(), Slopes(3, learned=True)()) and not torch.equal(model[0].weight, before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_heads": "a"}, "num_heads must be an int >= 0, got 'a'"),
        ({"num_heads": None}, "num_heads must be an int >= 0, got None"),
        ({"num_heads": 4, "max_bias": "a"}, "max_bias must be a Python number, got str"),
    ],
)
def test_what_is_no_number_is_named(arguments: dict[str, Any], words: str):
    with pytest.raises((TypeError, ValueError), match=words):
        Slopes(**arguments)
