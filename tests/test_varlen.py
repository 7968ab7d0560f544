# SPDX-License-Identifier: Apache-2.0
"""Sequences laid end to end against each sequence alone."""

import math

import pytest
import torch

from linbias import alibi_attention, alibi_attention_varlen, alibi_slopes
from tests.every import every_backend

LENGTHS_Q, LENGTHS_K = (3, 0, 5, 1, 2), (4, 3, 5, 7, 0)
HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 8, 10


def bounds(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)


def packed(dtype: torch.dtype = torch.float64, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(sum(LENGTHS_Q) + extra, HEADS, DIM, dtype=dtype),
        torch.randn(sum(LENGTHS_K) + extra, KV_HEADS, DIM, dtype=dtype),
        torch.randn(sum(LENGTHS_K) + extra, KV_HEADS, VALUE_DIM, dtype=dtype),
    )


def varlen(tensors, slopes: torch.Tensor, **options):
    ends = bounds(LENGTHS_Q), bounds(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)
    return alibi_attention_varlen(*tensors, slopes, *ends, **options)


def one_by_one(tensors, slopes: torch.Tensor, rows: dict, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(total_q, H, V) and (H, total_q): each sequence in a call of its own; `rows` are options by token."""
    outs, lses, query_at, key_at = [], [], 0, 0
    for n, (queries, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        places = slice(query_at, query_at + queries), slice(key_at, key_at + keys)
        query_at, key_at = query_at + queries, key_at + keys
        cut = {name: given[places[name.startswith("key")]] for name, given in rows.items()}
        call = [tensor[places[number > 0]].transpose(0, 1)[None] for number, tensor in enumerate(tensors)]
        own = {name: given[n] if getattr(given, "ndim", 0) == 2 else given for name, given in options.items()}
        slope = slopes[n] if slopes.dim() == 2 and len(slopes) > 1 else slopes
        out, aux = alibi_attention(*call, slope, **cut, **own, return_aux=True, backend="reference")
        outs.append(out[0].transpose(0, 1))
        lses.append(aux.lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


OPTIONS = {
    "causal": {"causal": True},
    "symmetric": {"causal": False},
    "window": {"causal": False, "window": (2, 1)},
    "sinks": {"causal": True, "window": (0, 0), "sinks": 2},
    "prefix": {"causal": True, "prefix": 2},
    "unbiased": {"causal": False, "unbiased": 2},
    "capped": {"causal": True, "softcap": 1.5, "scale": 0.7},
    "future": {"causal": False, "future_slopes": 3 * alibi_slopes(HEADS).double()},
}


@every_backend
@pytest.mark.parametrize("slopes", [(HEADS,), (1, HEADS), (len(LENGTHS_Q), HEADS)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_each_sequence_alone(backend: str, slopes: tuple, options: dict):
    tensors, slopes = packed(), torch.rand(slopes, dtype=torch.float64)
    out, aux = varlen(tensors, slopes, **options, backend=backend, return_aux=True)
    expected, lse = one_by_one(tensors, slopes, {}, **options)
    assert out.shape == (sum(LENGTHS_Q), HEADS, VALUE_DIM) and aux.lse.shape == (HEADS, sum(LENGTHS_Q))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(aux.lse, lse)
    assert aux.skipped.shape == aux.lse.shape and aux.computed.shape == (HEADS,)
    assert (out[-2:] == 0).all() and (aux.lse[:, -2:] == -math.inf).all(), "the last sequence has queries and no key"


@every_backend
@pytest.mark.parametrize("per_sequence", [False, True])
def test_options_by_token(backend: str, per_sequence: bool):
    tensors = packed()
    slopes = torch.rand((len(LENGTHS_Q), HEADS) if per_sequence else (HEADS,), dtype=torch.float64)
    rows = {
        "key_mask": torch.rand(sum(LENGTHS_K)) < 0.6,
        "query_positions": torch.randint(0, 9, (sum(LENGTHS_Q),)),
        "key_positions": torch.randint(0, 9, (sum(LENGTHS_K),)).int(),
    }
    options = {"causal": True, "window": (4, 0), "sinks": 1, "unbiased": 1}
    out = varlen(tensors, slopes, **rows, **options, backend=backend)
    torch.testing.assert_close(out, one_by_one(tensors, slopes, rows, **options)[0])


@every_backend
@pytest.mark.parametrize("per_sequence", [False, True])
def test_gradients(backend: str, per_sequence: bool):
    slopes = torch.rand((len(LENGTHS_Q), HEADS) if per_sequence else (HEADS,), dtype=torch.float64)
    leaves = [*packed(), slopes, 2 * slopes]
    found = [leaf.clone().requires_grad_() for leaf in leaves]
    out, aux = varlen(
        found[:3], found[3], causal=False, future_slopes=found[4], backend=backend, return_aux=True, softcap=3.0
    )
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(aux.lse)
    wanted = [leaf.clone().requires_grad_() for leaf in leaves]
    exact, lse = one_by_one(wanted[:3], wanted[3], {}, causal=False, future_slopes=wanted[4], softcap=3.0)
    pairs = [torch.autograd.grad(results, given, (grad_out, grad_lse)) for results, given in
             (((out, aux.lse), found), ((exact, lse), wanted))]  # fmt: skip
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


@every_backend
@pytest.mark.parametrize("per_sequence", [False, True])
def test_tokens_beyond_the_last_boundary(backend: str, per_sequence: bool):
    query, key, value = packed(extra=3)
    key[-3:], value[-3:], query[-2:] = torch.nan, torch.inf, torch.nan
    slopes = torch.rand((len(LENGTHS_Q), HEADS) if per_sequence else (HEADS,), dtype=torch.float64)
    out, aux = varlen((query, key, value), slopes, causal=False, backend=backend, return_aux=True)
    assert (out[-3:] == 0).all() and (aux.lse[:, -3:] == -math.inf).all()
    torch.testing.assert_close(out[:-3], varlen((query[:-3], key[:-3], value[:-3]), slopes, causal=False))


def test_no_sequences_and_no_tokens():
    slopes, none = alibi_slopes(HEADS), torch.tensor([0])
    out = alibi_attention_varlen(*packed(torch.float32), slopes, none, none, 0, 0, causal=True)
    assert (out == 0).all()
    empty = [torch.zeros(0, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    zeros = torch.tensor([0, 0, 0])
    assert alibi_attention_varlen(*empty, slopes, zeros, zeros, 0, 0, causal=True).shape == (0, HEADS, DIM)
    per_sequence = slopes.expand(2, HEADS)
    assert alibi_attention_varlen(*empty, per_sequence, zeros, zeros, 0, 0, causal=True).shape == (0, HEADS, DIM)


def test_boundaries_of_either_integer_type():
    tensors, slopes = packed(), alibi_slopes(HEADS)
    out = varlen(tensors, slopes, causal=True)
    ends = bounds(LENGTHS_Q, torch.int64), bounds(LENGTHS_K, torch.int64)
    assert out.equal(alibi_attention_varlen(*tensors, slopes, *ends, 5, 7, causal=True))


def test_half_types_and_meta_tensors():
    tensors, slopes = packed(torch.bfloat16), alibi_slopes(HEADS)
    assert varlen(tensors, slopes, causal=True).dtype == torch.bfloat16
    ends = bounds(LENGTHS_Q).to("meta"), bounds(LENGTHS_K).to("meta")
    for rows in (slopes, slopes.expand(len(LENGTHS_Q), HEADS)):
        out, aux = alibi_attention_varlen(
            *(tensor.to("meta") for tensor in tensors), rows.to("meta"), *ends, 5, 7, causal=True, return_aux=True
        )
        assert out.shape == (sum(LENGTHS_Q), HEADS, VALUE_DIM) and aux.lse.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"query": torch.zeros(1, 4, 3, 2)},
            ValueError,
            "query must have 3 dimensions (total tokens, heads, head dim)",
        ),
        ({"value": torch.zeros(3, 2)}, ValueError, "value must have 3 dimensions"),
        ({"key": None}, TypeError, "key must be a torch.Tensor, got NoneType"),
        ({"slopes": [0.5] * 4}, TypeError, "slopes must be a torch.Tensor, got list"),
        ({"slopes": torch.zeros(3, 4)}, ValueError, "slopes must have shape (4,), (1, 4) or (2, 4)"),
        ({"slopes": torch.zeros(2, 1, 4)}, ValueError, "slopes must have shape (4,), (1, 4)"),
        ({"future_slopes": torch.zeros(5)}, ValueError, "future_slopes must have shape (4,), (1, 4)"),
        ({"future_slopes": 0.5}, TypeError, "future_slopes must be a torch.Tensor, got float"),
        ({"cu_seqlens_q": [0, 1, 3]}, TypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
        ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q must be int32 or int64, got torch.float32"),
        ({"cu_seqlens_k": torch.zeros(3).short()}, TypeError, "cu_seqlens_k must be int32 or int64, got torch.int16"),
        ({"cu_seqlens_k": torch.zeros(1, 3).int()}, ValueError, "cu_seqlens_k must have shape (sequences + 1,)"),
        ({"cu_seqlens_q": torch.zeros(0).int()}, ValueError, "cu_seqlens_q must have shape (sequences + 1,)"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, ValueError, "must bound the same sequences, got 1 and 2"),
        ({"max_seqlen_q": 2.5}, ValueError, "max_seqlen_q must be an int >= 0, got 2.5"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be an int >= 0, got -1"),
        ({"query_positions": torch.arange(3)}, ValueError, "query_positions and key_positions must be given together"),
        ({"unbiased": -1}, ValueError, "unbiased must be an int >= 0, got -1"),
        ({"key_mask": torch.ones(4).bool()}, ValueError, "key_mask must have shape (3,)"),
        ({"key_mask": torch.ones(4).bool(), "slopes": torch.zeros(2, 4)}, ValueError, "key_mask must have shape (3,)"),
        ({"key_mask": torch.ones(3), "slopes": torch.zeros(2, 4)}, TypeError, "key_mask must be bool, True = real"),
        ({"query_positions": torch.arange(3), "key_positions": torch.arange(4)}, ValueError, "key_positions must have"),
        (
            {"query_positions": torch.arange(3), "key_positions": torch.arange(4), "slopes": torch.zeros(2, 4)},
            ValueError,
            "key_positions must have shape (3,)",
        ),
        (
            {"query_positions": torch.zeros(3), "key_positions": torch.arange(3), "slopes": torch.zeros(2, 4)},
            TypeError,
            "query_positions must be integers, got torch.float32",
        ),
        ({"window": 3}, ValueError, "window must be None or (left, right), got 3"),
    ],
)
def test_errors(change: dict, error: type[Exception], says: str):
    tokens = torch.zeros(3, 4, 2)
    ends = torch.tensor([0, 1, 3])
    arguments = {"query": tokens, "key": tokens, "value": tokens, "slopes": torch.zeros(4), "cu_seqlens_q": ends,
                 "cu_seqlens_k": ends, "max_seqlen_q": 2, "max_seqlen_k": 2, "causal": True}  # fmt: skip
    with pytest.raises(error) as caught:
        alibi_attention_varlen(**(arguments | change))
    assert says in str(caught.value)


def test_a_longest_sequence_that_is_not_the_longest():
    """Slopes by sequence pad to max_seqlen: more does no harm, and less would leave tokens out."""
    tensors, slopes = packed(), torch.rand(len(LENGTHS_Q), HEADS, dtype=torch.float64)
    ends = bounds(LENGTHS_Q), bounds(LENGTHS_K)
    larger = alibi_attention_varlen(*tensors, slopes, *ends, 9, 11, causal=True)
    torch.testing.assert_close(larger, varlen(tensors, slopes, causal=True))
    longest = max(LENGTHS_Q), max(LENGTHS_K)
    for short, name in ((0, "max_seqlen_q"), (1, "max_seqlen_k")):
        given = [count - (n == short) for n, count in enumerate(longest)]
        with pytest.raises(ValueError, match=f"{name} must be at least the longest sequence's {longest[short]} tokens"):
            alibi_attention_varlen(*tensors, slopes, *ends, *given, causal=True)


@every_backend
@pytest.mark.parametrize("per_sequence", [False, True])
def test_a_query_without_keys_never_leaks(backend: str, per_sequence: bool):
    query, key = torch.randn(5, 2, 4), torch.randn(3, 2, 4)
    query[0] = torch.nan  # the only token of the first sequence, which has no keys
    slopes = torch.rand((3, 2) if per_sequence else (2,))
    ends = torch.tensor([0, 1, 2, 5]), torch.tensor([0, 0, 1, 3])
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, key, slopes)]
    out = alibi_attention_varlen(*leaves, *ends, 3, 2, causal=False, backend=backend)
    out.sum().backward()
    assert (out[0] == 0).all() and out.isfinite().all()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("slopes", [(2,), (3, 2)], ids=str)
@pytest.mark.parametrize("ends", [[3, 5, 6, 8], [0, 5, 4, 8], [0, -1, 4, 8], [0, 2, 4, 20]], ids=str)
def test_boundaries_that_do_not_fit_are_refused_by_name(slopes, ends):
    tokens, good, wrong = torch.zeros(8, 2, 4), torch.tensor([0, 2, 4, 8]), torch.tensor(ends, dtype=torch.int32)
    for name, given in (("cu_seqlens_q", (wrong, good)), ("cu_seqlens_k", (good, wrong))):
        with pytest.raises(ValueError, match=f"{name} must start with 0, never fall, and end at the 8 tokens"):
            alibi_attention_varlen(tokens, tokens, tokens, torch.ones(slopes), *given, 8, 8, causal=True)


@every_backend
@pytest.mark.parametrize("sequences", [0, 1, 2])
def test_sequences_without_queries_give_rows_of_zero(backend, sequences):
    """Slopes by sequence, and every row is beyond the last boundary."""
    query, key = torch.randn(3, 2, 4, requires_grad=True), torch.randn(5, 2, 4)
    ends = torch.zeros(sequences + 1, dtype=torch.int32), torch.linspace(0, 4 if sequences else 0, sequences + 1).int()
    slopes = torch.rand(sequences, 2)
    out, aux = alibi_attention_varlen(
        query, key, key, slopes, *ends, 0, 4, causal=True, backend=backend, return_aux=True
    )
    assert out.shape == (3, 2, 4) and (out == 0).all() and (aux.lse == -math.inf).all() and (aux.skipped == 0).all()
    out.sum().backward()
    assert (query.grad == 0).all()


@pytest.mark.parametrize(("lengths_q", "lengths_k"), [((0, 0), (3, 5)), ((3, 5), (0, 0)), ((0, 0), (0, 0))])
def test_tensors_without_tokens_have_a_gradient_under_slopes_by_sequence(lengths_q, lengths_k):
    leaves = [
        torch.randn(sum(lengths), heads, DIM, requires_grad=True)
        for lengths, heads in ((lengths_q, HEADS), (lengths_k, KV_HEADS), (lengths_k, KV_HEADS))
    ]
    slopes = torch.rand(2, HEADS, requires_grad=True)
    out = alibi_attention_varlen(*leaves, slopes, bounds(lengths_q), bounds(lengths_k), 5, 5, causal=True)
    for leaf, gradient in zip((*leaves, slopes), torch.autograd.grad(out.sum(), (*leaves, slopes)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))
