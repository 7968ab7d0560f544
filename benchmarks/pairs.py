# SPDX-License-Identifier: Apache-2.0
"""The ratio of two times that were taken in turns, with the interval that its spread allows. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import comb
from statistics import median


@dataclass(frozen=True)
class PairedRatio:
    """The median of base / new over pairs taken in turns: above 1, new is faster."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f}x ({self.low:.3f} to {self.high:.3f})"


def ratio_of_pairs(base: Sequence[float], new: Sequence[float]) -> PairedRatio:
    """Both of a pair met the same load, so their ratio keeps less of it than a ratio of two medians would.

    The interval is that of the sign test: whatever the distribution, it covers the true median with at least 95 %.
    Fewer than six pairs cannot promise that; theirs is the whole range.
    """
    ratios = sorted(before / after for before, after in zip(base, new, strict=True))
    count = len(ratios)
    # How often at most so many of `count` pairs fall on one side of the median: those values lie outside on that side.
    tails = accumulate(comb(count, few) for few in range(count))
    outside = max(0, sum(tail <= 0.025 * 2**count for tail in tails) - 1)
    return PairedRatio(median(ratios), ratios[outside], ratios[count - 1 - outside], count)
