# SPDX-License-Identifier: Apache-2.0
"""Biases that are learned curves of the distance: T5's buckets and KERPLE's logarithm.

Neither is linear in the distance, so they run through torch's attention with a bias matrix, a block of queries at a
time: B x H x block x S numbers are held, never T x S. D here: distances 0 .. D - 1.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .base import Positions

BLOCK = 64
"""Queries at a time."""


class RelativeBias(Positions):
    """Base of schemes that add a number to a score by head and distance."""

    def curve(self, distances: int, device: torch.device) -> Tensor:
        """Return what is added to the scores of each head at distances 0, 1, ..., (H, D)."""
        raise NotImplementedError(f"{type(self).__name__} must say what it adds at each distance")

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        """Return causal attention with the curve added to the scores."""
        length = query_BHTD.shape[-2]
        curve_HD = self.curve(length + 1, query_BHTD.device).to(query_BHTD.dtype)
        outputs = [_block(start, query_BHTD, key_BHTD, value_BHTD, curve_HD) for start in range(0, length, BLOCK)]
        return torch.cat(outputs, dim=-2) if outputs else torch.zeros_like(value_BHTD)


def _block(start: int, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, curve_HD: Tensor) -> Tensor:
    """Attention of one block of queries to the keys up to its end."""
    stop = min(start + BLOCK, query_BHTD.shape[-2])
    given = (query_BHTD[..., start:stop, :], key_BHTD[..., :stop, :], value_BHTD[..., :stop, :], curve_HD)

    def run(query: Tensor, key: Tensor, value: Tensor, curve: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=_bias(curve, start, stop))

    if not torch.is_grad_enabled():
        return run(*given)
    # The weights of a block are computed again in backward: kept, those of all blocks would be T x S.
    again = cast("Callable[..., Tensor]", checkpoint)
    return again(run, *given, use_reentrant=False, preserve_rng_state=False)


def _bias(curve_HD: Tensor, start: int, stop: int) -> Tensor:
    """The bias of queries start .. stop - 1 on keys 0 .. stop - 1, (H, T, S); -inf for keys that come later."""
    rows, width = stop - start, stop + (stop - start)
    # Every row is the one above moved on by one key. A table whose rows are one longer than those wanted does that
    # when it is read as one line, and its gradient is a sum of rows, where that of an index would be a scatter.
    offset = torch.arange(width, device=curve_HD.device)
    distance = start - torch.where(offset < stop, offset, offset - width)
    line = torch.where(distance >= 0, curve_HD[:, distance.clamp(min=0)], -math.inf)
    table = line.unsqueeze(1).expand(-1, rows, -1).flatten(1)[:, : rows * (width - 1)]
    return table.unflatten(1, (rows, width - 1))[..., :stop]


class T5Bias(RelativeBias):
    """A trained number for each head and bucket of distances, common to all layers.

    32 buckets: one for each distance up to 15, then 16 that grow in geometric proportion up to 128, the last for all
    that is farther. They start as normal numbers of variance 1 / width, as in T5.

    Reference: Raffel et al., https://arxiv.org/abs/1910.10683, section 2.1.
    """

    buckets, farthest = 32, 128

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(self.buckets, heads))

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance, int64."""
        exact = self.buckets // 2
        octaves = (distance.double().clamp(min=exact) / exact).log() / math.log(self.farthest / exact)
        far = exact + (octaves * (self.buckets - exact)).long()
        return torch.where(distance < exact, distance, far.clamp(max=self.buckets - 1))

    def curve(self, distances: int, device: torch.device) -> Tensor:
        """Return the number of each distance's bucket."""
        buckets = self.bucket(torch.arange(distances, device="cpu")).to(device)
        chosen = F.one_hot(buckets, self.buckets).to(self.table.dtype)
        return (chosen @ self.table).T


class Kerple(RelativeBias):
    """-r * log(1 + a * distance), r and a learned for each head and kept above 0, common to all layers (KERPLE-log).

    `reset_parameters` draws them uniform, r below 2 and a below 1, as the authors' do; 0.01 is the least.

    Reference: Chi et al., https://arxiv.org/abs/2205.09921, section 4.
    """

    _least = 0.01

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_r = nn.Parameter(torch.zeros(heads))
        self.log_a = nn.Parameter(torch.zeros(heads))

    def reset_parameters(self) -> None:
        """Draw r and a."""
        with torch.no_grad():
            for parameter, most in ((self.log_r, 2.0), (self.log_a, 1.0)):
                parameter.uniform_(self._least, most).log_()

    def curve(self, distances: int, device: torch.device) -> Tensor:
        """Return the bias of each distance."""
        distance = torch.arange(distances, device=device, dtype=self.log_a.dtype)
        grown = torch.log1p(self.log_a.exp()[:, None] * distance)
        return -self.log_r.exp()[:, None] * grown
