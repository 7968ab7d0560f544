# SPDX-License-Identifier: Apache-2.0
"""The reference backend against literal answers and finite differences; against the oracle in test_conformance.py."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from linbias import alibi_attention
from linbias.testing import Case, evaluate, make_inputs


def weights_of(slopes: list[float], queries: int, keys: int, **options) -> torch.Tensor:
    """(H, T, S) softmax weights of flat scores: zero queries, and the identity as value."""
    query = torch.zeros(1, len(slopes), queries, 3, dtype=torch.float64)
    key = torch.zeros(1, 1, keys, 3, dtype=torch.float64)
    value = torch.eye(keys, dtype=torch.float64)[None, None]
    slopes_H = torch.tensor(slopes, dtype=torch.float64)
    return alibi_attention(query, key, value, slopes_H, backend="reference", **options)[0]


def assert_close(found: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=6e-8)


def test_causal_rows_by_hand():
    # e^-1.5 : e^-1 : e^-.5 : 1, and the same for the rows above.
    assert_close(
        weights_of([0.5], 4, 4, causal=True)[0],
        [
            [1, 0, 0, 0],
            [0.3775407, 0.6224593, 0, 0],
            [0.1863237, 0.3071959, 0.5064804, 0],
            [0.1015363, 0.1674051, 0.2760043, 0.4550542],
        ],
    )


def test_symmetric_row_by_hand():
    # Query at 1 of 4, slope 0.25: e^-.25 : 1 : e^-.25 : e^-.5.
    assert_close(weights_of([0.25], 4, 4, causal=False)[0, 1], [0.2461341, 0.3160424, 0.2461341, 0.1916894])


def test_future_slope_by_hand():
    # log 2 back and log 4 ahead, around position 1: 1/2 : 1 : 1/4 : 1/16.
    future = torch.tensor([2 * 0.6931471805599453], dtype=torch.float64)
    row = weights_of([0.6931471805599453], 4, 4, causal=False, future_slopes=future)[0, 1]
    assert_close(row, [8 / 29, 16 / 29, 4 / 29, 1 / 29])


def test_ends_are_aligned():
    # T=2, S=4 causal sees 1110 / 1111; with slope 0 what is seen weighs the same.
    assert_close(weights_of([0.0], 2, 4, causal=True)[0], [[1 / 3] * 3 + [0], [0.25] * 4])
    # More queries than keys: the first see nothing.
    assert_close(weights_of([0.0], 3, 2, causal=True)[0], [[0, 0], [1, 0], [0.5, 0.5]])


def test_infinite_slope_leaves_only_the_own_position():
    row = weights_of([torch.inf], 4, 4, causal=False)[0]
    assert_close(row, torch.eye(4).tolist())
    future = torch.tensor([torch.inf], dtype=torch.float64)
    one_sided = weights_of([0.0], 4, 4, causal=False, future_slopes=future)[0, 1]
    assert_close(one_sided, [0.5, 0.5, 0, 0])


def test_unbiased_tokens_by_hand():
    # The first token gives no bias to the last query, and receives none.
    weights = weights_of([0.5], 4, 4, causal=False, unbiased=1)[0]
    assert_close(weights[0], [0.25] * 4)
    assert_close(weights[3], [0.3362011, 0.1236815, 0.2039163, 0.3362011])


def test_metric_by_hand():
    # A 3-4-5 triangle from the origin, slope log 2: distances 0, 5 or 7, weights 1 : 2^-d.
    points = torch.tensor([[0, 0], [3, 4]])
    for metric, distance in (("euclidean", 5), ("manhattan", 7)):
        options = {"query_positions": points, "key_positions": points, "metric": metric}
        row = weights_of([0.6931471805599453], 2, 2, causal=False, **options)[0, 0]
        assert_close(row, [2**distance / (2**distance + 1), 1 / (2**distance + 1)])


def test_soft_cap_comes_before_the_bias():
    query = torch.tensor([[[[1.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[100.0], [100.0]]]], dtype=torch.float64)
    value = torch.eye(2, dtype=torch.float64)[None, None]
    slope = torch.tensor([0.6931471805599453], dtype=torch.float64)
    out, aux = alibi_attention(
        query, key, value, slope, causal=True, scale=1.0, softcap=2.0, backend="reference", return_aux=True
    )
    # Both products are capped to 2 tanh 50 = 2; the bias halves the farther key; lse = 2 + log 1.5.
    assert_close(out[0, 0, 0], [1 / 3, 2 / 3])
    assert_close(aux.lse[0, 0, 0], 2.4054651081)


def test_lse_of_flat_scores():
    zeros = torch.zeros(1, 1, 4, 2, dtype=torch.float64)
    slope = torch.tensor([0.5], dtype=torch.float64)
    _, aux = alibi_attention(zeros, zeros, zeros, slope, causal=True, backend="reference", return_aux=True)
    assert_close(aux.lse[0, 0, 3], 0.7873387)


def test_gradient_of_a_slope_by_hand():
    # Weights 1/3 and 2/3 (slope log 2, two keys); d P0 / d slope = -P0 P1.
    slope = torch.tensor([0.6931471805599453], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
    value = torch.eye(2, dtype=torch.float64)[None, None]
    out = alibi_attention(zeros, zeros, value, slope, causal=True, backend="reference")
    out[0, 0, 1, 0].backward()
    assert_close(slope.grad, [-2 / 9])


DIFFERENTIABLE = (
    Case(batch=2, heads=2, kv_heads=1, queries=3, keys=4, head_dim=2, value_dim=3, causal=True),
    Case(batch=1, heads=2, queries=3, keys=3, head_dim=2, future="steeper", slopes="items", softcap=1.5),
    Case(batch=2, heads=1, queries=4, keys=3, head_dim=2, causal=True, padding="left", unbiased=1),
    Case(batch=1, heads=2, queries=2, keys=5, head_dim=2, window=(2, 0), mask="full", dropout_p=0.4, segments="mixed"),
    Case(batch=1, heads=2, queries=3, keys=4, head_dim=2, positions="points", metric="euclidean"),
    Case(batch=1, heads=2, queries=3, keys=4, head_dim=2, positions="repeats", slopes="negative", future="press"),
)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=str)
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives_of_first_and_second_order(case: Case, check):
    inputs = make_inputs(replace(case, dtype=torch.float64)).exactly()
    names = [name for name in ("query", "key", "value", "slopes", "future_slopes") if name in inputs.tensors()]

    def call(*leaves):
        with inputs.seeded():
            given = dict(zip(names, leaves, strict=True))
            out, aux = alibi_attention(**given, **inputs.options, backend="reference", return_aux=True)
        return out, torch.where(aux.lse == -torch.inf, 0.0, aux.lse)

    assert check(call, [getattr(inputs, name).detach().requires_grad_() for name in names])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_round_once(dtype: torch.dtype):
    inputs = make_inputs(Case(causal=True, dtype=dtype))
    found, _ = evaluate(inputs)
    wide, _ = evaluate(inputs.exactly(torch.float32))
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        assert found[name].dtype == dtype
        assert found[name].equal(wide[name].to(dtype)), name
    assert found["lse"].equal(wide["lse"]) and found["grad_slopes"].equal(wide["grad_slopes"])


def test_nan_that_is_seen_is_shown():
    inputs = make_inputs(Case(causal=True, batch=1, heads=1))
    key = inputs.key.clone()
    key[0, 0, 20] = torch.nan
    out = alibi_attention(inputs.query, key, inputs.value, inputs.slopes, causal=True, backend="reference")
    # Queries stand at 4..22: those before position 20 cannot see it.
    assert out[0, 0, 16:].isnan().all()
    slope = torch.full((1,), torch.nan)
    out = alibi_attention(inputs.query, inputs.key, inputs.value, slope, causal=True, backend="reference")
    assert out.isnan().all()


def test_functorch_gradients_agree_with_autograd():
    inputs = make_inputs(Case(batch=1, causal=True, dtype=torch.float64)).exactly()
    names = ("query", "key", "value", "slopes")
    leaves = tuple(getattr(inputs, name) for name in names)

    def loss(*leaves):
        return (alibi_attention(*leaves, causal=True, backend="reference") * inputs.grad_out).sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*leaves)
    wanted = torch.autograd.grad(loss(*(leaf.requires_grad_() for leaf in leaves)), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
