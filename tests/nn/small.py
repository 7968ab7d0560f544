# SPDX-License-Identifier: Apache-2.0
"""Modules and inputs that the tests of `linbias.nn` share."""

from typing import Any

import torch
from torch import Tensor

from linbias import alibi_slopes
from linbias.nn import MultiheadAttention

BATCH, TOKENS, WIDTH, HEADS = 3, 7, 12, 4


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (BATCH, TOKENS, WIDTH)))


def padding(lengths: tuple[int, ...] = (7, 5, 2), tokens: int = TOKENS) -> Tensor:
    """torch's form: True = hidden."""
    return torch.arange(tokens) >= torch.tensor(lengths)[:, None]


def attention(**options: Any) -> MultiheadAttention:
    """Projections that are not torch's initial ones, whose biases are 0."""
    module = MultiheadAttention(WIDTH, HEADS, **({"batch_first": True} | options))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return module


def by_hand(module: MultiheadAttention, tokens: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Self-attention of (B, T, E), written out in float64; `hidden` broadcasts to (B, H, T, S)."""
    weight, bias = module.in_proj_weight.double(), module.in_proj_bias.double()
    query, key, value = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (tokens.double() @ weight.T + bias).chunk(3, -1)
    )
    place = torch.arange(tokens.shape[1])
    scores = query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5
    scores = scores - alibi_slopes(HEADS).double()[:, None, None] * (place[:, None] - place).abs()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    joined = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    return joined @ module.out_proj.weight.double().T + module.out_proj.bias.double()


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to a few roundings of float32 sums of some dozens of terms of order 1."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)
