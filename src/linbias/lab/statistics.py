# SPDX-License-Identifier: Apache-2.0
"""Means with the uncertainty that comes from the choice of text, and apart from it from the choice of seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 2000
_OVER_TEXT = (
    f"{LEVEL:.0%} percentile bootstrap over segments of the text: {RESAMPLES:,} resamples, always the same ones. It "
    "covers the choice of text; "
)
METHOD = _OVER_TEXT + "it does not cover the choice of seed, as each model was trained once."
# Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
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


def method(seeds: int) -> str:
    """Return what intervals mean where each scheme was trained with so many seeds."""
    if seeds == 1:
        return METHOD
    return (
        f"{_OVER_TEXT}losses are means over {seeds} seeds. Intervals over seeds stand apart: Student's t on the "
        f"{seeds} means over the text, which cover the choice of seed and not that of text."
    )


def over_seeds(means: Sequence[float]) -> Estimate:
    """Return the mean of one value for each seed and its interval by Student's t, None for one seed."""
    count = len(means)
    mean = sum(means) / count
    if count == 1:
        return Estimate(mean=mean, low=None, high=None)
    spread = math.sqrt(sum((value - mean) ** 2 for value in means) / (count - 1) / count)
    half = _STUDENT[min(count - 1, len(_STUDENT)) - 1] * spread
    return Estimate(mean=mean, low=mean - half, high=mean + half)


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
