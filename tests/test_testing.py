# SPDX-License-Identifier: Apache-2.0
"""The judge is judged: the table covers what it should, and every kind of fault is found."""

from dataclasses import fields, replace

import pytest
import torch

from linbias import backends
from linbias.semantics.problem import Gradients
from linbias.testing import (
    PROBLEMS,
    Case,
    Judge,
    assert_within_budget,
    conform,
    evaluate,
    largest_error,
    make_inputs,
    make_qkv,
)
from linbias.testing.inputs import seen, visible_pairs
from linbias.testing.recompute import recompute


class TestTable:
    def test_ids_read_well_and_never_repeat(self):
        case = Case(queries=5, keys=7, causal=True, dtype=torch.bfloat16)
        assert str(case) == "B2-H3-T5-S7-D16-causal-bf16"
        case = Case(
            heads=6, kv_heads=2, value_dim=9, window=(3, None), sinks=1, softcap=2.0, padding="left", poison=True
        )
        assert str(case) == "B2-H6-G2-T19-S23-D16-V9-window3_-sinks1-padding=left-softcap=2.0-poison-fp32"
        assert len({str(case) for case in PROBLEMS}) == len(PROBLEMS) == len(set(PROBLEMS))

    def test_sizes_and_dtypes(self):
        assert {case.heads for case in PROBLEMS} >= {1, 3, 6, 8}
        assert {case.head_dim for case in PROBLEMS} >= {1, 7, 16, 64, 80, 128, 256}
        assert {case.dtype for case in PROBLEMS} == {torch.float16, torch.bfloat16, torch.float32, torch.float64}
        assert {(case.queries > case.keys) - (case.queries < case.keys) for case in PROBLEMS} == {-1, 0, 1}
        for name in ("batch", "queries", "keys"):
            assert any(getattr(case, name) == 0 for case in PROBLEMS)
        assert {case.heads // (case.kv_heads or case.heads) for case in PROBLEMS} >= {1, 2, 3, 8}
        assert any(case.value_dim not in (None, case.head_dim) for case in PROBLEMS)
        assert sum(case.keys > 300 and case.queries > 100 for case in PROBLEMS) > 10

    def test_every_option_alone_and_in_company(self):
        sizes = {"batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "dtype"}
        options = [each for each in fields(Case) if each.name not in sizes]
        for option in options:
            using = [case for case in PROBLEMS if getattr(case, option.name) != option.default]
            others = [
                {each.name for each in options if each is not option and getattr(case, each.name) != each.default}
                for case in using
            ]
            # With at most the one it needs: a metric its coordinates, poison something that nobody sees.
            assert min(map(len, others)) <= 1, f"{option.name} never comes alone"
            assert max(map(len, others)) >= 2, f"{option.name} never comes in company"

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("padding", {"left", "right", "holes", "shared", "nothing"}),
            ("mask", {"keys", "pairs", "heads", "items", "full"}),
            ("segments", {"packed", "mixed"}),
            (
                "positions",
                {"shifted", "keys", "jumps", "repeats", "unsorted", "items", "far", "away", "grid", "points"},
            ),
            ("metric", {"euclidean", "manhattan"}),
            ("slopes", {"press", "steeper", "zero", "inf", "negative", "mixed", "double", "row", "items"}),
            ("future", {"steeper", "zero", "inf", "negative", "mixed", "double", "row", "items", "press"}),
            ("layout", {"plain", "tokens", "columns", "sliced", "expanded"}),
        ],
    )
    def test_every_word_is_used(self, name: str, words: set[str]):
        assert {getattr(case, name) for case in PROBLEMS} - {None} == words


class TestInputs:
    def test_are_the_same_each_time_and_differ_between_cases(self):
        case = Case(mask="full", slopes="items", positions="points", metric="euclidean", padding="holes")
        first, again, other = make_inputs(case), make_inputs(case), make_inputs(replace(case, spread=1.5))
        for name, tensor in first.tensors().items():
            assert tensor.equal(again.tensors()[name]), name
        assert not first.value.equal(other.value)

    @pytest.mark.parametrize("layout", ["plain", "tokens", "columns", "sliced", "expanded"])
    def test_layouts_are_strides(self, layout: str):
        query, key, value = make_qkv(Case(layout=layout, kv_heads=1, value_dim=9))
        assert query.shape == (2, 3, 19, 16) and key.shape == (2, 1, 23, 16) and value.shape == (2, 1, 23, 9)
        strides = {
            "plain": (3 * 19 * 16, 19 * 16, 16, 1),
            "tokens": (3 * 19 * 16, 16, 3 * 16, 1),
            "columns": (3 * 19 * 16, 19 * 16, 1, 19),
            "sliced": (3 * 22 * 21, 22 * 21, 21, 1),
            "expanded": (0, 0, 16, 1),
        }
        assert query.stride() == strides[layout]
        assert (query.storage_offset() > 0) == (layout == "sliced")
        assert query.isfinite().all()

    def test_poison_lies_where_nothing_looks_and_only_there(self):
        case = Case(heads=6, kv_heads=2, causal=True, window=(4, 0), padding="left", poison=True)
        inputs = make_inputs(case)
        problem, operands = inputs.resolve()
        rows, keys = seen(problem, visible_pairs(problem, operands)[1])
        assert (~rows).any() and (~keys).any()
        for tensor, wanted in (("query", rows), ("grad_out", rows), ("key", keys), ("value", keys)):
            found = getattr(inputs, tensor)
            assert found.isfinite().all(-1).equal(wanted) and not found.isfinite().any(-1)[~wanted].any()
        assert inputs.grad_lse.isfinite().equal(rows)
        assert inputs.key.isnan().any() and inputs.key.isinf().any()

    def test_exact_inputs_keep_the_values(self):
        inputs = make_inputs(Case(dtype=torch.bfloat16, tolerance=0.1, bounds=4))
        exact = inputs.exactly()
        assert exact.query.dtype == exact.slopes.dtype == torch.float64 and exact.query.equal(inputs.query.double())
        assert "tolerance" not in exact.options and exact.bounds == 0
        single = inputs.exactly(torch.float32)
        assert single.query.dtype == single.grad_lse.dtype == torch.float32

    def test_the_generator_is_left_alone(self):
        state = torch.get_rng_state()
        conform(Case(dropout_p=0.3), "reference")
        assert torch.get_rng_state().equal(state)


class TestBudget:
    def test_is_twice_the_plain_error_and_an_eps(self):
        exact = torch.tensor([1.0, -4.0]).double()
        plain = torch.tensor([1.0, -4.0 + 2**-20])
        budget = 2 * 2**-20 + 2**-23 * 4
        assert_within_budget(exact.float() + torch.tensor([budget, 0.0]), exact, plain, "at the budget")
        assert_within_budget(exact.float() + torch.tensor([budget, 0.0]), exact, 2**-20, "by the error itself")
        over = exact.float() + torch.tensor([budget + 2**-23, 0.0])
        with pytest.raises(AssertionError, match=r"far: error .* > budget .* \(plain formula: 9.54e-07\)"):
            assert_within_budget(over, exact, plain, "far")
        assert_within_budget(over, exact, plain, "allowed", allowance=2**-22)

    def test_nothing_that_is_not_a_number_passes(self):
        exact = torch.tensor([1.0, -torch.inf]).double()
        assert_within_budget(exact.float(), exact, 0.0, "infinite in the same place")
        for wrong in ([torch.nan, -torch.inf], [1.0, torch.nan], [1.0, 0.0], [1.0, torch.inf], [torch.inf, -torch.inf]):
            with pytest.raises(AssertionError):
                assert_within_budget(torch.tensor(wrong), exact, 0.0, "wrong")
        with pytest.raises(AssertionError):
            assert_within_budget(torch.tensor([torch.nan]), torch.tensor([torch.nan]).double(), 0.0, "no oracle")

    def test_shapes_must_agree_and_nothing_has_no_error(self):
        with pytest.raises(AssertionError, match=r"shape \(1, 2\), expected \(2,\)"):
            assert_within_budget(torch.zeros(1, 2), torch.zeros(2).double(), 0.0, "wide")
        assert_within_budget(torch.zeros(0), torch.zeros(0).double(), 0.0, "empty")
        assert largest_error(torch.zeros(0), torch.zeros(0)) == 0.0
        assert largest_error(torch.tensor([1.0, 3.0]), torch.tensor([1.5, 3.0])) == 0.5


@pytest.mark.parametrize("case", [case for case in PROBLEMS if case.keys < 60], ids=str)
def test_both_forms_of_the_formula_agree(case: Case):
    """In float64 nothing is left of what distinguishes them; a fault in either would widen every budget."""
    inputs = make_inputs(replace(case, dtype=torch.float64)).exactly()
    autograd, _ = evaluate(inputs)
    by_hand, _ = recompute(inputs, torch.float64)
    assert autograd.keys() == by_hand.keys()
    summands = case.queries * case.keys * case.heads + case.head_dim + (case.value_dim or 0)
    for name, exact in autograd.items():
        finite = exact[exact.isfinite()]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        assert largest_error(by_hand[name], exact) <= summands * torch.finfo(torch.float64).eps * scale, name


FAULTS = {
    "out off by 1e-5": lambda out, lse: (out + 1e-5, lse),
    "out scaled by 1 + 1e-5": lambda out, lse: (out * (1 + 1e-5), lse),
    "one number of out": lambda out, lse: (out.index_fill(3, torch.tensor(5), 0.0), lse),
    "a NaN": lambda out, lse: (out.clone().index_fill_(2, torch.tensor(1), torch.nan), lse),
    "lse off by 1e-5": lambda out, lse: (out, lse + 1e-5),
    "lse of base 2": lambda out, lse: (out, lse / 0.6931472),
    "out rounded twice": lambda out, lse: (out.bfloat16().float(), lse),
    "heads exchanged": lambda out, lse: (out.flip(1), lse),
}
FAULTY = Case(heads=6, kv_heads=2, causal=True, future="steeper", window=(9, 0))
SLOTS = ("query", "key", "value", "slopes", "future_slopes")


class TestFaultsAreFound:
    """`tiled` is sabotaged in turn; whole, it passes."""

    def test_whole(self):
        conform(FAULTY, "tiled")

    @pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
    def test_in_the_results(self, monkeypatch: pytest.MonkeyPatch, fault):
        forward = backends.tiled.forward

        def faulty(problem, operands):
            result = forward(problem, operands)
            out, lse = fault(result.out, result.lse)
            return result._replace(out=out, lse=lse)

        monkeypatch.setattr(backends.tiled, "forward", faulty)
        with pytest.raises(AssertionError, match="on tiled"):
            conform(FAULTY, "tiled")

    @pytest.mark.parametrize("slot", range(5), ids=SLOTS)
    @pytest.mark.parametrize("factor", [1 + 1e-5, -1.0, 0.0])
    def test_in_a_gradient(self, monkeypatch: pytest.MonkeyPatch, slot: int, factor: float):
        backward = backends.tiled.backward

        def faulty(*call):
            found = backward(*call)
            gradients = [getattr(found, name) for name in SLOTS]
            gradients[slot] = gradients[slot] * factor
            return Gradients(*gradients)

        case = FAULTY if slot < 4 else replace(FAULTY, causal=False, window=None)
        monkeypatch.setattr(backends.tiled, "backward", faulty)
        with pytest.raises(AssertionError, match=f"grad_{SLOTS[slot]} on tiled"):
            conform(case, "tiled")

    def test_in_skipped_and_computed(self, monkeypatch: pytest.MonkeyPatch):
        forward = backends.tiled.forward
        for change in ({"skipped": 1e-6}, {"skipped": -1e-9}, {"skipped": torch.nan}, {"computed": 10**9}):

            def faulty(problem, operands, change=change):
                result = forward(problem, operands)
                return result._replace(**{name: getattr(result, name) + more for name, more in change.items()})

            monkeypatch.setattr(backends.tiled, "forward", faulty)
            with pytest.raises(AssertionError, match="skipped|computed"):
                conform(FAULTY, "tiled")

    def test_in_what_it_leaves_of_its_inputs(self, monkeypatch: pytest.MonkeyPatch):
        forward = backends.tiled.forward

        def faulty(problem, operands):
            result = forward(problem, operands)
            operands.key.detach().mul_(1.0001)
            return result

        monkeypatch.setattr(backends.tiled, "forward", faulty)
        with pytest.raises(AssertionError, match="tiled modified key"):
            conform(FAULTY, "tiled")

    def test_a_tolerance_allows_no_more_than_it_says(self, monkeypatch: pytest.MonkeyPatch):
        coarse, forward = replace(FAULTY, tolerance=0.01), backends.tiled.forward
        judge = Judge.of(make_inputs(coarse))
        for error, passes in ((0.004, True), (0.04, False)):

            def faulty(problem, operands, error=error):
                result = forward(problem, operands)
                return result._replace(out=result.out + error * operands.value.abs().max())

            monkeypatch.setattr(backends.tiled, "forward", faulty)
            if passes:
                judge.assert_conforms("tiled")
            else:
                with pytest.raises(AssertionError, match="out on tiled"):
                    judge.assert_conforms("tiled")
