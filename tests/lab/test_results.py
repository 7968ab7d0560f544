# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest
import torch

from linbias.lab.results import make_cells, segment_bits


def test_segments_are_equal_parts_in_order():
    nats = torch.tensor([1.0, 3.0, 5.0, 7.0, 0.0, 0.0]) * math.log(2)
    assert segment_bits(nats, 3).tolist() == pytest.approx([2.0, 6.0, 0.0])


def test_a_change_is_judged_segment_by_segment():
    """Segments differ widely, the change does not: its interval must be as narrow as the change is even."""
    nats = torch.rand(64, generator=torch.Generator().manual_seed(3)).repeat_interleave(8) * 5
    short, long = make_cells({8: nats, 64: nats + 0.25 * math.log(2)}, segments=8, stride=None)
    assert short.change is None
    assert long.change.mean == pytest.approx(0.25)
    assert long.change.high - long.change.low < 1e-6
    assert long.bits.high - long.bits.low > 0.1
    assert long.perplexity == pytest.approx(2**long.bits.mean)
    assert (short.mean_context, long.mean_context) == (3.5, 31.5)


def test_a_refusal_is_a_cell_too():
    cells = make_cells({16: "its table ends", 8: torch.ones(32)}, segments=2, stride=None)
    assert [(cell.length, cell.why_not) for cell in cells] == [(8, None), (16, "its table ends")]
    assert (cells[1].bits, cells[1].perplexity, cells[1].change) == (None, None, None)


def test_a_loss_that_is_no_number_is_a_cell_without_figures_and_one_beyond_floats_has_no_perplexity():
    nats = torch.ones(32)
    cells = make_cells({8: nats, 16: nats * torch.nan, 32: nats * 1e4}, segments=1, stride=None)
    assert [cell.why_not for cell in cells] == [None, "its loss there is no finite number", None]
    assert cells[2].bits.mean == pytest.approx(1e4 / math.log(2))
    assert cells[2].perplexity is None
    assert cells[2].change.mean > 1e4


def test_each_place_is_taken_from_the_shortest_windows_that_have_it(results):
    curve = results.row("rope").by_place()
    assert [bin["first"] for bin in curve] == [0, 1, 2, 3, 4, 6, 8, 12, 16, 23, 32, 46]
    assert [bin["bytes"] for bin in curve[:3]] == [16, 16, 16]
    assert curve[-1]["bytes"] == 4 * 18
    (limited,) = results.row("alibi-window").cells
    assert results.row("alibi-window").by_place() == list(limited.by_context)


def test_results_are_json_without_nan(results):
    text = json.dumps(results.as_dict(), allow_nan=False)
    plain = json.loads(text)
    alibi = plain["rows"][0]
    assert alibi["label"] == "ALiBi"
    assert alibi["cells"][0]["perplexity"] == pytest.approx(2 ** alibi["cells"][0]["bits"]["mean"])
    assert plain["interval"].startswith("95% percentile bootstrap")
