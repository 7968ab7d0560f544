# SPDX-License-Identifier: Apache-2.0
"""The count of tiles: no ledger visits fewer than the fewest, and all are visited where nothing may be skipped."""

from dataclasses import replace

import pytest
import torch

from benchmarks.tiles import shares
from linbias.lab.bench.race import normal


@pytest.mark.parametrize("causal", [True, False])
def test_a_ledger_lies_between_the_fewest_tiles_and_all(causal: bool):
    content = normal(705)  # eleven tiles and a row
    ours, exact, fewest = shares(content, causal)
    assert 0.2 < fewest <= exact <= ours < 1


@pytest.mark.parametrize("causal", [True, False])
def test_all_are_visited_without_slopes_and_own_tiles_alone_with_steep_ones(causal: bool):
    content = normal(449)
    flat = replace(content, slopes=torch.zeros(12))
    assert shares(flat, causal) == (1.0, 1.0, 1.0)
    # At a slope of 100 the next token weighs nothing, and a tile of one key, the last, keeps its row.
    steep = replace(content, slopes=torch.full((12,), 100.0))
    own = 8 / 36 if causal else 8 / 64
    assert shares(steep, causal)[2] == pytest.approx(own, rel=1e-12)
