# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest
import torch

from linbias import alibi_slopes
from linbias.lab.evaluations.config import NumericsCommand
from linbias.lab.evaluations.numerics import numerics, numerics_json, numerics_text
from linbias.lab.heads import DTYPES


@pytest.mark.parametrize("content", [0.0, 3.7, -2.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [3, 8])
def test_every_share_is_a_count_of_numbers_of_the_type(heads, dtype, content):
    """Each weight made in fp64, cast, and compared; 299 tokens."""
    length, kind = 299, DTYPES[dtype]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = torch.where(distance > 0, content - alibi_slopes(heads).double()[:, None, None] * distance, 0.0)
    weights = scores.exp()
    rows = (weights * (distance >= 0)).sum(-1, keepdim=True)
    info = torch.finfo(kind)
    tests = [
        lambda w: w < info.smallest_normal,
        lambda w: w < info.smallest_normal * info.eps,
        lambda w: w.to(kind) == 0,
    ]
    found = numerics(NumericsCommand(heads=heads, length=length, dtype=dtype, content=content))
    for each, gone in zip(found, tests, strict=True):
        pairs = distance >= 0
        # A head whose own key alone is 1 has no smallest distance below 1 to be blind from.
        counted = [gone(weights)[:, pairs], gone(weights)[:, -1], gone(weights / rows)[:, pairs]]
        shares = [flags.double().mean(-1) for flags in counted]
        for share, mine in zip(shares, (each.pairs, each.last_row, each.normalised), strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), share, rtol=0, atol=1e-12)


def test_36_6_percent_is_the_share_of_the_last_row_and_not_of_all_pairs():
    """16 heads, 2,048 tokens, bfloat16: 28.5 % of all causal pairs, 36.6 % of the keys of the last query."""
    normal, smallest, zero = numerics(NumericsCommand(heads=16, length=2048, dtype="bfloat16"))
    assert [round(each.power) for each in (normal, smallest, zero)] == [-126, -133, -134]
    pairs, last, normalised = normal.means()
    assert (round(pairs, 3), round(last, 3), round(normalised, 3)) == (0.285, 0.366, 0.289)
    assert round(smallest.means()[0], 3) == 0.276
    assert round(zero.means()[0], 3) == 0.275


def test_blind_distances_are_where_the_type_ends():
    _, _, zero = numerics(NumericsCommand(heads=8, dtype="float16", length=64))
    for slope, blind in zip(alibi_slopes(8).double().tolist(), zero.blind_from, strict=True):
        assert torch.tensor(math.exp(-slope * blind), dtype=torch.float64).half() == 0
        assert torch.tensor(math.exp(-slope * (blind - 1)), dtype=torch.float64).half() > 0


def test_text_and_json_say_the_same():
    command = NumericsCommand(heads=5, length=100)
    found = numerics(command)
    plain = json.loads(numerics_json(command, found))
    assert plain["limits"][0]["means"]["pairs"] == found[0].means()[0]
    assert f"{found[0].means()[1]:.1%}" in numerics_text(command, found)
    assert plain["limits"][1]["blind_from"] == found[1].blind_from
