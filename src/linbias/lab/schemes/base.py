# SPDX-License-Identifier: Apache-2.0
"""What a positional scheme is, and the schemes that add something to the embeddings.

B batch, H heads, T tokens, C width, D head dim.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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

    def reset_parameters(self) -> None:
        """Draw what is not a matrix; matrices are drawn with those of the model."""


class Sinusoidal(Positions):
    """Sines and cosines added to the embeddings; no parameters.

    Vaswani et al. multiply embeddings of standard deviation C**-0.5 by sqrt(C) before adding sinusoids of amplitude 1.
    Embeddings are not multiplied here, so the sinusoids have amplitude C**-0.5 instead: the proportion is theirs.

    Reference: Vaswani et al., https://arxiv.org/abs/1706.03762, sections 3.4 and 3.5.
    """

    def embed(self, hidden_BTC: Tensor) -> Tensor:
        """Return the embeddings plus C**-0.5 * (sin, cos) of position over wavelengths from 2 pi to 20,000 pi."""
        length, width = hidden_BTC.shape[-2:]
        turns = angles(torch.arange(length), rates(width // 2)).to(hidden_BTC.device)
        waves_TC = torch.cat((turns.sin(), turns.cos()), dim=-1)
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


def rates(frequencies: int, base: float = 10_000.0) -> Tensor:
    """Return base**(-f / frequencies), (frequencies,) fp64, on the CPU: MPS has no fp64."""
    exponents = torch.arange(frequencies, dtype=torch.float64, device="cpu") / frequencies
    return torch.exp(-math.log(base) * exponents)


def angles(positions_T: Tensor, rates_F: Tensor) -> Tensor:
    """Return position * rate modulo a turn, (T, F) fp32, rounded once from fp64; on the CPU, as what it is given."""
    # At 65k tokens fp32 products would be off by 4e-3 radians.
    return torch.remainder(positions_T[:, None].double() * rates_F, 2 * math.pi).float()
