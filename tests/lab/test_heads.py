# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from linbias import alibi_slopes, reach
from linbias.lab.config import InspectCommand
from linbias.lab.heads import (
    effective_context,
    facts_of,
    heads_table,
    inspect_heads,
    slope_text,
    vanishing_distance,
)
from linbias.semantics.problem import default_tolerance


def test_case_k3_effective_context_is_the_inverse_of_the_slope():
    assert effective_context(alibi_slopes(8)).tolist() == [2, 4, 8, 16, 32, 64, 128, 256]
    assert effective_context(torch.tensor([0.0])).tolist() == [math.inf]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("content", [0.0, 3.7])
def test_a_probability_is_0_from_the_vanishing_distance_on(dtype, content):
    for slope in (0.5, 2**-8, 0.70710678):
        distance = vanishing_distance(torch.tensor([slope]), dtype, content).item()
        exact = [content - slope * d for d in (distance - 1, distance)]
        if dtype == torch.float64:
            # exp itself vanishes there; its logarithm does not.
            assert exact[1] <= -1075 * math.log(2) < exact[0]
            continue
        before, there = torch.tensor(exact, dtype=torch.float64).exp().to(dtype).tolist()
        assert before > 0
        assert there == 0


def test_facts_are_those_of_reach():
    command = InspectCommand(heads=6, length=500, content=2.0, tolerance=1e-3)
    facts = inspect_heads(command)
    assert [fact.reach for fact in facts] == reach(alibi_slopes(6), tolerance=1e-3, content=2.0).tolist()
    assert [fact.slope for fact in facts] == alibi_slopes(6).tolist()


def test_shares_are_counted_pair_by_pair():
    facts = inspect_heads(InspectCommand(heads=4, length=53, tolerance=1e-2))
    assert any(fact.reach < 52 for fact in facts)
    for fact in facts:
        pairs = sum(i - j <= fact.reach for i in range(53) for j in range(i + 1))
        assert fact.pairs == pytest.approx(pairs / (53 * 54 / 2))
        assert fact.keys == pytest.approx(sum(52 - j <= fact.reach for j in range(53)) / 53)


def test_shares_of_both_directions_are_counted_pair_by_pair():
    facts = facts_of(InspectCommand(tolerance=1e-2), alibi_slopes(4), 0.5, 53, causal=False)
    assert any(fact.reach < 52 for fact in facts)
    for fact in facts:
        pairs = sum(abs(i - j) <= fact.reach for i in range(53) for j in range(53))
        assert fact.pairs == pytest.approx(pairs / 53**2)


def test_slopes_are_told_so_that_they_are_read_back_the_same():
    for count in (1, 3, 8, 12, 71, 112):
        told = [slope_text(slope) for slope in alibi_slopes(count).tolist()]
        assert torch.tensor([float(text) for text in told], dtype=torch.float32).equal(alibi_slopes(count))
    assert slope_text(2**-8) == "0.00390625"


def test_heads_without_decay_reach_everything():
    slopes = torch.tensor([0.0, -0.5, 0.5])
    facts = facts_of(InspectCommand(), slopes, 0.0, 10)
    assert [fact.vanishes for fact in facts][:2] == [math.inf, math.inf]
    assert [fact.pairs for fact in facts][:2] == [1.0, 1.0]


def test_default_tolerance_is_a_quarter_of_the_accumulating_epsilon():
    assert default_tolerance(torch.float16) == default_tolerance(torch.float32) == 2**-25
    assert default_tolerance(torch.float64) == 2**-54


def test_the_table_has_a_line_for_each_head():
    command = InspectCommand(heads=3, length=100)
    lines = heads_table(command, inspect_heads(command)).splitlines()
    rows = [line.split() for line in lines if line[:2] in ("0 ", "1 ", "2 ")]
    assert [row[:2] for row in rows[:3]] == [["0", "0.0625"], ["1", "0.00390625"], ["2", "0.25"]]
