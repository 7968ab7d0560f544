# SPDX-License-Identifier: Apache-2.0
"""ALiBi, with fixed or learned slopes, and what can be changed in it once the weights are trained."""

import torch
from torch import Tensor

import linbias

from .base import Positions


class Alibi(Positions):
    """Linear biases on the attention scores, computed by linbias.

    Fixed slopes have no parameters. Learned ones start at the fixed ones, stay above 0 and are common to all layers.

    Reference: Press et al., https://arxiv.org/abs/2108.12409.
    """

    def __init__(
        self, heads: int, window: int | None = None, *, biased_heads: int | None = None, learned: bool = False
    ) -> None:
        """`window` keys are visible to a query, its own included; None for all. `biased_heads`: the rest have none."""
        super().__init__()
        self.slopes = linbias.nn.Slopes(heads, biased_heads=biased_heads, learned=learned)
        self.window = None if window is None else (window - 1, 0)
        self.tolerance: float | None = None
        """As `linbias.alibi_attention` has it; 0 where every weight is to be seen, however small."""

    def slopes_at(self, length: int, device: torch.device) -> Tensor:
        """Return the slopes for inputs of `length`, (H,)."""
        return self.slopes(device)

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        """Return causal attention with the bias -slope * distance on each score."""
        slopes = self.slopes_at(query_BHTD.shape[-2], query_BHTD.device)
        return linbias.alibi_attention(
            query_BHTD, key_BHTD, value_BHTD, slopes, causal=True, window=self.window, tolerance=self.tolerance
        )


class InterpolatedAlibi(Alibi):
    """Beyond the training length L, slopes times L / T: the largest bias is that of training.

    Reference: Al-Khateeb et al., https://arxiv.org/abs/2310.13017.
    """

    def __init__(self, heads: int, trained: int) -> None:
        """`trained` is L."""
        super().__init__(heads)
        self.trained = trained

    def slopes_at(self, length: int, device: torch.device) -> Tensor:
        """Return the slopes times min(1, L / length)."""
        return self.slopes(device) / max(1.0, length / self.trained)


class NtkAlibi(InterpolatedAlibi):
    """Beyond the training length L, the flattest slope times L / T, the steepest as it is, the rest between.

    A slope's place between the two is that of its logarithm, so that any number of heads and any order will do; with
    slopes in geometric sequence it is head / (heads - 1), NTK-ALiBi's. One head alone is the flattest.

    Reference: K. Zhang, "NTK-ALiBi", 2023, https://github.com/keezen/ntk_alibi.
    """

    def slopes_at(self, length: int, device: torch.device) -> Tensor:
        """Return slope * min(1, L / length) ** place, place from 0 for the steepest to 1 for the flattest."""
        slopes = self.slopes(device)
        exponents = slopes.double().log2().cpu()
        steepest, flattest = exponents.max(), exponents.min()
        one = steepest == flattest
        place = torch.ones_like(exponents) if one else (steepest - exponents) / (steepest - flattest)
        factor = max(1.0, length / self.trained)
        return slopes / (factor**place).float().to(device)
