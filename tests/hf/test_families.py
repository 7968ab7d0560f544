# SPDX-License-Identifier: Apache-2.0
"""The registry: a model that linbias has never heard of, taught to it as docs/models/families.md does."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import linbias
from linbias.hf import Family, families, parity, register
from linbias.testing import largest_error


class Attention(nn.Module):
    """Symmetric ALiBi, as an encoder of one's own might have it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 36)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        query, key, value = self.mix(hidden).unflatten(2, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT * 0.5 + bias).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2)


class Encoder(nn.Module):
    """Builds the n x n bias that the layers add."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, hidden: Tensor) -> Tensor:
        places = torch.arange(hidden.shape[1])
        bias = linbias.alibi_bias(linbias.alibi_slopes(3), places, places)
        for layer in self.layers:
            hidden = hidden + layer(hidden, bias)
        return hidden


class PatchedAttention(Attention):
    """Needs no bias."""

    def forward(self, hidden: Tensor, bias: None) -> Tensor:
        query, key, value = self.mix(hidden).unflatten(2, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        out = linbias.alibi_attention(query, key, value, linbias.alibi_slopes(3), causal=False, scale=0.5)
        return out.transpose(1, 2).flatten(2)


class PatchedEncoder(Encoder):
    """Builds none."""

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden, None)
        return hidden


FAMILY = Family(
    name="mine",
    decoder=Encoder,
    layers=lambda encoder: encoder.layers,
    swaps={Encoder: PatchedEncoder, Attention: PatchedAttention},
    convention="symmetric",
    refusals=lambda encoder: ["it is in training"] if encoder.training else [],
    not_covered=lambda encoder: ["nothing much"],
)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with mock.patch.dict(families._REGISTERED):
        yield


def test_a_family_of_ones_own():
    model, hidden = nn.Sequential(Encoder(), nn.Linear(12, 2)).eval(), torch.randn(2, 9, 12)
    with pytest.raises(ValueError, match="nothing to patch in this Sequential"):
        linbias.patch(model)
    register(FAMILY)
    plain = model(hidden)
    with linbias.patch(model) as report:
        assert report.layers == 2
        assert report.decoders[0].name == "0" and report.decoders[0].family == "mine"
        assert report.not_covered == ("nothing much",)
        assert largest_error(model(hidden), plain.double()) < 1e-6
        assert type(copy.deepcopy(model)[0]) is PatchedEncoder
    assert type(model[0]) is Encoder and type(model[0].layers[1]) is Attention


def test_its_refusals_are_heard():
    register(FAMILY)
    with pytest.raises(ValueError, match="cannot patch the mine model '0': it is in training"):
        linbias.patch(nn.Sequential(Encoder()))


def test_a_swap_must_be_to_a_subclass():
    with pytest.raises(TypeError, match="must map a class to a subclass of it, got Attention -> Encoder"):
        register(dataclasses.replace(FAMILY, swaps={Encoder: PatchedEncoder, Attention: Encoder}))


def test_the_decoder_must_be_swapped():
    with pytest.raises(ValueError, match="swaps must contain the decoder Encoder"):
        register(dataclasses.replace(FAMILY, swaps={Attention: PatchedAttention}))


def test_an_example_of_ones_own_is_tried():
    def example() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        hidden = torch.randn(2, 9, 12)
        return Encoder().eval(), lambda model: model(hidden)

    right = dataclasses.replace(FAMILY, example=example)
    parity.check_parity(right)
    with mock.patch.object(Attention, "forward", lambda self, hidden, bias: hidden):
        with pytest.raises(NotImplementedError, match="cannot patch mine models.*hidden states differ by"):
            parity.check_parity(right)
