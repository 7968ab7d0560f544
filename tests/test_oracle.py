# SPDX-License-Identifier: Apache-2.0
"""The oracle pinned by literal answers, and the backends against it where the table of problems does not go.

`tests/backends/test_conformance.py` holds every backend against it on every problem of that table.
"""

import math
import re
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from linbias.testing import Case, Inputs, Judge, evaluate, largest_error, make_inputs
from tests.every import every_backend
from tests.judged import answers, assert_rounded, judged
from tests.oracle import Call, attend, bias, philox4x32

# What is known to be wrong today, by the name of the test. Strict: whoever mends one removes its line.
KNOWN: dict[str, str] = {}


@pytest.fixture(autouse=True)
def expect_known_faults(request: pytest.FixtureRequest) -> None:
    for name, fault in KNOWN.items():
        if re.search(name, request.node.name):
            request.applymarker(pytest.mark.xfail(strict=True, reason=fault))


# The examples of docs/semantics.md, in its order: queries, keys, options of the call, rows.
LAST = [0.1015, 0.1674, 0.2760, 0.4551]
EXAMPLES = [
    (4, 4, {"causal": True}, [[1, 0, 0, 0], [0.3775, 0.6225, 0, 0], [0.1863, 0.3072, 0.5065, 0], LAST]),
    (3, 3, {}, [[0.5065, 0.3072, 0.1863], [0.2741, 0.4519, 0.2741], [0.1863, 0.3072, 0.5065]]),
    (3, 3, {"future_slopes": [math.inf]}, [[1, 0, 0], [0.3775, 0.6225, 0], [0.1863, 0.3072, 0.5065]]),
    (3, 3, {"unbiased": 1}, [[0.3333] * 3, [0.3837, 0.3837, 0.2327], [0.3837, 0.2327, 0.3837]]),
    (2, 4, {"causal": True}, [[0.1863, 0.3072, 0.5065, 0], LAST]),
    (1, 3, {"causal": True, "key_positions": [0, 5, 9]}, [[0.0097, 0.1180, 0.8723]]),
    (1, 3, {"causal": True, "key_positions": [9, 0, 5], "query_positions": [9]}, [[0.8723, 0.0097, 0.1180]]),
    (1, 5, {"causal": True, "window": (1, 0)}, [[0, 0, 0, 0.3775, 0.6225]]),
    (1, 5, {"causal": True, "window": (1, 0), "sinks": 1}, [[0.0777, 0, 0, 0.3482, 0.5741]]),
    (1, 5, {"causal": True, "window": (1, 0), "sinks": 1, "key_mask": [False, True, True, True, True]},
     [[0, 0.1220, 0, 0.3315, 0.5465]]),
    (1, 5, {"causal": True, "key_mask": [False, False, True, True, True]}, [[0, 0, 0.1863, 0.3072, 0.5065]]),
    # Not on that page, by hand: e^-.5, e^-1 and e^-2 beside 1.
    (3, 2, {"causal": True}, [[0, 0], [1, 0], [0.3775, 0.6225]]),
    (2, 3, {"causal": True, "prefix": 2, "query_positions": [0, 1]}, [[0.6225, 0.3775, 0], [0.3775, 0.6225, 0]]),
    (1, 3, {"causal": True, "query_positions": [1], "key_positions": [1, 2, 1]}, [[0.5, 0, 0.5]]),
    (2, 2, {"metric": "manhattan", "query_positions": [[0, 0], [3, 1]], "key_positions": [[0, 0], [3, 1]]},
     [[0.8808, 0.1192], [0.1192, 0.8808]]),
    (1, 2, {"metric": "euclidean", "query_positions": [[0, 0]], "key_positions": [[0, 0], [3, 4]]}, [[0.9241, 0.0759]]),
    (3, 4, {"causal": True, "window": (0, 0), "sinks": 1, "query_segments": [7, 7, 2], "key_segments": [7, 2, 7, 2]},
     [[1, 0, 0, 0], [0.2689, 0, 0.7311, 0], [0, 0.2689, 0, 0.7311]]),
]  # fmt: skip


def weights(queries: int, keys: int, slope: float = 0.5, **options) -> np.ndarray:
    """(T, S): what each key weighs when all scores are 0, read off with the identity as value."""
    flat, value = torch.zeros(1, 1, max(queries, keys), 2), torch.eye(keys)[None, None]
    options = {name: torch.tensor(given) if isinstance(given, list) else given for name, given in options.items()}
    options = {"causal": False} | options
    return attend(flat[:, :, :queries], flat[:, :, :keys], value, torch.tensor([slope]), **options)["out"][0, 0]


@pytest.mark.parametrize(("queries", "keys", "options", "rows"), EXAMPLES, ids=str)
def test_the_examples_of_the_page(queries: int, keys: int, options: dict, rows: list):
    np.testing.assert_allclose(weights(queries, keys, **options), rows, rtol=0, atol=5e-5)


def test_log_sum_exp_and_gradients_by_hand():
    # Slope log 2, two keys: the last row weighs them 1/3 and 2/3, and dP0 = P0 P1 d(score0 - score1).
    query, key = torch.zeros(1, 1, 2, 1), torch.tensor([1.0, 3.0]).reshape(1, 1, 2, 1)
    value, slope = torch.eye(2)[None, None], torch.tensor([math.log(2)], dtype=torch.float64)
    first, none = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2)
    first[..., 1, 0] = 1.0
    found = attend(query, key, value, slope, grad_out=first, grad_lse=none, scale=1.0, causal=True)
    np.testing.assert_allclose(found["lse"], [[[0, math.log(1.5)]]], atol=1e-15)
    np.testing.assert_allclose(found["grad_slopes"], [-2 / 9], atol=1e-15)
    np.testing.assert_allclose(found["grad_query"].ravel(), [0, 2 / 9 * (1 - 3)], atol=1e-15)
    np.testing.assert_allclose(found["grad_value"][0, 0], [[1 / 3, 0], [2 / 3, 0]], atol=1e-15)
    assert (found["grad_key"] == 0).all(), "the query is 0"
    of_lse = attend(query + 2, key, value, slope, grad_out=0 * first, grad_lse=none + 1, scale=0.0, causal=True)
    np.testing.assert_allclose(of_lse["grad_slopes"], [-1 / 3], atol=1e-15)
    assert (of_lse["grad_value"] == 0).all() and (of_lse["grad_query"] == 0).all()
    of_key = attend(query + 2, 0 * key, value, slope, grad_out=0 * first, grad_lse=none + 1, scale=0.5, causal=True)
    np.testing.assert_allclose(of_key["grad_key"].ravel(), [4 / 3, 2 / 3], atol=1e-15)


def test_a_cap_comes_before_the_bias_and_heads_share_keys_in_order():
    query, key = torch.ones(1, 4, 1, 1), torch.tensor([100.0, 100.0]).reshape(1, 1, 2, 1).repeat(1, 2, 1, 1)
    value = torch.tensor([[0.0, 3.0], [0.0, 30.0]]).reshape(1, 2, 2, 1)
    found = attend(query, key, value, torch.full((4,), math.log(2)), causal=True, scale=1.0, softcap=2.0)
    # Both products are capped to 2; the bias halves the farther key.
    np.testing.assert_allclose(found["out"].ravel(), [2, 2, 20, 20], rtol=1e-7)
    np.testing.assert_allclose(found["lse"], 2 + math.log(1.5), rtol=1e-7)


def test_distances_are_exact_from_one_end_of_the_integers_to_the_other():
    ends, slope = np.array([-(2**63), 0, 2**63 - 1]), np.array([2.0**-60])
    call = Call(shape=(1, 1, 3, 3), causal=True, window=(2**63 - 1, 0), query_positions=ends, key_positions=ends)
    distance, later = call.distances()
    exact = [[abs(one - other) for other in ends.tolist()] for one in ends.tolist()]
    assert distance[0, 0].tolist() == exact and later[0, 0].tolist() == np.triu(np.ones((3, 3), bool), 1).tolist()
    assert call.visible()[0, 0].tolist() == [[True, False, False], [False, True, False], [False, True, True]]
    assert bias(call, slope)[0, 0].astype(float).tolist() == [[0, 8, 16], [8, 0, 8], [16, 8, 0]]
    assert bias(call, slope, np.array([math.inf]))[0, 0, 0].tolist() == [0, math.inf, math.inf]


def test_a_row_that_sees_nothing_and_keys_that_nothing_sees():
    nan = torch.full((1, 1, 2, 3), math.nan)
    found = attend(nan, nan, nan, torch.ones(1), grad_out=nan, grad_lse=nan[..., 0], causal=False, window=(0, 0),
                   query_positions=torch.tensor([5, 9]))  # fmt: skip
    assert (found.pop("lse") == -math.inf).all()
    assert len(found) == 5 and all((each == 0).all() for each in found.values())


def test_dropout_keeps_what_the_published_generator_says():
    shape, p, seed = (2, 3, 5, 7), 0.4, 0x0123456789ABCDEF
    kept = Call(shape=shape, causal=False, dropout_p=p).kept(seed)
    for b, h, i, j in np.ndindex(shape):
        words = philox4x32((j // 4, i, h, b), (seed % 2**32, seed >> 32))
        assert kept[b, h, i, j] == (words[j % 4] >= math.floor(p * 2**32))
    shares = weights(4, 4, dropout_p=0.5, seed=3) / weights(4, 4)
    assert set(shares.ravel().tolist()) == {0.0, 2.0}


RULES = Case(
    heads=6,
    kv_heads=2,
    queries=21,
    causal=True,
    window=(6, 3),
    sinks=2,
    prefix=4,
    padding="holes",
    mask="items",
    segments="packed",
    slopes="items",
    future="steeper",
    unbiased=2,
    scale=0.3,
    softcap=4.0,
    dropout_p=0.2,
)
WRONG = {
    "window, left": lambda given: {"window": (5, 3)},
    "window, right": lambda given: {"window": (6, 4)},
    "window none": lambda given: {"window": None},
    "sinks": lambda given: {"sinks": 1},
    "prefix": lambda given: {"prefix": 5},
    "causal": lambda given: {"causal": False},
    "causal on ties": lambda given: {"attn_mask": given.options["attn_mask"] & ~torch.eye(21, 23).roll(2, 1).bool()},
    "key mask": lambda given: {"key_mask": torch.ones(23, dtype=torch.bool)},
    "one key of the mask": lambda given: {"key_mask": given.options["key_mask"] ^ (torch.arange(23) == 20)},
    "attention mask": lambda given: {"attn_mask": None},
    "segments": lambda given: {"query_segments": None, "key_segments": None},
    "ends aligned": lambda given: {"query_positions": torch.arange(21), "key_positions": torch.arange(23)},
    "unbiased": lambda given: {"unbiased": 1},
    "scale": lambda given: {"scale": None},
    "cap": lambda given: {"softcap": None},
    "chance to drop": lambda given: {"dropout_p": 0.25},
    "seed": lambda given: {"seed": given.seed + 1},
    "slopes of heads": lambda given: {"slopes": given.slopes.flip(1)},
    "slopes of items": lambda given: {"slopes": given.slopes.flip(0)},
    "sides": lambda given: {"future_slopes": given.slopes},
    "groups": lambda given: {"key": given.key.flip(1)},
    "values of groups": lambda given: {"value": given.value.flip(1)},
    "a metric": lambda given: {"metric": "manhattan"},
}


def changed(inputs: Inputs, **changes) -> Inputs:
    """Fields and options of a call replaced, by name."""
    own = {name: changes.pop(name) for name in list(changes) if hasattr(inputs, name)}
    return replace(inputs, **own, options=inputs.options | changes)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_broken_rule_is_caught(wrong):
    inputs = make_inputs(Case(positions="points", metric="euclidean") if wrong is WRONG["a metric"] else RULES)
    judge = judged(inputs)
    judge.assert_conforms("reference")
    broken = replace(judge, exact=answers(changed(inputs, **wrong(inputs))))
    with pytest.raises(AssertionError, match="(out|lse) on reference: error"):
        broken.assert_conforms("reference")


LONG = (
    Case(batch=1, heads=3, queries=1501, keys=1733, causal=True, spread=2.0),
    Case(batch=1, heads=3, kv_heads=1, queries=1511, keys=1487, value_dim=9, causal=True, window=(301, 0), sinks=5,
         prefix=37, padding="holes", segments="packed", slopes="mixed", future="steeper", poison=True),
    Case(batch=1, heads=5, kv_heads=1, queries=709, keys=803, slopes="mixed", future="negative", unbiased=3,
         mask="keys", padding="left", poison=True),
    Case(batch=1, heads=2, queries=1013, keys=1001, positions="points", metric="euclidean", slopes="double"),
    Case(batch=1, heads=2, queries=907, keys=911, causal=True, positions="far", dropout_p=0.2, softcap=9.0),
    Case(batch=3, heads=4, kv_heads=2, queries=3, keys=3001, causal=True, padding="left", slopes="items", sinks=3,
         window=(2000, 0), poison=True),
    Case(batch=1, heads=1, queries=2503, keys=2999, causal=True, window=(1000, 0), sinks=9, positions="jumps"),
)  # fmt: skip


@lru_cache(maxsize=1)  # the backends of one problem follow each other
def judge_of(case: Case) -> Judge:
    return judged(make_inputs(case))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case.queries > 1400)) for case in LONG], ids=str
)
def test_long_calls(case: Case, dtype: torch.dtype, backend: str):
    judge_of(replace(case, dtype=dtype)).assert_conforms(backend)


@lru_cache(maxsize=1)
def judges_from(start: int) -> list[Judge]:
    keys = torch.arange(700) + start
    places = {"query_positions": keys[33:], "key_positions": keys, "slopes": torch.tensor([0.1])}
    cases = [
        Case(batch=1, heads=1, queries=667, keys=700, dtype=dtype, **options)
        for dtype in (torch.float64, torch.float32)
        for options in ({"causal": True}, {"sinks": 2, "window": (5, 5)})
    ]
    return [judged(changed(make_inputs(case), **places)) for case in cases]


# Seconds in nanoseconds, and both ends of int64: a double tells none of these positions from its neighbours.
@every_backend
@pytest.mark.parametrize("start", [1_700_000_000_000_000_000, 2**63 - 700, -(2**63)])
def test_positions_that_no_double_holds(start: int, backend: str):
    for judge in judges_from(start):
        judge.assert_conforms(backend)


@every_backend
def test_thousands_of_positions_that_no_double_holds(backend: str):
    inputs = make_inputs(Case(batch=1, heads=1, queries=2000, keys=2000, causal=True, window=(10, 0)))
    places = dict.fromkeys(("query_positions", "key_positions"), torch.arange(2000) + 1_700_000_000_000_000_000)
    inputs = changed(inputs, slopes=torch.tensor([0.1]), **places)
    found, exact = evaluate(inputs, backend)[0], answers(inputs)
    for name in ("out", "lse"):
        assert_close(found[name], exact[name], 10.0)


# 2^63 - 1 is the largest difference that int64 holds, but any two positions have a distance.
@every_backend
@pytest.mark.parametrize("far", [2**62, 2**63 - 1, 2**63 + 2**61, 2**64 - 1])
def test_distances_as_large_as_integers_allow(far: int, backend: str):
    last, inputs = 2**63 - 1, make_inputs(Case(batch=1, queries=5, keys=7, dtype=torch.float64))
    queries = torch.tensor([last, last - 5, last - far + 2, last - far, last - far // 2])
    slopes = torch.tensor([0.0, 2.0**-62, 2.0**-61], dtype=torch.float64)
    for steps in ((0, 1, 2, 3, 4, 5, 6), (4, 0, 9, 3, 0, 1, 70)):
        keys = torch.tensor([last - far + step for step in steps])
        for options in ({"causal": True}, {"causal": True, "window": (2**62, None)}, {"window": (None, 5)}):
            given = changed(inputs, slopes=slopes, query_positions=queries, key_positions=keys, **options)
            exact, (found, _) = answers(given), evaluate(given, backend)
            # Its terms are as large as the distances, whatever is left of their sum.
            assert_close(found.pop("grad_slopes"), exact.pop("grad_slopes"), float(far))
            assert_rounded(found, exact, given, torch.float64)


def assert_close(found: torch.Tensor, exact: torch.Tensor, scale: float) -> None:
    """Within 100 roundings of numbers of that size, by the dtype that was found."""
    error = largest_error(found, exact)
    assert error <= 100 * torch.finfo(found.dtype).eps * scale, f"{found.flatten()[:9]} for {exact.flatten()[:9]}"


# All keys weigh the same, so only the log-sum-exp is large; a backward that trusts its rounded value is off.
@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("of", ["bias", "content"])
def test_a_large_log_sum_exp_costs_the_gradient_nothing(of: str, dtype: torch.dtype, backend: str):
    inputs = make_inputs(Case(batch=1, heads=1, queries=5, keys=17, head_dim=1, value_dim=3, scale=1.0, dtype=dtype))
    expected = (inputs.grad_out.double().sum(2, keepdim=True) / 17).expand(1, 1, 17, 3)
    for size in (10**5, 10**7, 2 * 10**8):
        given = changed(
            inputs,
            query=torch.full_like(inputs.query, 1000.0 if of == "content" else 0.0),
            key=torch.full_like(inputs.key, size / 1000),
            slopes=torch.full_like(inputs.slopes, 0.5),
            query_positions=torch.full((5,), size if of == "bias" else 0),
            key_positions=torch.zeros(17, dtype=torch.int64),
        )
        exact, (found, _) = answers(given), evaluate(given, backend)
        assert_close(exact["grad_value"], expected, 1.0)
        assert exact["lse"].abs().min() >= size / 2 - 3
        for name, scale in (("lse", float(size)), ("out", 10.0), ("grad_value", 10.0)):
            assert_close(found[name], exact[name], scale)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_large_log_sum_exp_keeps_what_contents_say(dtype: torch.dtype, backend: str):
    inputs = make_inputs(Case(batch=1, queries=67, keys=71, spread=0.7, dtype=dtype))
    for far in (10**3, 10**6, 10**8):
        places = {"query_positions": torch.full((67,), far), "key_positions": torch.arange(71) % 3}
        judged(changed(inputs, slopes=torch.tensor([0.5, 0.25, 1.0], dtype=dtype), **places)).assert_conforms(backend)


@every_backend
@pytest.mark.parametrize("where", [("value",), ("query", "key")], ids=str)
def test_half_subnormals_are_numbers(where: tuple, backend: str):
    for queries, keys in ((1, 1), (19, 33), (67, 131)):
        inputs = make_inputs(Case(queries=queries, keys=keys, causal=True, dtype=torch.float16))
        small = {name: getattr(inputs, name) * 2.0**-15 for name in where}
        judge = judged(changed(inputs, scale=2.0**26 if "key" in where else 0.25, **small))
        try:
            if not torch.set_flush_denormal(True):
                pytest.skip("this processor cannot flush subnormal numbers")
            judge.assert_conforms(backend)
        finally:
            torch.set_flush_denormal(False)


@every_backend
def test_weights_times_large_values_do_not_overflow(backend: str):
    # The keys that are visited first score 0, the others 18: sums relative to 0 reach 1e39, the results 1e30.
    inputs = make_inputs(Case(batch=1, heads=1, queries=67, keys=211, causal=True))
    keys = torch.full_like(inputs.key, 4.5)
    keys[:, :, 131:] = 0.0
    inputs = changed(inputs, query=torch.ones_like(inputs.query), key=keys, value=torch.full_like(keys, 1e30))
    found, exact = evaluate(inputs, backend)[0], answers(inputs)
    assert exact["out"].sub(1e30).abs().max() < 1e24
    for name in ("out", "lse", "grad_value"):
        assert_close(found[name], exact[name], float(exact[name].abs().max()))


def rows_of_nan(inputs: Inputs, backend: str) -> int:
    """How many rows of out hold NaN; by the oracle and by the backend the same ones."""
    found, exact = evaluate(inputs, backend)[0]["out"], answers(inputs)["out"]
    wanted = exact.isnan().any(-1)
    assert found.isnan().any(-1).equal(wanted), f"{int(found.isnan().any(-1).sum())} rows, not {int(wanted.sum())}"
    finite = torch.where(wanted[..., None], 0.0, exact)
    assert_close(torch.where(wanted[..., None], 0.0, found), finite, 10.0)
    return int(wanted.sum())


@every_backend
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"scale": 0.0}, {"softcap": 5.0, "scale": 0.0}],
    ids=["plain", "a cap", "scale 0", "both"],
)  # fmt: skip
def test_what_is_seen_and_no_number_is_shown(options: dict, backend: str):
    inputs = make_inputs(Case(batch=1, heads=1, queries=307, keys=307, causal=True))
    for content in (math.nan, math.inf):  # a query of both signs makes inf - inf of the second
        key = inputs.key.index_fill(2, torch.tensor(3), content)
        for slope in (0.5, 2.0**-8):
            given = changed(inputs, key=key, slopes=torch.tensor([slope]), **options)
            assert rows_of_nan(given, backend) == 304


@every_backend
def test_an_infinite_product_under_a_cap_is_the_cap(backend: str):
    inputs = make_inputs(Case(batch=1, heads=1, queries=307, keys=307, causal=True, softcap=5.0))
    key = inputs.key.clone()
    key[0, 0, 300, 5] = math.inf
    assert rows_of_nan(changed(inputs, key=key), backend) == 0


@every_backend
@pytest.mark.parametrize("metric", ["euclidean", "manhattan"])
def test_coordinates_of_no_dimension_are_one_place(metric: str, backend: str):
    inputs = make_inputs(Case(metric=metric, positions="grid", dtype=torch.float64))
    inputs = changed(inputs, query_positions=torch.zeros(19, 0), key_positions=torch.zeros(2, 23, 0))
    assert (answers(inputs)["grad_slopes"] == 0).all()
    judged(inputs).assert_conforms(backend)


PLACES = {
    "integers": Case(batch=3, heads=6, kv_heads=2, causal=True, window=(9, 0), sinks=1, segments="packed",
                     positions="items", slopes="items", future="items"),
    "euclidean": Case(batch=3, heads=6, kv_heads=2, positions="points", metric="euclidean", slopes="items"),
    "manhattan": Case(batch=3, heads=6, kv_heads=2, positions="points", metric="manhattan", slopes="items", unbiased=2),
}  # fmt: skip
OF_KEYS = ("key", "value", "key_positions", "key_segments")
OF_ITEMS = ("query", "grad_out", "grad_lse", "query_positions", "query_segments", "slopes", "future_slopes")
ORDERED = ("key_segments", "query_segments", "future_slopes")


@lru_cache(maxsize=1)
def mostly_hidden(places: str) -> tuple[Inputs, torch.Tensor, dict[str, torch.Tensor]]:
    """A call in which a third of the keys is padding and the first item sees nothing; its mask; the answers."""
    mask = (torch.arange(23) % 3 > 0) & (torch.arange(3) > 0)[:, None]
    inputs = changed(make_inputs(PLACES[places]), key_mask=mask)
    return inputs, mask, answers(inputs)


@every_backend
@pytest.mark.parametrize(
    ("places", "operand"),
    [(places, operand) for places in PLACES for operand in OF_KEYS + OF_ITEMS
     if places == "integers" or operand not in ORDERED],
)  # fmt: skip
def test_what_is_hidden_does_not_leak(places: str, operand: str, backend: str):
    inputs, mask, exact = mostly_hidden(places)
    given, contents = inputs.tensors()[operand], (math.nan, math.inf, -math.inf, 1e30)
    if not given.is_floating_point():
        given, contents = given.long(), (1, 2**63 - 1, -(2**63), 2**60)
    real = mask if operand in OF_KEYS else mask.any(1, keepdim=True)
    real = real[:, None] if operand in ("key", "value", "query", "grad_out", "grad_lse") else real
    hidden = ~real.reshape(*real.shape, *(1,) * (given.dim() - real.dim()))
    for content in contents:
        poisoned = changed(inputs, **{operand: given.masked_fill(hidden, content)})
        assert all(one.equal(other) for one, other in zip(answers(poisoned).values(), exact.values(), strict=True))
        assert_rounded(evaluate(poisoned, backend)[0], exact, inputs, torch.float32)
