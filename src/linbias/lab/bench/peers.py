# SPDX-License-Identifier: Apache-2.0
"""Who is timed: linbias's backends and the other ways to compute the same with torch. All are causal.

What depends on length and slopes alone (a dense mask, a compiled kernel) is made before, and making it is not timed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ...attention import alibi_attention
from ...semantics.blocks import alibi_bias
from .inputs import Content

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
BASELINE = "SDPA, no bias"
_DENSE_LIMIT = 4096
"""Longest input for what holds N x N numbers a head."""


@dataclass(frozen=True)
class Contender:
    """One implementation; `make` prepares it for inputs of one length."""

    name: str
    make: Callable[[Content], Attend]
    longest: int
    """Beyond this length it is left out, because it would take minutes or more memory than machines have."""
    backward: bool = True

    @staticmethod
    def of_linbias(backend: str) -> "Contender":
        """The library's backend of that name."""
        return Contender(f"linbias {backend}", lambda content: _linbias(backend, content), _LONGEST[backend])


_LONGEST = {"native": 2**20, "tiled": 2**14, "reference": _DENSE_LIMIT}


def _linbias(backend: str, content: Content) -> Attend:
    return lambda query, key, value: alibi_attention(query, key, value, content.slopes, causal=True, backend=backend)


def _plain(content: Content) -> Attend:
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, is_causal=True)


def _dense_bias(content: Content) -> Tensor:
    """(1, H, N, N): ALiBi with the causal mask folded in."""
    places = torch.arange(content.length)
    return alibi_bias(content.slopes, places, places).masked_fill(places[:, None] < places, -torch.inf)


def _dense_mask(content: Content) -> Attend:
    bias = _dense_bias(content)
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=bias)


def _eager(content: Content) -> Attend:
    """The formula as most models write it."""
    bias = _dense_bias(content)
    return lambda query, key, value: torch.softmax(query @ key.mT / query.shape[-1] ** 0.5 + bias, -1) @ value


def _extra_channel(content: Content) -> Attend:
    """The bias as one more channel of query and key: fast, but far positions lose the digits of their scores."""
    places = torch.arange(content.length, dtype=torch.float32)
    ramp = content.slopes[:, None, None] * places[:, None] * content.query.shape[-1] ** 0.5

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        wide_query = pad(query, (0, 1), value=1.0)
        wide_key = torch.cat([key, ramp.expand(*key.shape[:3], 1)], -1)
        scale = query.shape[-1] ** -0.5
        out = scaled_dot_product_attention(wide_query, wide_key, pad(value, (0, 1)), is_causal=True, scale=scale)
        return out[..., :-1]

    return attend


def _flex(content: Content) -> Attend:
    """Compiled FlexAttention with a causal block mask and ALiBi as its score_mod."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes, length = content.slopes, content.length

    def score_mod(score: Tensor, _b: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return score - slopes[head] * (row - column)

    mask = create_block_mask(lambda _b, _h, row, column: row >= column, 1, 1, length, length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, score_mod=score_mod, block_mask=mask)  # pyright: ignore


PLAIN = Contender(BASELINE, _plain, 2**14)
"""Causal attention without any bias: what every ratio is taken to."""
PEERS = (
    Contender("SDPA, dense ALiBi mask", _dense_mask, _DENSE_LIMIT),
    Contender("FlexAttention, compiled", _flex, 2**13, backward=False),
    Contender("eager formula", _eager, _DENSE_LIMIT),
    Contender("bias as extra channel", _extra_channel, 2**14),
)
