# SPDX-License-Identifier: Apache-2.0
"""The ledgers: what is skipped, weighed in float64, never exceeds the tolerance. docs/proof.md names these tests."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from linbias import alibi_slopes, reach
from linbias.backends import reference, tiled
from linbias.backends.tiled import ledger
from linbias.backends.tiled.ledger import Visits
from linbias.backends.tiled.pieces import Call
from linbias.backends.tiled.table import Table
from linbias.prepare import prepare
from linbias.semantics.bounds import upper_norms
from linbias.semantics.problem import Operands, Problem
from tests.ledger_calls import CONTENTS, calls, contents, distances, exact_weights, exactly, forward_visits


def skipped_pairs(problem: Problem, visits: Visits) -> Tensor:
    """(B, H, T, S) bool: what is left out."""
    table = visits.table.repeat_interleave(visits.strip, 1).repeat_interleave(visits.block, 2)
    return ~table[:, : problem.queries, : problem.keys].unflatten(0, (problem.batch, problem.heads))


def forward_shares(problem: Problem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(B, H, T) each: the weight a forward really skips, and what its ledger says it spent."""
    visits, weights = forward_visits(problem, operands), exact_weights(problem, operands)
    spent = visits.spent.repeat_interleave(visits.strip, 1)[:, : problem.queries]
    return (weights * skipped_pairs(problem, visits)).sum(-1), spent.view(weights.shape[:3])


def assert_not_above(shares: Tensor, limit: Tensor | float, what: str) -> None:
    """The oracle itself rounds in float64."""
    excess = (shares * (1 - 1e-12) - limit).max().item()
    assert excess <= 0, f"{what} exceeded by {excess:.3g}"


# --- the promises ----------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(calls())
def test_forward_never_skips_more_than_it_says(call: tuple[Problem, Operands]):
    problem, operands = call
    skipped, spent = forward_shares(problem, operands)
    # Rows whose exact weights are NaN (inf * 0 contents) have no weight to compare.
    assert_not_above(skipped.nan_to_num(0.0), spent, "what the ledger says it spent")
    assert_not_above(spent, problem.options.tolerance, "the tolerance")


@settings(max_examples=150)
@given(calls(), st.booleans())
def test_backward_never_skips_more_than_the_tolerance(call: tuple[Problem, Operands], slopes_too: bool):
    problem, operands = call
    lse = alibi_lse(problem, operands)
    visits = tiled._backward_visits(Call.of(problem, operands), lse, slopes_too=slopes_too)
    weights = exact_weights(problem, operands) * skipped_pairs(problem, visits)
    if slopes_too:
        future = operands.slopes if operands.future_slopes is None else operands.future_slopes
        slopes = torch.maximum(operands.slopes, future)
        slopes = torch.where(slopes > 0, slopes, 1.0 * (slopes == 0)).double()[..., None, None]
        stretched = 1 + slopes * distances(problem, operands)
        weights = torch.where(weights == 0, 0.0, weights * stretched)
    assert_not_above(weights.sum(-1), problem.options.tolerance, "the tolerance of a row")
    assert_not_above(weights.sum(-2), problem.options.tolerance, "the tolerance of a key")


def alibi_lse(problem: Problem, operands: Operands) -> Tensor:
    """The lse a backward is given: that of the forward, with what it skipped."""
    return tiled.forward(problem, operands).lse


@pytest.mark.parametrize("kind", CONTENTS)
def test_the_promise_can_be_broken(kind: str, monkeypatch: pytest.MonkeyPatch):
    """A ledger that believes rows to be heavier than they are overdraws, so the tests above can fail."""
    query, key = contents(kind, 1, 4, 4, 260, 260, 8)
    problem, operands = prepare(query, key, key, alibi_slopes(4), {"causal": True, "tolerance": 1e-3})
    honest, _ = forward_shares(problem, operands)
    assert_not_above(honest, 1e-3, "the tolerance")
    true_mass = ledger.near_mass
    monkeypatch.setattr(ledger, "near_mass", lambda *call: true_mass(*call) + 30)
    overdrawn, _ = forward_shares(problem, operands)
    assert overdrawn.max() > 1e-3


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["key", "query", "slopes"])
def test_nan_and_inf_are_visited(poison: float, where: str):
    query, key = contents("normal", 1, 3, 3, 300, 300, 8)
    slopes = torch.tensor([4.0, 2.0, 1.0])
    if where == "key":
        key[0, 1, 5] = poison
    elif where == "query":
        query[0, 1, 290] = poison
    elif math.isnan(poison):
        slopes[1] = poison
    problem, operands = prepare(query, key, key, slopes, {"causal": True})
    table = forward_visits(problem, operands).table
    clean = forward_visits(problem, operands._replace(key=contents("normal", 1, 3, 3, 300, 300, 8)[1]))
    if where == "key":
        assert table[1, :, 0].all(), "every strip must meet the poisoned block"
        assert not table[0, 4, 0], "other heads still skip it"
    elif where == "query":
        assert table[1, 4].all(), "the poisoned row's strip sees all its keys"
        assert not table[1, 3].all()
    elif math.isnan(poison):
        assert table[1].tril().equal(torch.ones(5, 5, dtype=torch.bool).tril())
    assert not clean.table[0, 4, 0]


def test_a_sink_costs_its_own_block():
    query, key = contents("normal", 1, 1, 1, 1024, 1024, 16)
    slopes = torch.tensor([0.25])
    plain = forward_visits(*prepare(query, key, key, slopes, {"causal": True})).table[0]
    key[:, :, 0] *= 60
    sink = forward_visits(*prepare(query, key, key, slopes, {"causal": True})).table[0]
    assert sink[:, 0].sum() > plain[:, 0].sum()
    assert sink[:, 1:].sum() <= plain[:, 1:].sum() + len(sink)


def test_tolerance_zero_skips_only_what_is_invisible():
    query, key = contents("normal", 1, 2, 2, 300, 300, 8)
    slopes = torch.tensor([3.0, math.inf])
    problem, operands = prepare(query, key, key, slopes, {"causal": True, "tolerance": 0.0})
    table = forward_visits(problem, operands).table
    assert table[0].equal(torch.ones(5, 5, dtype=torch.bool).tril())
    skipped, _ = forward_shares(problem, operands)
    assert skipped.eq(0).all()


def test_superblocks_keep_the_promise(monkeypatch: pytest.MonkeyPatch):
    query, key = contents("normal", 1, 2, 2, 1500, 1500, 8)
    problem, operands = prepare(query, key, key, torch.tensor([0.5, 0.1]), {"causal": True, "tolerance": 1e-2})
    fine = forward_visits(problem, operands)
    monkeypatch.setattr(tiled.table, "_TABLE", 150)
    coarse = forward_visits(problem, operands)
    assert (fine.strip, fine.block) == (64, 64) and (coarse.strip, coarse.block) == (128, 128)
    skipped, spent = forward_shares(problem, operands)
    assert_not_above(skipped, spent, "what the ledger says it spent")
    assert (skipped.amax((0, 2)) > 0).all()


def test_chunks_of_heads_change_nothing(monkeypatch: pytest.MonkeyPatch):
    query, key = contents("normal", 2, 6, 2, 330, 330, 8)
    problem, operands = prepare(query, key, key, alibi_slopes(6), {"causal": False})
    whole = forward_visits(problem, operands)
    monkeypatch.setattr(ledger, "_CHUNK", 1)
    single = forward_visits(problem, operands)
    assert whole.table.equal(single.table) and whole.spent.equal(single.spent)


# --- lower bounds of a row's weight ----------------------------------------------------------------------------------


@settings(max_examples=80)
@given(calls())
def test_mass_is_a_lower_bound(call: tuple[Problem, Operands]):
    problem, operands = call
    table, norms = Table.of(problem, operands), upper_norms(operands.query)
    mass = tiled._mass(Call.of(problem, operands), table, norms)
    exact = reference.forward(*exactly(problem, operands)).lse
    # A NaN is no bound, and nothing is skipped by it.
    rounding = torch.where(exact.isfinite(), 1e-12 * exact.abs(), 0.0)
    assert ((mass.double() <= exact + rounding) | mass.isnan()).all()


def test_jensen_counts_nearly_all_of_a_row():
    query, key = contents("normal", 1, 2, 2, 600, 600, 64)
    problem, operands = prepare(query, key, key, torch.tensor([2**-6, 2**-7]), {"causal": True})
    mass = ledger.near_mass(Table.of(problem, operands), operands, upper_norms(operands.query))
    lse = reference.forward(problem, operands).lse
    # For normal scores of variance 1 the mean of exp(s) is e^(1/2) times exp of the mean: half is Jensen's share.
    assert (lse - mass)[:, :, 300:].mean() < 1.0


def test_reach_agrees_with_what_a_flat_head_skips():
    """With contents 0 the tail is the whole truth: the ledger stops within a strip and a block of it."""
    slope, keys = 0.125, 1024
    flat = torch.zeros(1, 1, keys, 8)
    problem, operands = prepare(flat, flat, flat, torch.tensor([slope]), {"causal": True})
    table = forward_visits(problem, operands).table[0]
    mass = -math.log(-math.expm1(-slope))
    distance = reach(torch.tensor(slope), tolerance=problem.options.tolerance, content=-mass).item()
    seen = table[-1].sum().item() * 64
    assert distance <= seen + 64 and seen <= distance + 3 * 64
