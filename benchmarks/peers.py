# SPDX-License-Identifier: Apache-2.0
"""The other ways to compute causal ALiBi attention with torch.

What depends on length and slopes alone (a dense mask, a compiled kernel) is made before, and making it is not timed.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from linbias import alibi_bias
from linbias.lab.bench.race import Attend, Contender, Content

DENSE_LIMIT = 4096
"""Longest input for what holds N x N numbers a head."""


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
    return lambda query, key, value: compiled(query, key, value, score_mod=score_mod, block_mask=mask)


PEERS = (
    Contender("SDPA, dense ALiBi mask", _dense_mask, DENSE_LIMIT),
    Contender("FlexAttention, compiled", _flex, 2**13, backward=False),
    Contender("eager formula", _eager, DENSE_LIMIT),
    Contender("bias as extra channel", _extra_channel, 2**14),
)
