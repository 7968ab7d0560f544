# SPDX-License-Identifier: Apache-2.0
"""What the native backend adds to the conformance matrix: its vector widths, threads, strides, account and memory."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from linbias import BackendUnavailable, alibi_attention, alibi_slopes
from linbias.backends import native, reference
from linbias.semantics.problem import (
    FEATURES,
    OPERAND_NAMES,
    OPTION_NAMES,
    Gradients,
    Operands,
    Problem,
    Result,
)
from linbias.testing import PROBLEMS, Case, Judge, make_inputs
from tests.backends.native_calls import grads_of, operands_of, options, run
from tests.ledger_calls import calls, exactly

pytestmark = pytest.mark.skipif(not native.INSTALLED, reason="the extension was not built: no C++ compiler")

ROOT = Path(__file__).parents[2]


def assert_same_bits(one: Result, other: Result) -> None:
    assert one.out.equal(other.out) and one.lse.equal(other.lse)
    assert one.skipped.equal(other.skipped) and one.computed.equal(other.computed)


# --- vector widths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("case", PROBLEMS[::7], ids=str)
def test_every_width_conforms(case: Case, variant: str, monkeypatch: pytest.MonkeyPatch):
    from linbias import _native

    if not _native.has_variant(variant):
        pytest.skip(f"this processor lacks the instructions of {variant}")
    monkeypatch.setattr(native, "_variant", variant)
    Judge.of(make_inputs(case)).assert_conforms("native")


def test_an_unknown_width_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "_variant", "mmx")
    with pytest.raises(ValueError, match="no kernels named 'mmx'"):
        run(operands_of(2, 1, 3, 5))


# --- threads ---------------------------------------------------------------------------------------------------------


def test_threads_share_row_tiles_without_changing_a_bit(threads):
    operands = operands_of(6, 2, 301, 333)
    threads(1)
    alone = run(operands)
    threads(3)
    assert_same_bits(run(operands), alone)


@pytest.mark.parametrize("slope", [0.0, 0.004, 0.3])
def test_threads_share_the_keys_of_one_row_tile(threads, slope: float):
    # One row tile and 4,801 keys: with four threads the keys are split, each part keeping an account of its own.
    operands = operands_of(3, 1, 2, 4801)
    first = {name: getattr(operands, name)[:1].double() for name in ("query", "key", "value")}
    operands = operands._replace(**first, slopes=torch.full((1, 3), slope, dtype=torch.float64))
    threads(1)
    alone = run(operands, tolerance=1e-3)
    threads(4)
    split = run(operands, tolerance=1e-3)
    assert_same_bits(run(operands, tolerance=1e-3), split)
    most = operands.value.abs().max()
    assert (split.out - alone.out).abs().max() <= 4e-3 * most
    assert (split.lse - alone.lse).abs().max() <= 2e-3 / (1 - 1e-3)
    assert (split.skipped <= 1e-3).all()


def test_a_query_of_nan_stays_nan_when_its_keys_are_split(threads):
    operands = operands_of(1, 1, 1, 4801)
    operands = operands._replace(query=torch.full_like(operands.query, torch.nan)[:1], slopes=torch.full((1, 1), 0.001))
    operands = operands._replace(key=operands.key[:1], value=operands.value[:1])
    for count in (1, 4):
        threads(count)
        found = run(operands)
        assert found.out.isnan().all() and found.lse.isnan().all()


def test_calls_from_several_threads_at_once(threads):
    threads(2)
    operands = operands_of(4, 2, 190, 190)
    wanted = run(operands)
    found: list[Result] = []
    callers = [threading.Thread(target=lambda: found.append(run(operands))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 4
    for result in found:
        assert_same_bits(result, wanted)


FORK = """
import os, sys, torch
from linbias import BackendUnavailable, alibi_attention, alibi_slopes
torch.set_num_threads(2)
q = torch.randn(1, 4, 200, 16)
call = lambda: alibi_attention(q, q, q, alibi_slopes(4), causal=True, backend="native")
wanted = call()
child = os.fork()
if child == 0:
    os._exit(0 if call().equal(wanted) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_wait_for_its_parents_threads():
    assert subprocess.run([sys.executable, "-c", FORK], timeout=120, check=False).returncode == 0


# --- strides ---------------------------------------------------------------------------------------------------------


def views(tensor: Tensor) -> list[Tensor]:
    """The same numbers under other strides."""
    batch, heads, tokens, dim = tensor.shape
    token_first = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    gaps = tensor.new_full((batch, heads, tokens, dim + 5), torch.nan)[..., 3 : dim + 3].copy_(tensor)
    dim_first = tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return [token_first, gaps, dim_first]


@pytest.mark.parametrize("queries", [3, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_strides_change_no_bit(queries: int, dtype: torch.dtype):
    operands = operands_of(4, 2, queries, 143)
    names = ("query", "key", "value")
    operands = operands._replace(**{name: getattr(operands, name).to(dtype) for name in names})
    # Tolerance 0, because a norm may be summed in another order, and so a tile skipped here and visited there.
    wanted = run(operands, tolerance=0.0)
    for name in names:
        for view in views(getattr(operands, name)):
            assert view.equal(getattr(operands, name)) and not view.is_contiguous()
            assert_same_bits(run(operands._replace(**{name: view}), tolerance=0.0), wanted)


def test_expanded_keys_are_read_where_they_are():
    operands = operands_of(4, 2, 70, 90)
    one = operands._replace(key=operands.key[:1, :1].expand(2, 2, 90, 16))
    assert one.key.stride()[:2] == (0, 0)
    assert_same_bits(run(one), run(one._replace(key=one.key.contiguous())))


@given(call=calls(), loud=st.booleans())
@settings(max_examples=60)
def test_the_output_alone_has_the_bits_of_the_whole_result(call: tuple[Problem, Operands], loud: bool):
    problem, operands = call
    if loud:  # sums of values leave the range, and the tile is made again
        operands = operands._replace(value=operands.value.sign() * torch.finfo(problem.dtype).max)
    whole = native.forward(problem, operands).out
    torch.testing.assert_close(native.output(problem, operands), whole, rtol=0.0, atol=0.0, equal_nan=True)


# --- the account -----------------------------------------------------------------------------------------------------


@given(call=calls())
@settings(max_examples=60)
def test_what_is_skipped_weighs_no_more_than_it_says(call: tuple[Problem, Operands]):
    # In float64 the lse shows the skipped weight itself: rounding is ten digits below any tolerance drawn.
    problem, operands = exactly(*call)
    found, exact_lse = native.forward(problem, operands), reference.forward(problem, operands).lse
    seen = exact_lse.isfinite()
    missing = -torch.expm1(found.lse - exact_lse)[seen]
    assert (found.lse[~seen] == -torch.inf).all()
    assert (found.skipped >= 0).all() and (found.skipped <= problem.options.tolerance).all()
    assert (missing <= found.skipped[seen] + 1e-11).all()


@given(call=calls(), slopes_too=st.booleans(), parts=st.sampled_from((1, 3)))
@settings(max_examples=60)
def test_backward_skips_no_more_than_the_tolerance_of_a_row_or_a_key(
    call: tuple[Problem, Operands], slopes_too: bool, parts: int
):
    # From the exact lse, weights are exact where visited. A key's sum of them is the gradient of its value under an
    # output gradient of 1; a row's is that of its query where all keys agree in one more element.
    problem, operands = exactly(*call)
    exact = reference.forward(problem, operands)
    more = (torch.zeros_like(operands.query[..., :1]), torch.ones_like(operands.key[..., :1]))
    wide = operands._replace(query=torch.cat((operands.query, more[0]), -1), key=torch.cat((operands.key, more[1]), -1))
    problem, tau, saved = Problem.of(wide, problem.options), problem.options.tolerance, exact[:3]
    needs = (True, True, True, slopes_too, slopes_too and wide.future_slopes is not None)
    before = torch.get_num_threads()
    torch.set_num_threads(parts)
    try:
        of_out = native.backward(problem, wide, *saved, torch.ones_like(exact.out), None, needs)
        of_lse = native.backward(problem, wide, *saved, None, torch.ones_like(exact.lse), needs)
    finally:
        torch.set_num_threads(before)
    weights = reference.weights(*exactly(*call))
    columns = weights.sum(2).unflatten(1, (problem.kv_heads, problem.group)).sum(2)
    assert of_out.value is not None and of_lse.query is not None
    assert ((columns - of_out.value[..., 0]) <= problem.group * tau + 1e-11 * (1 + columns)).all()
    if problem.options.softcap is None and problem.options.scale != 0:
        rows = of_lse.query[..., -1] / problem.options.scale
        assert ((weights.sum(-1) - rows) <= tau + 1e-11).all()


def test_far_keys_are_skipped_and_a_sink_costs_its_own_tile():
    operands = operands_of(1, 1, 1500, 1500)._replace(slopes=torch.tensor([[0.25]]))
    plain = run(operands).computed
    assert plain.max() < 0.2 * 1500 * 1500 / 2
    key = operands.key.clone()
    key[:, :, 0] *= 1000
    sink = run(operands._replace(key=key)).computed
    # The tile of the sink, 64 keys, may be computed for every row; nothing else.
    assert (sink - plain).max() <= 64 * 1500 and (sink - plain).min() >= 0


def test_nothing_is_skipped_at_tolerance_zero():
    operands = operands_of(2, 1, 200, 1000)
    found = run(operands, tolerance=0.0)
    visible = sum(range(801, 1001))
    assert (found.computed >= visible).all() and (found.skipped == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_no_bound_can_judge_is_visited(poison: float):
    # A visible NaN, however far, belongs in the result; so does infinity where it makes a score of +inf.
    operands = operands_of(1, 1, 400, 400)._replace(slopes=torch.ones(1, 1))
    key = operands.key.clone()
    key[:, :, 3, 5] = poison
    out = run(operands._replace(key=key)).out
    spoilt = (operands.query[..., 5] * poison).isnan() | (operands.query[..., 5] > 0)
    spoilt[:, :, :3] = False
    assert out.isnan().any(-1).equal(spoilt)


def test_a_negative_slope_is_never_skipped_under_a_soft_cap():
    # The cap bounds the score, not what distance adds: 400 keys away it adds 400.
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 400, 16)
    slopes = torch.tensor([-1.0])
    out = alibi_attention(query, key, value, slopes, causal=True, softcap=5.0, backend="native")
    exact = alibi_attention(query, key, value, slopes, causal=True, softcap=5.0, backend="reference")
    assert (out - exact).abs().max() <= 1e-4
    given = (*torch.randn(3, 1, 1, 400, 16).double(), slopes.double())
    more = dict(causal=False, softcap=5.0, future_slopes=torch.tensor([0.5], dtype=torch.float64))
    both = zip(*(grads_of(backend, "out", *given, **more) for backend in ("native", "reference")), strict=True)
    for found, wanted in both:
        assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max().clamp(min=1)


def test_a_negative_slope_gives_no_credit_to_its_neighbours():
    # With gradients of slopes, charges are multiplied by 1 + |m| d: with m itself they would be negative.
    torch.manual_seed(0)
    query = torch.randn(1, 2, 7, 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 1, 400, 8, dtype=torch.float64)
    slopes = torch.tensor([0.05, -0.01], dtype=torch.float64)
    given = (query, key, value, slopes)
    both = zip(*(grads_of(backend, "out", *given, causal=True) for backend in ("native", "reference")), strict=True)
    for found, wanted in both:
        assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


def test_a_key_at_nan_is_visited_however_far_its_tile():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 400, 8)
    places = 50 * torch.randn(400, 2).sort(0).values
    nowhere = places.clone()
    nowhere[390, 0] = torch.nan
    more = dict(causal=False, metric="euclidean", key_positions=nowhere, query_positions=places)
    out = alibi_attention(query, key, value, torch.ones(1), backend="native", **more)  # pyright: ignore
    assert out.isnan().all()


def test_the_gradient_of_lse_reads_no_value():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 200, 8, dtype=torch.float64)
    slopes = torch.tensor([0.1, 0.3], dtype=torch.float64)
    wanted = grads_of("native", "lse", query, key, value, slopes, causal=True)
    value[:, :, 100] = torch.nan
    poisoned = grads_of("native", "lse", query, key, value, slopes, causal=True)
    for found, same in zip(poisoned, wanted, strict=True):
        assert found.equal(same) and found.isfinite().all()


def test_a_bias_that_overflows_hides_its_key():
    # slope * distance is infinite though neither is: the pair does not exist, and a NaN there may not leak.
    query, key, value = torch.randn(3, 1, 1, 100, 8)
    value[:, :, 3] = torch.nan
    positions = torch.arange(100)
    far = positions.clone()
    far[3] = -(2**40)
    points = torch.randn(100, 2)
    lost = points.clone()
    lost[3] = 1e38
    for slope, more in (
        (1e35, dict(causal=True, query_positions=positions, key_positions=far)),
        (50.0, dict(causal=False, metric="manhattan", query_positions=points, key_positions=lost)),
    ):
        out = alibi_attention(query, key, value, torch.tensor([slope]), backend="native", **more)  # pyright: ignore
        assert out.isfinite().all()


@pytest.mark.parametrize(("score", "size"), [(30.0, 1e30), (19.0, 1e26)])
def test_weights_leave_room_for_large_values(score: float, size: float):
    # A tile whose scores exceed the top so far: with a new top, or without one and weights above 1.
    key = torch.zeros(1, 1, 500, 8)
    key[:, :, :400, 0] = score
    query = torch.zeros(1, 1, 500, 8)
    query[..., 0] = 1.0
    value = torch.full((1, 1, 500, 8), size)
    for backend in ("reference", "native"):
        out = alibi_attention(query, key, value, torch.tensor([1e-3]), causal=True, scale=1.0, backend=backend)
        assert (out / size - 1).abs().max() <= 1e-4


@pytest.mark.parametrize("softcap", [1e-39, 1e-30, 1e30])
def test_extreme_soft_caps_stay_in_range(softcap: float):
    torch.manual_seed(0)
    given = (*torch.randn(3, 1, 1, 130, 8), torch.tensor([0.1]))
    found = grads_of("native", "out", *given, causal=True, softcap=softcap)
    wanted = grads_of("reference", "out", *given, causal=True, softcap=softcap)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max().clamp(min=1)


def test_blocks_out_of_reach_are_never_read():
    # Decode with the bounds of a cache: keys beyond the reach of every head may be anything, even NaN.
    operands = operands_of(4, 2, 1, 4096)
    operands = operands._replace(slopes=torch.full((1, 4), 0.5))
    norms = operands.key.unflatten(2, (64, 64)).norm(dim=-1).amax(-1) * (1 + 1e-5)
    wanted = run(operands._replace(bound_norms=norms), bounds_block=64)
    for name in ("key", "value"):
        getattr(operands, name)[:, :, : 4096 - 256] = torch.nan
    assert_same_bits(run(operands._replace(bound_norms=norms), bounds_block=64), wanted)
    assert (wanted.computed <= 256).all()


# --- distances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 2**24 - 7, 2**40, 2**62])
@pytest.mark.parametrize("step", [1, 2**18 + 1, 2**33])
def test_distances_are_exact_integers(start: int, step: int):
    # q = 0: the weights are the bias alone. Slope 1 / step, so that neighbouring keys are 1 apart in logits.
    positions = start + step * torch.arange(100)[None]
    value = torch.eye(100).expand(1, 1, 100, 100)
    query = torch.zeros(1, 1, 100, 8)
    operands = Operands(
        query, query, value, torch.tensor([[1 / step]]), query_positions=positions, key_positions=positions
    )
    out = run(operands).out[0, 0]
    distance = torch.arange(100.0)[:, None] - torch.arange(100.0)
    wanted = torch.softmax(torch.where(distance >= 0, -distance, -torch.inf).double(), -1)
    assert (out - wanted).abs().max() <= 4 * torch.finfo(torch.float32).eps


# --- segments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [lambda n: n - 3, lambda n: n << 40, lambda n: (n - 3) * (2**61)])
def test_the_numbers_of_segments_do_not_matter(number: Callable[[Tensor], Tensor]):
    for order in (lambda n: n, lambda n: n.sort().values):  # mixed, and packed: most strips and tiles hold one alone
        operands = operands_of(2, 1, 190, 190)
        drawn = order(torch.randint(0, 6, (1, 190)))
        wanted = run(operands._replace(query_segments=drawn, key_segments=drawn))
        named = number(drawn)
        assert_same_bits(run(operands._replace(query_segments=named, key_segments=named)), wanted)


# --- cost ------------------------------------------------------------------------------------------------------------

MEMORY = """
import resource, sys, torch
from linbias import BackendUnavailable, alibi_attention, alibi_slopes
from linbias.backends import native, reference
from linbias.semantics.problem import Operands, Options, Problem
torch.set_num_threads(int(sys.argv[1]))
heads, tokens, dim = 32, 8192, 32
slopes = alibi_slopes(heads)[None]
options = Options(causal=True, left=None, right=None, sinks=0, prefix=0, metric=None, scale=dim**-0.5, softcap=None,
                  dropout_p=0.0, tolerance=3e-8, bounds_block=0)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def call(tokens):
    q, k, v = (torch.randn(1, heads, tokens, dim) for _ in range(3))
    operands = Operands(q, k, v, slopes)
    problem = Problem.of(operands, options)
    spare = torch.ones(1, heads, tokens, dim + 4)  # as large as the results, touched and given back
    del spare
    before = peak()
    result = native.forward(problem, operands)
    forward = peak() - before
    spare = torch.ones(3, heads, tokens, dim)  # as large as the gradients
    del spare
    before = peak()
    native.backward(problem, operands, *result[:3], q, None, (True, True, True, False, False))
    return max(forward, peak() - before)
call(64)
print(call(tokens))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux alone")
@pytest.mark.parametrize("threads", ["2", "32"])
def test_working_memory_is_small(threads: str):
    command = [sys.executable, "-c", MEMORY, threads]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert int(done.stdout) < 64 * 1024


def test_why_not_names_its_reason():
    problem = Problem.of(operands_of(2, 1, 3, 5), options())
    assert native.why_not(problem) is None
    assert "CPU tensors" in str(native.why_not(problem._replace(device=torch.device("meta"))))
    assert "float32" in str(native.why_not(problem._replace(dtype=torch.float8_e4m3fn)))
    assert "transformed" in str(native.why_not(problem._replace(features=problem.features | {"transformed"})))


# --- found by attack -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slopes", [(0.02, -0.01), (-0.3, 0.0), (-0.05, -0.2)], ids=str)
def test_negative_slopes_with_gradients_skip_nothing_that_matters(slopes: tuple[float, float]):
    # A share counts 1 + m d times where slopes get a gradient; with m below 0 that once made shares negative.
    torch.manual_seed(5)
    positions = torch.randint(0, 2000, (352,))
    leaves = [torch.randn(1, heads, tokens, 16, dtype=torch.float64) for heads, tokens in ((2, 9), (1, 352), (1, 352))]
    leaves = [leaf.requires_grad_() for leaf in [*leaves, torch.tensor(slopes, dtype=torch.float64)]]

    def gradients(backend: str, tolerance: float) -> tuple[Tensor, ...]:
        options = dict(causal=False, query_positions=positions[-9:], key_positions=positions)
        out = alibi_attention(*leaves, **options, tolerance=tolerance, backend=backend)
        return torch.autograd.grad(out.square().sum(), leaves)

    for found, exact in zip(gradients("native", 1e-9), gradients("reference", 0.0), strict=True):
        assert (found - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("slopes", [(0.02, -0.01), (-0.3, 0.2)], ids=str)
def test_a_soft_cap_does_not_bound_what_a_negative_slope_rewards(slopes: tuple[float, float]):
    # The cap bounds the content of a score, and the reward for distance comes on top.
    torch.manual_seed(6)
    positions = torch.randint(0, 30_000, (1200,))
    leaves = [torch.randn(1, heads, tokens, 16) for heads, tokens in ((2, 100), (1, 1200), (1, 1200))]
    leaves = [leaf.requires_grad_() for leaf in [*leaves, torch.tensor(slopes)]]

    def results(backend: str, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        options = dict(causal=True, query_positions=positions[-100:], key_positions=positions, softcap=3.0)
        out = alibi_attention(*leaves, **options, backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), leaves[:3])

    exact = results("reference", [leaf.detach().double().requires_grad_() for leaf in leaves])
    for found, wanted in zip(results("native", leaves), exact, strict=True):
        assert (found - wanted).abs().max() <= 1e-2 * wanted.abs().max()  # scores of thousands, in single precision


@pytest.mark.parametrize("value_dim", [1, 64, 301])
@pytest.mark.parametrize("dim", [1, 3, 257, 300])
def test_odd_widths(dim: int, value_dim: int):
    Judge.of(
        make_inputs(
            Case(batch=2, heads=6, kv_heads=2, queries=13, keys=130, head_dim=dim, value_dim=value_dim, causal=True)
        )
    ).assert_conforms("native")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_half_types_do_not_read_what_is_hidden(dtype: torch.dtype, value: float):
    query, key, content = (torch.randn(2, heads, 90, 24).to(dtype) for heads in (4, 2, 2))
    real = torch.rand(2, 90) < 0.7
    real[:, 0] = True

    def results(poison: float | None) -> list[Tensor]:
        leaves = [query.clone(), key.clone(), content.clone()]
        if poison is not None:
            for leaf in leaves[1:]:
                leaf[~real[:, None].expand(2, 2, 90)] = poison
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out = alibi_attention(*leaves, alibi_slopes(4), causal=False, key_mask=real, backend="native")
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    for found, wanted in zip(results(value), results(None), strict=True):
        assert found.equal(wanted)


def test_half_precision_far_into_a_long_text():
    # Positions beyond 65,504 do not exist in half precision; here they are integers.
    tokens, rows = 70_000, [0, 299, 40_000, 65_520, 69_999]
    query, key, value = torch.randn(3, 1, 1, tokens, 8).half()
    out = alibi_attention(query, key, value, torch.tensor([0.05]), causal=True, window=(300, 0), backend="native")
    for row in rows:
        near = slice(max(0, row - 300), row + 1)
        last = (query[:, :, row : row + 1], key[:, :, near], value[:, :, near])
        exact = alibi_attention(*(x.double() for x in last), torch.tensor([0.05]), causal=True, backend="reference")
        assert (out[:, :, row] - exact[:, :, 0]).abs().max() <= 2e-3 * value.abs().max()


def test_an_interrupt_waits_for_the_call_and_leaves_the_kernels_usable():
    code = """
import faulthandler, signal, torch
faulthandler.dump_traceback_later(240, exit=True)  # where it hangs, if it does
from linbias import BackendUnavailable, alibi_attention, alibi_slopes
torch.set_num_threads(2)
q = torch.randn(1, 8, 3000, 64)
small = q[:, :, :200]
call = lambda x: alibi_attention(x, x, x, torch.zeros(8), causal=True, backend="native")
wanted = call(small)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, 0.01)
try:
    while True:
        call(q)
except KeyboardInterrupt:
    assert call(small).equal(wanted)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


# --- C++ -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_units_and_fuzz_under_sanitizers(sanitizers: str, tmp_path: Path):
    for tool in ("cmake", "ctest", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    build = ["cmake", "-S", str(ROOT / "csrc/tests"), "-B", str(tmp_path), f"-DLINBIAS_SANITIZE={sanitizers}"]
    subprocess.run(build, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(tmp_path), "-j", "2"], check=True, capture_output=True)
    ctest = ["ctest", "--test-dir", str(tmp_path), "--output-on-failure"]
    done = subprocess.run(ctest, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        (("_REPLACED", ()), "KeyError: 'query'"),  # a name that the kernels need is missing
        (("SUPPORTS", frozenset({"causal", "telepathy"})), "know nothing of telepathy"),  # one that they do not know
    ],
)
def test_kernels_of_other_sources_are_refused_by_name(
    known: tuple[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
):
    name, value = known
    monkeypatch.setattr(native, "OPERAND_NAMES" if name == "_REPLACED" else name, value)
    native._kernels.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match=f"{reason}.* make setup"):
            run(operands_of(1, 1, 3, 4))
    finally:
        native._kernels.cache_clear()


def test_the_kernels_read_what_native_says_it_supports_and_nothing_else():
    names = native._kernels().bind(
        Tensor.__dlpack_c_exchange_api__, OPERAND_NAMES, OPTION_NAMES, Result._fields, Gradients._fields
    )
    given = set(names) - {"query", "key", "value", "slopes"} - set(Result._fields)
    assert given == native.SUPPORTS
    assert native.SUPPORTS <= FEATURES


def test_fields_are_found_by_name_whatever_their_order():
    operands = operands_of(2, 1, 30, 40)
    wanted = run(operands)
    kernels = native._kernels()
    try:
        names = (OPERAND_NAMES[::-1], OPTION_NAMES[::-1], Result._fields[::-1], Gradients._fields)
        kernels.bind(Tensor.__dlpack_c_exchange_api__, *names)
        found = Result(*(torch.full_like(tensor, -1) for tensor in wanted))
        kernels.forward(operands[::-1], options()[::-1], found[::-1], 1, "")
    finally:
        native._kernels.cache_clear()
        native._kernels()
    assert_same_bits(found, wanted)


def test_a_feature_of_tomorrow_is_refused():
    problem = Problem.of(operands_of(2, 1, 3, 5), options())
    assert native.why_not(problem._replace(features=problem.features | {"telepathy"})) == "does not support telepathy"
