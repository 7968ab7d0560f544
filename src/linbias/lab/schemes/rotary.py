# SPDX-License-Identifier: Apache-2.0
"""RoPE, and the ways to stretch it once the weights are trained.

D head dim, F = D / 2 frequencies, L the training length, T that of the input, s = max(1, T / L). All of them leave RoPE
as it was trained where T <= L. Frequencies and attention factors are those of transformers' `modeling_rope_utils`.
"""

import math

import torch
from torch import Tensor

from .base import Positions, angles, rates

_BASE = 10_000.0


class Rotary(Positions):
    """Queries and keys turned by angles proportional to their position (RoPE, base 10,000, in halves); no parameters.

    Reference: Su et al., https://arxiv.org/abs/2104.09864.
    """

    def rates(self, frequencies: int, length: int) -> Tensor:
        """Return radians a token, (F,) fp64, for an input of `length` tokens."""
        return rates(frequencies, _BASE)

    def amplitude(self, length: int) -> float:
        """Return what the turned queries and the turned keys are multiplied by."""
        return 1.0

    def turned(self, x_BHTD: Tensor, positions_T: Tensor, length: int) -> Tensor:
        """Return queries or keys turned to their positions (a tensor on the CPU) in an input of `length` tokens."""
        turns = angles(positions_T, self.rates(x_BHTD.shape[-1] // 2, length))
        scale = self.amplitude(length)
        cos, sin = ((scale * wave).to(x_BHTD) for wave in (turns.cos(), turns.sin()))
        first, second = x_BHTD.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        """Return causal attention of the turned queries and keys."""
        length = query_BHTD.shape[-2]
        query, key = (self.turned(x, torch.arange(length), length) for x in (query_BHTD, key_BHTD))
        return super().attend(query, key, value_BHTD)


class _Stretched(Rotary):
    def __init__(self, trained: int) -> None:
        """`trained` is L."""
        super().__init__()
        self.trained = trained

    def factor(self, length: int) -> float:
        """Return s."""
        return max(1.0, length / self.trained)


class LinearRotary(_Stretched):
    """Position interpolation: every angle divided by s.

    Reference: Chen et al., https://arxiv.org/abs/2306.15595.
    """

    def rates(self, frequencies: int, length: int) -> Tensor:
        """Return the trained rates over s."""
        return super().rates(frequencies, length) / self.factor(length)


class NtkRotary(_Stretched):
    """NTK-aware scaling: base * s**(D / (D - 2)), so that the slowest angle is divided by s and the fastest by 1.

    Reference: bloc97, 2023, as given in Peng et al., https://arxiv.org/abs/2309.00071, section 3.1.
    """

    def rates(self, frequencies: int, length: int) -> Tensor:
        """Return the rates of the larger base."""
        if frequencies == 1:
            return rates(1)  # the only rate is 1, whatever the base
        stretch = self.stretch(length) ** (frequencies / (frequencies - 1))
        return rates(frequencies, _BASE * stretch)

    def stretch(self, length: int) -> float:
        """Return what stands for s."""
        return self.factor(length)


class DynamicRotary(NtkRotary):
    """Dynamic NTK: as NTK-aware, with 2 s - 1 for s. transformers' "dynamic" of factor 2.

    Reference: emozilla, 2023, as given in Peng et al., https://arxiv.org/abs/2309.00071, section 3.3.
    """

    def stretch(self, length: int) -> float:
        """Return 2 s - 1."""
        return 2.0 * self.factor(length) - 1.0


class YarnRotary(_Stretched):
    """YaRN: slow angles divided by s, fast ones as trained, a ramp between, and sharper scores.

    An angle that turns at most once within L is slow, one that turns 32 times or more is fast; the ramp runs over the
    whole indices of the frequencies between. Queries and keys are multiplied by 0.1 ln s + 1.

    Reference: Peng et al., https://arxiv.org/abs/2309.00071, sections 3.2 and 3.4.
    """

    def rates(self, frequencies: int, length: int) -> Tensor:
        """Return the mixture of the trained rates and of those over s."""
        trained = super().rates(frequencies, length)
        first, last = math.floor(self._index(frequencies, turns=32.0)), math.ceil(self._index(frequencies, turns=1.0))
        first, last = max(first, 0), min(last, 2 * frequencies - 1)
        places = torch.arange(frequencies, dtype=torch.float64, device="cpu")
        slow = ((places - first) / ((last - first) or 0.001)).clamp(0, 1)
        return trained * (slow / self.factor(length) + (1 - slow))

    def _index(self, frequencies: int, turns: float) -> float:
        """Index of the frequency that turns so often within L."""
        return frequencies * math.log(self.trained / (2 * math.pi * turns)) / math.log(_BASE)

    def amplitude(self, length: int) -> float:
        """Return 0.1 ln s + 1."""
        return 0.1 * math.log(self.factor(length)) + 1.0
