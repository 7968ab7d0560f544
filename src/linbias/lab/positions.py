# SPDX-License-Identifier: Apache-2.0
"""Positional schemes: the one choice in which the models of a comparison differ.

A scheme may change the embeddings (`embed`), the attention (`attend`), or nothing at all.
B batch, H heads, T tokens, C width, D head dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import alibi_attention, alibi_slopes
from .config import ModelConfig


class Positions(nn.Module):
    """No positions at all (NoPE): order is known only through the causal mask. Base of the other schemes."""

    longest: int | None = None
    """Longest input the scheme can take, None if it has no limit of its own."""

    def embed(self, hidden_BTC: Tensor) -> Tensor:
        """Return the embeddings (B, T, C) as the first block receives them."""
        return hidden_BTC

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        """Return causal attention (B, H, T, D)."""
        return F.scaled_dot_product_attention(query_BHTD, key_BHTD, value_BHTD, is_causal=True)


class Alibi(Positions):
    """Linear biases on the attention scores, computed by linbias; no parameters.

    Reference: Press et al., https://arxiv.org/abs/2108.12409.
    """

    def __init__(self, heads: int, window: int | None = None) -> None:
        """`window` keys are visible to a query, its own included; None for all."""
        super().__init__()
        self.heads = heads
        self.window = None if window is None else (window - 1, 0)

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        """Return causal attention with the bias -slope * distance on each score."""
        slopes = alibi_slopes(self.heads, device=query_BHTD.device)
        return alibi_attention(query_BHTD, key_BHTD, value_BHTD, slopes, causal=True, window=self.window)


class Sinusoidal(Positions):
    """Sines and cosines added to the embeddings; no parameters.

    Vaswani et al. multiply embeddings of standard deviation C**-0.5 by sqrt(C) before adding sinusoids of amplitude 1.
    Embeddings are not multiplied here, so the sinusoids have amplitude C**-0.5 instead: the proportion is theirs.

    Reference: Vaswani et al., https://arxiv.org/abs/1706.03762, sections 3.4 and 3.5.
    """

    def embed(self, hidden_BTC: Tensor) -> Tensor:
        """Return the embeddings plus C**-0.5 * (sin, cos) of position over wavelengths from 2 pi to 20,000 pi."""
        length, width = hidden_BTC.shape[-2:]
        angles = _angles(length, width // 2, hidden_BTC.device)
        waves_TC = torch.cat((angles.sin(), angles.cos()), dim=-1)
        return hidden_BTC + width**-0.5 * waves_TC.to(hidden_BTC.dtype)


class Learned(Positions):
    """One trained vector for each position of the training length, added to the embeddings; there is none beyond it.

    Reference: Gehring et al., https://arxiv.org/abs/1705.03122, section 3.1.
    """

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.longest = length
        self.table = nn.Parameter(torch.zeros(length, width))

    def embed(self, hidden_BTC: Tensor) -> Tensor:
        """Return the embeddings plus the table's first T rows.

        Raises: ValueError if T exceeds the table.
        """
        length = hidden_BTC.shape[-2]
        if length > len(self.table):
            raise ValueError(
                f"input must be at most {len(self.table)} tokens, the length of the learned table, got {length}; "
                "a learned scheme runs only at lengths it was trained on"
            )
        return hidden_BTC + self.table[:length]


class Rotary(Positions):
    """Queries and keys turned by angles proportional to their position (RoPE, base 10,000, in halves); no parameters.

    Reference: Su et al., https://arxiv.org/abs/2104.09864.
    """

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        """Return causal attention of the turned queries and keys."""
        length, head_dim = query_BHTD.shape[-2:]
        angles = _angles(length, head_dim // 2, query_BHTD.device)
        cos, sin = angles.cos().to(query_BHTD.dtype), angles.sin().to(query_BHTD.dtype)
        return super().attend(_turn(query_BHTD, cos, sin), _turn(key_BHTD, cos, sin), value_BHTD)


def _angles(length: int, frequencies: int, device: torch.device) -> Tensor:
    """Return position * 10,000**(-f / frequencies), (length, frequencies), rounded once from fp64."""
    # MPS has no fp64, so the angles are made on the CPU; at 65k tokens fp32 products would be off by 4e-3 radians.
    exponents = torch.arange(frequencies, dtype=torch.float64, device="cpu") / frequencies
    rates = torch.exp(-math.log(10_000.0) * exponents)
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * rates
    return torch.remainder(angles, 2 * math.pi).float().to(device)


def _turn(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way to give positions to a trained model, by name."""

    name: str
    label: str
    """What tables and plots call it."""
    build: Callable[[ModelConfig, int], Positions]
    """From the model's shape and the training length."""
    trained_as: str | None = None
    """Set for schemes that only evaluate: the scheme whose trained weights they run with."""


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="alibi", label="ALiBi", build=lambda model, length: Alibi(model.heads)),
        Scheme(name="sinusoidal", label="sinusoidal", build=lambda model, length: Sinusoidal()),
        Scheme(name="learned", label="learned", build=lambda model, length: Learned(model.width, length)),
        Scheme(name="rope", label="RoPE", build=lambda model, length: Rotary()),
        Scheme(name="none", label="no positions", build=lambda model, length: Positions()),
        Scheme(
            name="alibi-window",
            label="ALiBi, training window",
            build=lambda model, length: Alibi(model.heads, window=length),
            trained_as="alibi",
        ),
    )
}
"""Every scheme by name. `alibi-window` shows a trained ALiBi as many bytes as it saw in training, and no more."""


def why_not(scheme: str, model: ModelConfig, trained: int, length: int) -> str | None:
    """Return why `scheme` cannot run at `length` in a model trained at `trained` tokens, None if it can."""
    longest = SCHEMES[scheme].build(model, trained).longest
    if longest is None or length <= longest:
        return None
    return f"its table ends at the training length, {longest:,}"
