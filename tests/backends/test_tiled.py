# SPDX-License-Identifier: Apache-2.0
"""What the tiled backend adds to the conformance matrix: its pieces, its bounds on gradients, and its memory."""

import math
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from linbias import alibi_attention, alibi_slopes
from linbias.backends import reference, tiled
from linbias.backends.tiled.ledger import Visits
from linbias.backends.tiled.pieces import pieces_of
from linbias.backends.tiled.table import FUTURE, PAST
from linbias.prepare import prepare
from linbias.semantics.problem import Operands, Problem
from linbias.semantics.tokens import Tokens
from linbias.testing import Case, Judge, largest_error, make_inputs
from tests.every import why_not
from tests.ledger_calls import calls, contents, distances, exact_weights, exactly, forward_visits

# Long enough for runs of several blocks on one side, ragged ends and rows that see nothing.
SHAPES = (
    Case(batch=1, heads=3, kv_heads=3, queries=901, keys=901, head_dim=16, value_dim=16, causal=True),
    Case(batch=2, heads=4, kv_heads=2, queries=515, keys=700, head_dim=8, value_dim=8, causal=True),
    Case(batch=1, heads=2, kv_heads=1, queries=700, keys=415, head_dim=8, value_dim=8, causal=True),
    Case(batch=1, heads=3, kv_heads=1, queries=640, keys=640, head_dim=8, value_dim=8, causal=False),
    Case(batch=1, heads=2, kv_heads=2, queries=650, keys=650, head_dim=8, value_dim=8, causal=True, window=(200, 0)),
    Case(batch=1, heads=2, kv_heads=2, queries=300, keys=700, head_dim=8, value_dim=8, window=(40, 30)),
)


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_ragged_strips_and_runs_conform(case: Case):
    Judge.of(make_inputs(case)).assert_conforms("tiled")


def test_a_far_sink_is_merged_in():
    query, key = contents("normal", 1, 2, 2, 1024, 1024, 16)
    key[:, :, 3] *= 40
    value, grad = torch.randn(1, 2, 1024, 16), torch.randn(1, 2, 1024, 16)
    problem, operands = prepare(query, key, value, torch.tensor([0.4, 0.6]), {"causal": True})
    visits = forward_visits(problem, operands)
    apart = visits.table[:, :, 0] & ~visits.table[:, :, 1]
    assert apart.any(1).all(), "the sink must lie apart from the near keys"
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out, aux = alibi_attention(*leaves, operands.slopes[0], causal=True, backend="tiled", return_aux=True)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    exact, exact_aux = alibi_attention(
        *wide, operands.slopes[0].double(), causal=True, backend="reference", return_aux=True
    )
    plain = alibi_attention(*leaves, operands.slopes[0], causal=True, backend="reference")
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
    assert (aux.lse - exact_aux.lse).abs().max() <= 1e-5 * exact_aux.lse.abs().max()
    found, wanted, formula = (
        torch.autograd.grad(result, inputs, grad.to(result.dtype), retain_graph=True)
        for result, inputs in ((out, leaves), (exact, wide), (plain, leaves))
    )
    for ours, true, theirs in zip(found, wanted, formula, strict=True):
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + 2**-23 * true.abs().max()


def counted(problem: Problem, visits: Visits, side: int | None = None) -> Tensor:
    """(BH, T, S): how many pieces, of one side or of any, a pair is in."""
    counts = torch.zeros((problem.batch * problem.heads, problem.queries, problem.keys), dtype=torch.int64)
    for piece in pieces_of(problem, visits):
        rows = [(bh, row) for bh, row in zip(piece.bh.tolist(), piece.row.tolist(), strict=True)]
        assert len(set(rows)) == len(rows), "a row of a head is in one tile of a piece"
        if side is not None and piece.side != side:
            continue
        for (bh, row), key in zip(rows, piece.key.tolist(), strict=True):
            counts[bh, row : row + piece.height, key : key + piece.width] += 1
    return counts


def tile_pairs(problem: Problem, visits: Visits, table: Tensor) -> Tensor:
    """(BH, I, J) of tiles as (BH, T, S) of pairs."""
    wide = table.repeat_interleave(visits.strip, 1)[:, : problem.queries]
    return wide.repeat_interleave(visits.block, 2)[:, :, : problem.keys]


@settings(max_examples=40)
@given(calls())
def test_pieces_cover_every_visit_once(call: tuple[Problem, Operands]):
    problem, operands = call
    visits = forward_visits(problem, operands)
    wanted = tile_pairs(problem, visits, visits.table)
    assert counted(problem, visits).equal(wanted.long())


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_one_sided_pieces_hold_nothing_hidden_and_no_other_side(case: Case):
    problem, operands = make_inputs(case).resolve()
    visits = forward_visits(problem, operands)
    queries, keys = (tokens.places() for tokens in (Tokens.queries_of(operands), Tokens.keys_of(operands)))
    back = queries[:, :, None] - keys[:, None]
    visible = (exact_weights(problem, operands) > 0).flatten(0, 1)
    ones = counted(problem, visits)
    assert ones.equal(tile_pairs(problem, visits, visits.table).long())
    for side, right in ((PAST, back > 0), (FUTURE, back < 0)):
        of_side = counted(problem, visits, side) > 0
        assert not (of_side & ~right).any() and not (of_side & ~visible).any()
        assert not (of_side & ~tile_pairs(problem, visits, visits.sides == side)).any()
    if case.window is None:  # a window narrower than a block leaves no tile whole
        assert (counted(problem, visits, PAST) > 0).any(), "nothing was one-sided, so nothing was tested"


def test_what_it_counts_and_spends_is_what_it_did():
    query, key = contents("normal", 1, 3, 3, 700, 700, 8)
    slopes = torch.tensor([1.0, 0.01, 0.0])
    out, aux = alibi_attention(query, key, key, slopes, causal=True, backend="tiled", return_aux=True)
    causal = 700 * 701 // 2
    assert aux.computed[0] < causal / 2 <= causal <= aux.computed[1] <= aux.computed[2] <= 700 * 700
    assert 0 < aux.skipped[0, 0].max() <= torch.finfo(torch.float32).eps / 4 and aux.skipped[0, 2].max() == 0


# --- gradients under a coarse tolerance: docs/proof.md, section 5 ----------------------------------------------------


@settings(max_examples=60)
@given(calls())
def test_gradients_stay_within_the_stated_bounds(call: tuple[Problem, Operands]):
    problem, operands = exactly(*call)
    assume(
        all((s >= 0).all() and (s < math.inf).all() for s in (operands.slopes, operands.future_slopes) if s is not None)
    )
    grad_out = torch.randn(problem.batch, problem.heads, problem.queries, problem.value_dim, dtype=torch.float64)
    grad_lse = torch.randn(grad_out.shape[:3], dtype=torch.float64)
    needs = (True, True, True, True, operands.future_slopes is not None)
    result = tiled.forward(problem, operands)
    found = tiled.backward(problem, operands, result.out, result.lse, result.lse_low, grad_out, grad_lse, needs)
    names = ("query", "key", "value", "slopes", "future_slopes")
    wanted_names = [name for name, need in zip(names, needs, strict=False) if need]
    leaves = {name: getattr(operands, name).clone().requires_grad_() for name in wanted_names}
    exact = reference.forward(problem, operands._replace(**leaves))
    wanted = torch.autograd.grad((exact.out, exact.lse), list(leaves.values()), (grad_out, grad_lse))
    limits = stated_bounds(problem, operands, grad_out, grad_lse)
    for (name, _leaf), true in zip(leaves.items(), wanted, strict=True):
        error = (getattr(found, name) - true).abs()
        rounding = 1e-9 * (1 + true.abs().max())
        assert (error <= limits[name] + rounding).all(), f"{name}: {(error - limits[name]).max():.3g} too much"


def stated_bounds(problem: Problem, operands: Operands, grad_out: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    """Section 5 of docs/proof.md, in its letters."""
    tau, scale = problem.options.tolerance, abs(problem.options.scale)
    weights = exact_weights(problem, operands)
    value, key = (each.repeat_interleave(problem.group, 1) for each in (operands.value, operands.key))
    products = grad_out @ value.mT
    reached = (products.abs() * (weights > 0)).amax((2, 3), keepdim=True)
    w, ell = reached, grad_lse.abs().amax(2)[..., None, None]
    visited, skipped = (4 * w + ell) * tau / (1 - tau), (2 * w + ell) * tau
    columns = weights.sum(2)[..., None]
    length = {"query": operands.query.norm(dim=-1).amax(-1), "key": key.norm(dim=-1).amax(-1)}
    largest = grad_out.abs().amax(2, keepdim=True)

    def grouped(bound: Tensor) -> Tensor:
        return bound.unflatten(1, (problem.kv_heads, problem.group)).sum(2)

    distance = distances(problem, operands)
    both = operands.slopes if operands.future_slopes is None else torch.maximum(operands.slopes, operands.future_slopes)
    slope = torch.where(both == 0, 1.0, both).expand(problem.batch, problem.heads)
    drift = (weights * distance).sum((2, 3)) * visited[..., 0, 0] + problem.queries / slope * skipped[..., 0, 0]
    drift = drift if operands.slopes.shape[0] > 1 else drift.sum(0, keepdim=True)
    return {
        "query": scale * length["key"][..., None, None] * (visited + skipped),
        "key": grouped(scale * length["query"][..., None, None] * (visited * columns + skipped)),
        "value": grouped(largest * (tau / (1 - tau) * columns + tau)),
        "slopes": drift,
        "future_slopes": drift,
    }


# --- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys, torch
torch.set_num_threads(1)
from linbias import alibi_attention, alibi_slopes
length, backward = int(sys.argv[1]), sys.argv[2] == "backward"
def call(length):
    query, key, value = (torch.randn(1, 8, length, 32, requires_grad=backward) for _ in range(3))
    out = alibi_attention(query, key, value, alibi_slopes(8), causal=True, backend="tiled")
    if backward:
        out.sum().backward()
call(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
call(length)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_memory_is_linear_in_the_length(way: str):
    """In fresh processes: four times the length may cost four times the memory, where a dense matrix costs sixteen."""

    def peak(length: int) -> int:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(length), way], check=True, capture_output=True, text=True
        )
        return int(done.stdout)

    short, long = peak(1024), peak(4096)
    dense = 8 * 4096**2 * 4 / 1024
    assert long < 5 * max(short, 8 * 1024), f"{short} KiB at 1,024 tokens, {long} KiB at 4,096"
    assert long < dense / 4


def test_a_functorch_gradient_is_refused():
    query, slopes = torch.randn(1, 1, 5, 4), alibi_slopes(1)
    with pytest.raises(NotImplementedError, match="functorch"):
        torch.func.grad(lambda q: alibi_attention(q, query, query, slopes, causal=True, backend="tiled").sum())(query)


def test_rows_that_see_nothing_between_rows_that_do():
    query, key = contents("normal", 1, 2, 2, 200, 70, 8)
    out, aux = alibi_attention(query, key, key, alibi_slopes(2), causal=True, backend="tiled", return_aux=True)
    assert out[:, :, :130].eq(0).all() and aux.lse[:, :, :130].eq(-math.inf).all()
    assert aux.lse[:, :, 130:].isfinite().all()


def test_slope_gradients_do_not_lose_what_a_far_lse_lost():
    """All keys 10,000 away: the lse is so large that it is rounded by more than the weights deserve."""
    case = Case(positions="away", causal=True, slopes="steeper")
    Judge.of(make_inputs(case)).assert_conforms("tiled")


@pytest.mark.parametrize("backend", ["tiled", "native"])
def test_only_the_lse_has_a_gradient_and_values_play_no_part(backend: str):
    if (reason := why_not(backend, make_inputs(Case()))) is not None:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 33, 8, generator=generator) for _ in range(3))
    value[0, 1, 5, 3] = math.nan
    gradients = {}
    for name in (backend, "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key)]
        slopes = alibi_slopes(2).requires_grad_()
        _, aux = alibi_attention(*leaves, value, slopes, causal=True, backend=name, return_aux=True)
        gradients[name] = torch.autograd.grad(aux.lse.square().sum(), (*leaves, slopes))
    for found, wanted in zip(gradients[backend], gradients["reference"], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_key_at_no_place_is_seen_by_all():
    """A NaN coordinate makes every distance NaN, and so every output; it must not hide in a box that is far away."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 400, 8, generator=generator) for _ in range(3))
    places = 400 * torch.rand(400, 2, generator=generator)
    places[390, 0] = math.nan
    options = {"causal": False, "metric": "euclidean", "key_positions": places}
    options["query_positions"] = places.nan_to_num(200.0)
    out = alibi_attention(query, key, value, torch.ones(1), **options, backend="tiled")
    assert out.isnan().all()


def test_scores_beyond_what_float64_tells_apart():
    """At 10^18 the largest score less its bias is rounded by hundreds, which exp must not see."""
    generator = torch.Generator().manual_seed(0)
    # Whole numbers, so that every product and sum is exact and no order of adding decides which key is the largest.
    query, key = torch.randint(-511, 512, (2, 1, 3, 307, 17), generator=generator).float()
    key = torch.where(torch.rand(1, 3, 307, 1, generator=generator) < 0.05, key * 2.0**45, key)
    value = torch.randn(1, 3, 307, 5, generator=generator)
    slopes, results = torch.tensor([0.5, 0.3, 2.0]), []
    for name in ("tiled", "reference"):
        leaves = [each.clone().requires_grad_() for each in (query, key, value, slopes)]
        out, aux = alibi_attention(*leaves, causal=False, scale=0.25, return_aux=True, backend=name)
        results.append((out, aux.lse, *torch.autograd.grad(out.square().sum(), leaves)))
    assert results[1][1].abs().max() > 1e18 and results[1][0].isfinite().all()
    for part in (0, 1, 4):  # output, lse and the gradient of the value; in the others rounding meets keys of 10^16
        torch.testing.assert_close(results[0][part], results[1][part])
    assert all(gradient.isfinite().all() for gradient in results[0])


@pytest.mark.parametrize("kv_heads", [16, 4])
def test_a_decode_step_of_thousands_of_sequences_is_no_loop(kv_heads: int):
    """132,800 tiles of one pair: a millisecond a hundred is plenty, where a loop over tiles took eleven seconds."""
    query = torch.randn(8300, 16, 1, 8, requires_grad=True)
    key = torch.randn(8300, kv_heads, 1, 8, requires_grad=True)
    took = {"forward": math.inf, "backward": math.inf}
    for _ in range(3):
        start = time.process_time()
        out = alibi_attention(query, key, key, alibi_slopes(16), causal=True, backend="tiled")
        between = time.process_time()
        torch.autograd.grad(out.sum(), (query, key))
        took["forward"] = min(took["forward"], between - start)
        took["backward"] = min(took["backward"], time.process_time() - between)
    assert max(took.values()) < 1, took


def _agrees(query: Tensor, slopes: Tensor, key_positions: Tensor, value: Tensor, **options):
    """Whether output, lse and every gradient are those of `reference`."""
    found, wanted = (
        _with_gradients(query, slopes, value, backend=backend, key_positions=key_positions, causal=True, **options)
        for backend in ("tiled", "reference")
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1.0, float(other.abs().nan_to_num().max())))


def _with_gradients(query: Tensor, slopes: Tensor, value: Tensor, **options) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in (query, value, value, slopes)]
    out, aux = alibi_attention(*leaves, return_aux=True, **options)
    return out.detach(), aux.lse.detach(), *torch.autograd.grad(out[..., 0].sum() + aux.lse.sum(), leaves)


@pytest.mark.parametrize(("slope", "gap"), [(0.05, 2e15), (2.0, 1e11), (8.0, 2e16), (3.8, 3e17), (1e19, 100)])
@pytest.mark.parametrize("queries", [1, 5, 20])
def test_a_far_block_alone_weighs_nothing_however_far(slope: float, gap: float, queries: int):
    """Its shift lacks whole units in fp32, which as a factor would lift its weights above those of the near keys."""
    query, value = torch.randn(1, 2, queries, 8), torch.randn(1, 2, 64 + queries, 8)
    places = torch.cat([torch.arange(64), torch.arange(queries) + int(gap)])
    _agrees(query, torch.tensor([slope, slope / 3]), places, value, tolerance=0.0)


def test_distances_held_at_the_farthest_are_not_summed_of_parts():
    query, value = torch.randn(1, 2, 130, 8), torch.randn(1, 2, 130, 8)
    places = torch.cat([torch.arange(65) - 2**63, torch.arange(-65, 0)])
    _agrees(query, torch.tensor([1e-19, 5e-20]), places, value, query_positions=torch.arange(130) + 2**63 - 131)


def test_a_slope_of_nan_gives_no_bias_at_distance_zero():
    query = torch.randn(1, 2, 3, 8)
    out = alibi_attention(query, query, query, torch.tensor([math.nan, 0.1]), causal=True, backend="tiled")
    assert torch.equal(out[:, :, 0], query[:, :, 0])
    assert out[:, 0, 1:].isnan().all() and out[:, 1].isfinite().all()


@pytest.mark.parametrize("slopes", [torch.tensor([0.1, 0.2]), torch.tensor([[0.1, 0.2], [0.1, 0.2]])], ids=["H", "BH"])
def test_nan_in_one_head_leaves_the_slope_gradients_of_others_alone(slopes: Tensor):
    query, slopes = torch.randn(2, 2, 130, 8), slopes.clone().requires_grad_()
    query[1, 1, 5] = math.nan
    key = query.nan_to_num()
    alibi_attention(query, key, key, slopes, causal=True, backend="tiled").sum().backward()
    assert slopes.grad is not None
    wrong = slopes.grad.isnan().reshape(-1, 2)
    assert wrong[-1].tolist() == [False, True] and not wrong[:-1].any()


def test_slope_gradients_of_thousands_of_sequences_take_no_room():
    query, slopes = torch.randn(20000, 16, 1, 1, requires_grad=True), torch.rand(16, requires_grad=True)
    out, aux = alibi_attention(query, query, query, slopes, causal=True, backend="tiled", return_aux=True)
    (out.sum() + aux.lse.sum()).backward()
    assert slopes.grad is not None and torch.equal(slopes.grad, torch.zeros(16))


def test_values_whose_sums_leave_the_range_have_a_mean_that_does_not():
    torch.manual_seed(5)
    query, key = torch.randn(1, 2, 130, 8), torch.randn(1, 2, 300, 8)
    value, slopes = torch.randn(1, 2, 300, 5).clamp(-3, 3) * 1e38, torch.tensor([0.0, 2.0**-6])
    exact = alibi_attention(query.double(), key.double(), value.double(), slopes, causal=True, backend="reference")
    found = alibi_attention(query, key, value, slopes, causal=True, backend="tiled")
    assert found.isfinite().all()
    assert largest_error(found, exact) <= 100 * torch.finfo(torch.float32).eps * 3e38
