# SPDX-License-Identifier: Apache-2.0
"""The kernels of `triton` on the problems of every backend: in Triton's interpreter on the CPU, or on this GPU.

test_triton.py runs this file in a process of its own, because Triton decides when it is imported whether it interprets.
By hand: ``TRITON_INTERPRET=1 LINBIAS_EVERY_PROBLEM=1 python -m pytest tests/backends/triton_matrix.py``, some minutes.
"""

import inspect
import math
import os
from functools import cache

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from linbias import alibi_slopes
from linbias.backends import triton
from linbias.backends.triton.judge import Table
from linbias.backends.triton.launch import Launch, interpreted, tiles_of
from linbias.prepare import prepare
from linbias.semantics.problem import Operands, Problem
from linbias.testing import PROBLEMS, Case, Judge, evaluate, make_inputs
from tests.ledger_calls import contents, exact_weights, options_of, slope_values

DEVICE = "cpu" if interpreted() else "cuda"
EVERY = DEVICE == "cuda" or os.environ.get("LINBIAS_EVERY_PROBLEM") == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:.*TRITON_DEFAULT_FP_FUSION.*:UserWarning")


def _quicker() -> None:
    """The interpreter wraps all of triton.language anew for every function called: once a launch is enough."""
    wrap, packages = interpreter._patch_builtin, (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    first = {each: next(name for name, of in inspect.getmembers(each) if tl.core.is_builtin(of)) for each in packages}

    def patch(package, builder, scope) -> None:
        if tl.core.is_builtin(getattr(package, first[package])):
            wrap(package, builder, scope)

    interpreter._patch_builtin = patch


if interpreted():
    _quicker()
    # Fresh memory holds NaN, so that what a kernel does not write shows.
    torch.use_deterministic_algorithms(True, warn_only=True)


# Several tiles a side, so that lists are longer than one and something is skipped.
SPANNING = (
    Case(batch=1, heads=2, kv_heads=1, queries=131, keys=131, causal=True, dtype=torch.bfloat16),
    Case(batch=1, heads=2, kv_heads=1, queries=67, keys=163, slopes="items", future="steeper", dropout_p=0.2),
    Case(batch=1, heads=1, queries=131, keys=99, causal=True, segments="mixed", padding="holes", poison=True),
    Case(
        batch=1, heads=2, queries=71, keys=131, positions="unsorted", causal=True, window=(40, 0), sinks=2, unbiased=2
    ),
    Case(batch=1, heads=1, queries=97, keys=67, positions="points", metric="euclidean", softcap=9.0),
    Case(batch=1, heads=2, kv_heads=1, queries=1, keys=259, head_dim=64, causal=True, bounds=32, dtype=torch.float16),
)


def _chosen() -> list[Case]:
    cases = [case for case in PROBLEMS if triton.why_not(make_inputs(case).resolve()[0]) is None]
    if EVERY:
        return cases
    small = [case for case in cases if case.batch * case.heads * case.queries * case.keys < 4000]
    return [*small[::4], *SPANNING]


@pytest.mark.parametrize("case", _chosen(), ids=str)
def test_output_and_gradients(case: Case):
    Judge.of(make_inputs(case, DEVICE)).assert_conforms("triton")


def test_same_call_same_bits():
    inputs = make_inputs(Case(batch=1, heads=2, kv_heads=1, queries=35, keys=71, causal=True, dropout_p=0.2), DEVICE)
    first, second = evaluate(inputs, "triton")[0], evaluate(inputs, "triton")[0]
    for name in first:
        assert first[name].equal(second[name]), name


def test_a_row_block_may_split_its_keys(monkeypatch: pytest.MonkeyPatch):
    case = Case(batch=1, heads=2, queries=3, keys=259, causal=True, softcap=8.0, slopes="mixed")
    judge = Judge.of(make_inputs(case, DEVICE))
    for splits in (1, 2, 4):
        monkeypatch.setattr(Launch, "splits", lambda self, visits, splits=splits: splits)
        judge.assert_conforms("triton")


# --- what is skipped, weighed in float64 -----------------------------------------------------------------------------

CALLS = (
    ("causal", "normal", "press", 1e-3),
    ("causal", "sink", "steep", 0.05),
    ("both sides", "spread", "items", 0.4),
    ("window and sinks", "far ahead", "press", 0.05),
    ("padding", "normal", "mixed", 0.05),
    ("segments", "aligned", "press", 0.4),
    ("positions", "spread", "steep", 1e-3),
    ("shuffled", "normal", "steep", 0.05),
    ("manhattan points", "normal", "steep", 0.05),
    ("unbiased", "aligned", "press", 0.05),
    ("soft cap", "sink", "press", 0.4),
    ("future slopes", "normal", "steep", None),
    ("given bounds", "far ahead", "press", 0.05),
    ("prefix", "tiny", "infinite", 1e-3),
)
every_call = pytest.mark.parametrize(("mask", "content", "slopes", "tolerance"), CALLS)


def _call(mask: str, content: str, slopes: str, tolerance: float | None) -> tuple[Problem, Operands, Launch, Table]:
    torch.manual_seed(len(mask) + len(content))
    batch, heads, kv_heads, queries, keys = 1, 2, 1, 99, 197
    query, key = contents(content, batch, heads, kv_heads, queries, keys, 8)
    options = options_of(mask, batch, heads, queries, keys, key) | {"tolerance": tolerance}
    problem, operands = prepare(query, key, key, slope_values(slopes, batch, heads), options)
    launch = Launch.of(problem, operands, tiles_of(problem))
    return problem, operands, launch, Table.of(problem, operands, launch.tiles[:2])


def _pairs(table: Table, tiles: Tensor) -> Tensor:
    """(B, H, T, S) bool."""
    whole = tiles.repeat_interleave(table.strip, 2).repeat_interleave(table.block, 3)
    return whole[:, :, : table.problem.queries, : table.problem.keys]


@cache
def _on_cpu() -> None:
    if DEVICE != "cpu":
        pytest.skip("weighed in the interpreter: the judgement is the same torch operations on a GPU")


@every_call
def test_forward_skips_no_more_than_it_says(mask: str, content: str, slopes: str, tolerance: float | None):
    _on_cpu()
    problem, operands, launch, table = _call(mask, content, slopes, tolerance)
    visited, spent = triton._forward_judgement(launch, table, operands)
    skipped = (exact_weights(problem, operands) * ~_pairs(table, visited)).sum(-1).nan_to_num(0.0)
    assert bool((skipped <= spent.double() * (1 + 1e-6)).all()), (skipped - spent).max()
    assert bool((spent <= problem.options.tolerance).all())


@every_call
@pytest.mark.parametrize("slopes_too", [False, True])
def test_backward_skips_no_more_than_the_tolerance_of_a_row_or_a_key(
    mask: str, content: str, slopes: str, tolerance: float | None, slopes_too: bool
):
    _on_cpu()
    problem, operands, launch, table = _call(mask, content, slopes, tolerance)
    weights = exact_weights(problem, operands)
    lse = triton.forward(problem, operands).lse
    skips = triton._backward_judgement(launch, table, operands, lse, slopes_too=slopes_too)
    weights = (weights * _pairs(table, skips)).nan_to_num(0.0)
    for dim, what in ((-1, "row"), (-2, "key")):
        worst = weights.sum(dim).max().item()
        assert worst <= problem.options.tolerance * (1 + 1e-9), f"a {what} lost {worst}"


def test_something_is_skipped_and_the_promise_can_be_broken(monkeypatch: pytest.MonkeyPatch):
    _on_cpu()
    problem, operands, launch, table = _call("causal", "normal", "steep", 1e-3)
    visited, spent = triton._forward_judgement(launch, table, operands)
    assert not bool(visited.eq(table.every()).all()) and bool((spent > 0).any())
    honest = triton.rounded_mass
    monkeypatch.setattr(triton, "rounded_mass", lambda *given: honest(*given) + 30)
    visited, _ = triton._forward_judgement(launch, table, operands)
    lost = (exact_weights(problem, operands) * ~_pairs(table, visited)).sum(-1)
    assert lost.max() > 1e-3


def test_a_sink_costs_its_own_block():
    _on_cpu()
    query, key = contents("normal", 1, 1, 1, 256, 256, 8)
    key[:, :, 0] *= 200
    problem, operands = prepare(query, key, key, torch.tensor([1.0]), {"causal": True})
    launch = Launch.of(problem, operands, tiles_of(problem))
    table = Table.of(problem, operands, launch.tiles[:2])
    visited, _ = triton._forward_judgement(launch, table, operands)
    assert visited[0, 0, -1, 0] and not visited[0, 0, -1, 1:4].any() and visited[0, 0, -1, -1]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_and_inf_are_visited(poison: float):
    _on_cpu()
    query, key = contents("normal", 1, 2, 2, 256, 256, 8)
    key[0, 1, 5] = poison
    problem, operands = prepare(query, key, key, 4 * alibi_slopes(2), {"causal": True})
    launch = Launch.of(problem, operands, tiles_of(problem))
    visited, _ = triton._forward_judgement(launch, Table.of(problem, operands, launch.tiles[:2]), operands)
    assert visited[0, 1, :, 0].all() and not visited[0, 0, -1, 0]
