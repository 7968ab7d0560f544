# SPDX-License-Identifier: Apache-2.0
"""From what the user said to what a backend is given: two spellings of the options that must stay one."""

import inspect
import re
from typing import get_type_hints

import pytest
import torch
from torch import Tensor

import linbias.prepare
from linbias import alibi_attention, alibi_slopes
from linbias.prepare import OPTION_KEYS, AttentionOptions, check_inputs, prepare
from linbias.semantics.problem import TRANSFORMED, Problem
from tests.every import every_backend

INPUTS = ("query", "key", "value", "slopes")
# How the call is run, and what it returns: no part of what is computed.
APART = {"backend", "return_aux"}
SIGNATURE = inspect.signature(alibi_attention).parameters
OPTIONS = {name: given for name, given in SIGNATURE.items() if name not in INPUTS and name not in APART}
DEFAULTS = {name: given.default for name, given in OPTIONS.items() if given.default is not inspect.Parameter.empty}


def test_the_options_are_those_of_the_operation():
    assert set(OPTIONS) == OPTION_KEYS
    hints, operation = get_type_hints(AttentionOptions), get_type_hints(alibi_attention)
    assert {name: hints[name] for name in OPTIONS} == {name: operation[name] for name in OPTIONS}
    assert all(given.kind is inspect.Parameter.KEYWORD_ONLY for given in OPTIONS.values())
    assert set(OPTIONS) - set(DEFAULTS) == AttentionOptions.__required_keys__ == {"causal"}


def test_what_is_left_out_is_what_the_signature_says():
    call = (torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 6), alibi_slopes(3))
    plain, written = (prepare(*call, {"causal": True, **more}) for more in ({}, DEFAULTS))
    assert plain[0] == written[0]
    for one, other in zip(plain[1], written[1], strict=True):
        assert one is other or one.equal(other)


def test_every_option_and_every_default_is_documented():
    text = inspect.getdoc(alibi_attention)
    described = re.split(r"\n    (?=\w[\w, ]*:)", text[text.index("Args:") : text.index("Returns:")])[1:]
    documented = {name: entry for entry in described for name in entry.partition(":")[0].split(", ")}
    assert set(documented) == set(SIGNATURE)
    for name, default in DEFAULTS.items():
        # A default of None, 0 or 0.0 is "not used", unless it stands for a number.
        stands_for = {"scale": "1 / sqrt(D)", "tolerance": "a quarter of the", "future_slopes": "the same"}
        if name in stands_for:
            assert default is None and f"default: {stands_for[name]}" in documented[name].replace(
                "default 1", "default: 1"
            )
        else:
            assert default in (None, 0, 0.0), f"{name} has the default {default!r}, which its text must name"


class TestLayout:
    """(batch, tokens, heads, head dim) is the commonest mistake: the message says so before anything else."""

    QUERY = torch.zeros(2, 33, 8, 4)

    @every_backend
    def test_is_named_first(self, backend: str):
        with pytest.raises(ValueError) as caught:
            alibi_attention(self.QUERY, self.QUERY, self.QUERY, alibi_slopes(8), causal=True, backend=backend)
        assert str(caught.value) == (
            "query must have layout (batch, heads, tokens, head dim), got (2, 33, 8, 4): its third size, not its "
            "second, 33, is the number of slopes, 8; pass query.transpose(1, 2), and key and value likewise"
        )

    def test_is_named_first_with_grouped_heads(self):
        grouped = torch.zeros(2, 33, 2, 4)
        for slopes in (alibi_slopes(8), alibi_slopes(8)[None], alibi_slopes(8).expand(2, 8)):
            with pytest.raises(ValueError, match="query must have layout"):
                alibi_attention(self.QUERY, grouped, grouped, slopes, causal=True)

    def test_is_named_first_where_the_tokens_differ(self):
        """A decode step, or cross-attention: tokens read as heads do not divide."""
        for queries, keys in ((1, 33), (7, 33), (33, 7)):
            query, key = self.QUERY[:, :queries], self.QUERY[:, :keys]
            with pytest.raises(ValueError, match="query must have layout"):
                alibi_attention(query, key, key, alibi_slopes(8), causal=True)

    def test_is_not_blamed_for_other_mistakes(self):
        right = self.QUERY.transpose(1, 2)
        with pytest.raises(ValueError, match=r"slopes must have shape \(8,\)") as caught:
            alibi_attention(right, right, right, alibi_slopes(7), causal=True)
        assert "layout" not in str(caught.value)
        square = torch.zeros(2, 8, 8, 4)  # either could be the heads, and nothing is wrong
        alibi_attention(square, square, square, alibi_slopes(8), causal=True)


def test_a_tensor_for_slopes_is_all_that_the_layout_asks():
    query = torch.zeros(2, 3, 5, 4)
    for wrong in ([0.5, 0.25, 0.1], None, 0.5):
        with pytest.raises(TypeError, match="slopes must be a torch.Tensor"):
            alibi_attention(query, query, query, wrong, causal=True)


def test_inputs_alone_are_checked_without_slopes():
    query: Tensor = torch.zeros(2, 33, 8, 4)
    with pytest.raises(ValueError, match="query heads must be a positive multiple of key/value heads, got 33 and 2"):
        check_inputs(query, query[:, :2], query[:, :2])


# --- what is known of the call before --------------------------------------------------------------------------------


def call(**options: object) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, object]]:
    query, key, value = torch.zeros(1, 3, 5, 7), torch.zeros(1, 3, 11, 7), torch.zeros(1, 3, 11, 13)
    return query, key, value, alibi_slopes(3), {"causal": True, **options}


def test_the_same_call_again_is_not_checked_again_and_says_the_same():
    (first, before), (second, after) = prepare(*call(softcap=2.5)), prepare(*call(softcap=2.5))
    assert second is first
    for one, two in zip(before, after, strict=True):
        assert (one is None and two is None) or (one.equal(two) and one.shape == two.shape)
    rows = list(call(softcap=2.5))
    rows[3] = rows[3][None]
    assert prepare(*rows)[1].slopes is rows[3]


@pytest.mark.parametrize(
    ("options", "wrong"), [({}, {"causal": 1}), ({"sinks": 1}, {"sinks": True}), ({"scale": 1.0}, {"scale": True})]
)
def test_what_is_equal_to_something_known_is_still_checked(options: dict[str, object], wrong: dict[str, object]):
    prepare(*call(**options))
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        prepare(*call(**wrong))


def test_tensors_that_differ_from_the_known_are_still_checked():
    query, key, value, slopes, options = call()
    prepare(query, key, value, slopes, options)
    for place, other in ((0, query.double()), (1, key[:, :, 1:]), (2, value.to("meta")), (3, slopes.half())):
        changed = [query, key, value, slopes]
        changed[place] = other
        with pytest.raises((TypeError, ValueError)):
            prepare(*changed, options)
    assert prepare(query, key, value, slopes.double(), options)[1].slopes.dtype == torch.float32


def test_what_torch_is_doing_belongs_to_a_call():
    known, _ = prepare(*call())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert prepare(*call())[0].dtype == torch.bfloat16
    query, key, value, slopes, options = call()
    seen: list[Problem] = []
    torch.func.grad(lambda q: seen.append(prepare(q, key, value, slopes, options)[0]) or q.sum())(query)
    assert seen.pop().features == known.features | {TRANSFORMED}


def test_a_call_that_was_only_explained_lends_no_problem_to_one_that_drops():
    prepare(*call(dropout_p=0.5), draw=False)
    assert prepare(*call(dropout_p=0.5))[1].seed is not None


def test_what_is_known_stays_small():
    for scale in range(1000):
        prepare(*call(scale=float(scale)))
    assert len(linbias.prepare._KNOWN) <= linbias.prepare._MOST_KNOWN
