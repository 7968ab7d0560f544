# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from linbias import alibi_slopes
from linbias.lab.schemes.alibi import Alibi, InterpolatedAlibi, NtkAlibi

CPU = torch.device("cpu")
HEADS = [1, 2, 3, 8, 12, 20]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", [InterpolatedAlibi, NtkAlibi])
def test_up_to_the_training_length_slopes_are_those_of_training(kind, heads):
    for length in (1, 40, 48):
        assert torch.equal(kind(heads, trained=48).slopes_at(length, CPU), alibi_slopes(heads))


@pytest.mark.parametrize("heads", HEADS)
def test_interpolated_slopes_keep_the_largest_bias(heads):
    found = InterpolatedAlibi(heads, trained=48).slopes_at(336, CPU)
    torch.testing.assert_close(found * 336, alibi_slopes(heads) * 48)


@pytest.mark.parametrize("heads", HEADS)
def test_ntk_scaling_moves_the_flattest_most_and_the_steepest_not_at_all(heads):
    slopes, found = alibi_slopes(heads), NtkAlibi(heads, trained=48).slopes_at(336, CPU)
    ratio, order = slopes / found, slopes.argsort(descending=True)
    torch.testing.assert_close(ratio[slopes == slopes.min()], torch.full((1,), 7.0))
    assert heads == 1 or (ratio[slopes == slopes.max()] == 1).all()
    assert (ratio[order].diff() > 0).all()


def test_ntk_scaling_of_a_geometric_sequence_is_a_power_of_the_head():
    """7 ** (head / (heads - 1)), as NTK-ALiBi has it for slopes in geometric sequence."""
    ratio = alibi_slopes(8) / NtkAlibi(8, trained=48).slopes_at(336, CPU)
    torch.testing.assert_close(ratio, 7.0 ** (torch.arange(8) / 7))


def test_half_the_heads_have_no_bias():
    query, key, value = torch.randn(3, 2, 5, 9, 4).unbind()
    half, none, full = (Alibi(5, biased_heads=n).attend(query, key, value) for n in (3, 0, None))
    torch.testing.assert_close(half[:, 3:], none[:, 3:])
    torch.testing.assert_close(half[:, :3], Alibi(3).attend(query[:, :3], key[:, :3], value[:, :3]))
    assert (half - full).abs().max() > 1e-2


def test_learned_slopes_start_at_the_fixed_ones_and_learn():
    query, key, value = torch.randn(3, 2, 3, 9, 4).unbind()
    learned = Alibi(3, learned=True)
    out = learned.attend(query, key, value)
    torch.testing.assert_close(out, Alibi(3).attend(query, key, value))
    out.square().sum().backward()
    (parameter,) = learned.parameters()
    assert (parameter.grad != 0).all()
    with torch.no_grad():
        parameter -= 200.0
    assert (learned.slopes_at(9, CPU) >= 0).all()
