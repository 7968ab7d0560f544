# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from linbias.lab.statistics import estimate


def test_interval_of_many_normal_values_is_the_textbook_one():
    values = np.random.default_rng(3).normal(2.0, 0.5, size=400)
    found = estimate(values)
    half = 1.96 * values.std(ddof=1) / 400**0.5
    assert found.mean == values.mean()
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(5)
    intervals = [estimate(generator.normal(0.0, 1.0, size=64)) for _ in range(300)]
    covered = sum(found.low <= 0.0 <= found.high for found in intervals)
    # 285 expected with a standard deviation of 3.8; the percentile bootstrap falls short by a percent or two.
    assert 265 <= covered <= 298


def test_equal_segments_have_no_spread_and_one_segment_no_interval():
    flat = estimate(np.full(7, 2.5))
    assert (flat.mean, flat.low, flat.high) == (2.5, 2.5, 2.5)
    single = estimate(np.array([2.5]))
    assert (single.mean, single.low, single.high) == (2.5, None, None)
    assert (str(flat), str(single)) == ("2.500 ±.000", "2.500")


def test_the_same_segments_give_the_same_interval():
    values = np.random.default_rng(3).normal(size=20)
    assert estimate(values) == estimate(values.copy())
