# SPDX-License-Identifier: Apache-2.0
"""Numbers at the ends of their range, in every build of the kernels that this processor runs."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from linbias import alibi_attention
from linbias.backends import native
from linbias.semantics.problem import Operands
from tests.backends.native_calls import grads_of, operands_of, run

pytestmark = [
    pytest.mark.skipif(not native.INSTALLED, reason="the extension was not built: no C++ compiler"),
    pytest.mark.usefixtures("variant"),
]


@pytest.fixture
def flushing():
    """Subnormal floats are read and written as 0 while this is called with True."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor has no such mode")
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 16, 19])  # one by one, by vector, both
def test_half_types_in_every_mode_of_the_processor(flushing, dim: int, dtype: torch.dtype):
    torch.manual_seed(7)
    # Half subnormals are below 6.1e-5; bfloat16 has the range of float, and so the same numbers of either mode.
    given = [(torch.randn(1, 1, 40, dim) * size).to(dtype) for size in (1e-5, 3e-5, 2e-5)]

    def results() -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in given]
        out = alibi_attention(*leaves, torch.tensor([0.1]), causal=True, backend="native")
        return [out, *torch.autograd.grad(out, leaves, torch.full_like(out, 1e-4))]

    wanted = results()
    flushing(True)
    for found, same in zip(results(), wanted, strict=True):
        assert found.equal(same)
    one = torch.full((1, 1, 1, dim), 3e-5, dtype=dtype)
    out = alibi_attention(one, one, one, torch.tensor([0.1]), causal=True, backend="native")
    flushing(False)
    assert out.equal(one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_mode_of_the_caller_is_that_of_all_threads(flushing, threads, dtype: torch.dtype):
    torch.manual_seed(7)
    content = (torch.randn(1, 8, 200, 16) * (3e-5 if dtype == torch.float16 else 1e-39)).to(dtype)
    threads(2)
    call = lambda: alibi_attention(content, content, content, torch.full((8,), 0.1), causal=True, backend="native")  # noqa: E731
    call()  # the threads are born in another mode
    flushing(True)
    wanted = call()
    same = [call().equal(wanted) for _ in range(50)]
    flushing(False)
    assert all(same)


@pytest.mark.parametrize("distance", [10**5, 10**7, 2 * 10**8, 2**40])
@pytest.mark.parametrize("queries", [1, 30])
def test_backward_keeps_its_digits_however_large_lse(distance: int, queries: int):
    # All keys at one distance: each weighs 1 / 16, whatever the bias.
    query, key, value = torch.zeros(1, 1, queries, 8), torch.zeros(1, 1, 16, 8), torch.randn(1, 1, 16, 8)
    places = dict(query_positions=torch.full((queries,), distance), key_positions=torch.zeros(16, dtype=torch.int64))
    value.requires_grad_()
    out = alibi_attention(query, key, value, torch.tensor([0.5]), causal=True, backend="native", **places)  # pyright: ignore
    (found,) = torch.autograd.grad(out.sum(), value)
    assert (found * 16 / queries - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("score", [1e5, -1e7, 3e8])
def test_backward_keeps_its_digits_however_large_the_scores(score: float):
    query, key, value = torch.zeros(1, 1, 30, 8), torch.ones(1, 1, 30, 8), torch.randn(1, 1, 30, 8)
    query[..., 0] = score
    value.requires_grad_()
    out = alibi_attention(query, key, value, torch.tensor([0.0]), causal=False, scale=1.0, backend="native")
    (found,) = torch.autograd.grad(out.sum(), value)
    assert (found - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("distance", [3, 1001, 10**7 + 2])
def test_lse_in_two_numbers_has_twice_the_digits(distance: int, dtype: torch.dtype):
    # 16 equal keys: the maximum and the sum are exact, so that all of the error is that of writing lse down.
    query, key = torch.zeros(1, 1, 1, 8, dtype=dtype), torch.zeros(1, 1, 16, 8, dtype=dtype)
    places = dict(query_positions=torch.tensor([[distance]]), key_positions=torch.zeros(1, 16, dtype=torch.int64))
    found = run(Operands(query, key, key, torch.tensor([[0.5]], dtype=dtype), **places))
    high, low = found.lse.item(), found.lse_low.item()
    assert high == found.lse.new_tensor(high + low).item()
    exact = Fraction(math.log(16)) - Fraction(distance, 2)
    assert abs(Fraction(high) + Fraction(low) - exact) <= torch.finfo(dtype).eps * abs(low) + 2**-52


def test_lse_of_what_is_hidden_has_no_digits():
    hidden = run(operands_of(2, 1, 9, 9)._replace(key_mask=torch.zeros(1, 9, dtype=torch.bool)))
    assert (hidden.lse == -torch.inf).all() and (hidden.lse_low == 0).all()


@pytest.mark.parametrize("queries", [1, 700])
@pytest.mark.parametrize(("score", "size"), [(18.0, 1e30), (19.0, 1e29), (25.0, 1e38), (0.0, 3e38), (3.0, -3e38)])
def test_finite_values_give_finite_results(threads, score: float, size: float, queries: int):
    # The first block decides the maximum, the rest exceeds it by the score: without a new maximum, by e^score.
    keys = 5000 if queries == 1 else 700
    key, query = torch.zeros(1, 1, keys, 8), torch.zeros(1, 1, queries, 8)
    key[:, :, : keys - 70, 0] = score
    query[..., 0] = 1.0
    value = torch.full((1, 1, keys, 8), size)
    value[..., 3] = 1e-20  # beside them small ones keep their digits
    for count in (1, 3):
        threads(count)
        out = alibi_attention(query, key, value, torch.tensor([1e-3]), causal=True, scale=1.0, backend="native")
        assert (out / value[:, :, :1] - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("queries", [9, 1024])
def test_a_soft_cap_does_not_hide_infinity(queries: int):
    torch.manual_seed(0)
    query, (key, value) = torch.randn(1, 1, queries, 16), torch.randn(2, 1, 1, 1024, 16)
    key[:, :, 3] = torch.inf
    slopes = torch.tensor([1.0])
    found = alibi_attention(query, key, value, slopes, causal=True, softcap=5.0, backend="native")
    exact = alibi_attention(query, key, value, slopes, causal=True, softcap=5.0, backend="reference")
    assert found.isnan().equal(exact.isnan()) and exact.isnan().any(-1).sum() >= min(queries, 1021)


@pytest.mark.parametrize("hide", ["key_mask", "attn_mask", "segments"])
@pytest.mark.parametrize("metric", ["euclidean", "manhattan"])
@pytest.mark.parametrize("place", [torch.nan, torch.inf, 1e30])
def test_where_a_hidden_key_stands_reaches_no_gradient(place: float, metric: str, hide: str):
    torch.manual_seed(0)
    given = (*torch.randn(3, 1, 1, 150, 8), torch.tensor([0.3]))
    seen = torch.arange(150) != 70
    masks = {
        "key_mask": dict(key_mask=seen),
        "attn_mask": dict(attn_mask=seen.expand(150, 150)),
        "segments": dict(key_segments=seen.long(), query_segments=torch.ones(150, dtype=torch.int64)),
    }
    places = 10 * torch.randn(150, 2)
    lost = places.clone()
    lost[70] = place
    more = dict(causal=False, metric=metric, query_positions=places, **masks[hide])
    wanted = grads_of("native", "out", *given, key_positions=places, **more)
    for found, same in zip(grads_of("native", "out", *given, key_positions=lost, **more), wanted, strict=True):
        assert found.isfinite().all() and (found - same).abs().max() <= 1e-5 * same.abs().max()


@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.parametrize("name", ["query", "key"])
def test_a_scale_of_zero_keeps_nan(name: str, queries: int):
    torch.manual_seed(0)
    given = dict(query=torch.randn(1, 1, queries, 8), key=torch.randn(1, 1, 300, 8), value=torch.randn(1, 1, 300, 8))
    given[name][:, :, :5] = torch.nan
    both = [
        alibi_attention(*given.values(), torch.tensor([1.0]), causal=True, scale=0.0, backend=backend)
        for backend in ("native", "reference")
    ]
    assert both[0].isnan().equal(both[1].isnan()) and both[0].isnan().any()


FAR = (-(2**63), -(2**63) + 1, -(2**62), -1, 0, 1, 2**62, 2**63 - 2, 2**63 - 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (5, 5), (2**63 - 2, 0), (2**63 - 1, 2**62)], ids=str)
@pytest.mark.parametrize("start", [None, 0, -1, 2**62 - 5], ids=str)  # keys anywhere, or consecutive ones
def test_extreme_distances(causal: bool, window: tuple[int, int] | None, start: int | None):
    keys = torch.tensor(FAR) if start is None else start + torch.arange(9)
    value = torch.eye(9).expand(1, 1, 9, 9)
    for place in (*FAR, -(2**62), 2**62 - 1):
        query = torch.zeros(1, 1, 1, 9)
        out = alibi_attention(
            *(query, torch.zeros(1, 1, 9, 9), value, torch.tensor([0.0])), causal=causal, window=window,
            query_positions=torch.tensor([place]), key_positions=keys, backend="native",
        )  # fmt: skip
        left, right = window or (2**64, 2**64)
        # A distance beyond int64 is the largest there is, and no limit of a window is that far.
        back = [max(-(2**63), min(2**63 - 1, place - key)) for key in keys.tolist()]
        seen = torch.tensor([(b >= 0 or not causal) and -right <= b <= left for b in back]).float()
        assert out[0, 0, 0].equal(seen / seen.sum().clamp(min=1))


def test_coordinates_of_no_dimension_stand_nowhere_apart():
    torch.manual_seed(0)
    given = (*torch.randn(3, 1, 1, 200, 8), torch.tensor([0.7]))
    none = dict(query_positions=torch.zeros(200, 0), key_positions=torch.zeros(200, 0))
    wanted = grads_of("native", "out", *given[:3], torch.tensor([0.0]), causal=False)
    found = grads_of("native", "out", *given, causal=False, metric="euclidean", **none)
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    assert found[3].item() == 0
