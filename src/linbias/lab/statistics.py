# SPDX-License-Identifier: Apache-2.0
"""Means with the uncertainty that comes from the choice of text."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 2000
METHOD = (
    f"{LEVEL:.0%} percentile bootstrap over segments of the text: {RESAMPLES:,} resamples, always the same ones. It "
    "covers the choice of text; it does not cover the choice of seed, as each model was trained once."
)
_SEED = 20210827


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and its interval."""

    mean: float
    low: float | None
    """None if there is only one segment, which says nothing of the spread."""
    high: float | None

    def __str__(self) -> str:
        """Mean, and half the width of the interval, short enough for five columns in 80: 2.412 ±.034."""
        if self.low is None or self.high is None:
            return f"{self.mean:.3f}"
        half = f"{(self.high - self.low) / 2:.3f}"
        return f"{self.mean:.3f} ±{half.removeprefix('0')}"


def estimate(segments: NDArray[np.float64]) -> Estimate:
    """Return the mean of one value per segment, (K,), and its bootstrap interval."""
    count = len(segments)
    mean = float(segments.mean())
    if count == 1:
        return Estimate(mean=mean, low=None, high=None)
    # The same resamples for every scheme and length, so that intervals differ only where the losses do.
    draws = np.random.default_rng(_SEED).integers(0, count, size=(RESAMPLES, count))
    low, high = np.quantile(segments[draws].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean=mean, low=float(low), high=float(high))
