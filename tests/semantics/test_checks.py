# SPDX-License-Identifier: Apache-2.0
"""Every rule for the arguments, broken once: the message names the argument, the rule, what came and what to do.

Fakes on the meta device stand in for another device.
"""

import math

import pytest
import torch

import linbias
from linbias import KeyBounds, alibi_attention, alibi_slopes

# query (2, 6, 5, 4), key (2, 3, 7, 4), value (2, 3, 7, 8)
QUERY, KEY, VALUE = torch.zeros(2, 6, 5, 4), torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, 7, 8)
SLOPES = alibi_slopes(6)
RAGGED = torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(5, 4)], layout=torch.jagged)
POINTS_Q, POINTS_K = torch.zeros(5, 2), torch.zeros(7, 2)
BOUNDS = linbias.key_bounds(KEY, 4)
IN_SPACE = {"causal": False, "metric": "euclidean", "query_positions": POINTS_Q, "key_positions": POINTS_K}

BROKEN = [
    # query, key, value
    ({"query": [1.0]}, TypeError, "query must be a torch.Tensor, got list"),
    ({"value": None}, TypeError, "value must be a torch.Tensor, got NoneType"),
    ({"query": QUERY.long()}, TypeError, "query must be float16, bfloat16, float32 or float64, got torch.int64"),
    ({"query": QUERY.cfloat()}, TypeError, "query must be float16, bfloat16, float32 or float64, got torch.complex64"),
    (
        {"query": QUERY[0]},
        ValueError,
        "query must have 4 dimensions (batch, heads, tokens, head dim), got shape (6, 5, 4)",
    ),
    (
        {"value": VALUE[0]},
        ValueError,
        "value must have 4 dimensions (batch, heads, tokens, head dim), got shape (3, 7, 8)",
    ),
    ({"query": QUERY.to_sparse()}, TypeError, "query must be dense, of layout torch.strided, got torch.sparse_coo"),
    (
        {"key": KEY.to_sparse()},
        TypeError,
        "key must be dense, of layout torch.strided, got torch.sparse_coo; pass .to_d",
    ),
    ({"value": VALUE.to_sparse()}, TypeError, "value must be dense, of layout torch.strided, got torch.sparse_coo"),
    (
        {"query": RAGGED},
        TypeError,
        "query must be dense, of layout torch.strided, got torch.jagged; alibi_attention_va",
    ),
    ({"slopes": SLOPES.to_sparse()}, TypeError, "slopes must be dense, of layout torch.strided, got torch.sparse_coo"),
    (
        {"attn_mask": torch.ones(5, 7, dtype=torch.bool).to_sparse()},
        TypeError,
        "attn_mask must be dense, of layout torch.strided, got torch.sparse_coo",
    ),
    (
        {"key_mask": torch.ones(7, dtype=torch.bool).to_sparse()},
        TypeError,
        "key_mask must be dense, of layout torch.strided, got torch.sparse_coo",
    ),
    ({"key": KEY.half()}, TypeError, "key must have the query's dtype torch.float32, got torch.float16; cast it"),
    (
        {"value": VALUE.double()},
        TypeError,
        "value must have the query's dtype torch.float32, got torch.float64; cast it",
    ),
    ({"key": KEY.to("meta")}, ValueError, "key must be on the query's device cpu, got meta"),
    ({"key": KEY[:1]}, ValueError, "query, key and value must have one batch size, got 2, 1 and 2"),
    ({"value": VALUE[:1]}, ValueError, "query, key and value must have one batch size, got 2, 2 and 1"),
    ({"key": KEY[..., :3]}, ValueError, "key must have the query's head dim 4, at least 1, got 3"),
    ({"query": QUERY[..., :0], "key": KEY[..., :0]}, ValueError, "head dim 0, at least 1, got 0"),
    ({"value": VALUE[:, :, :6]}, ValueError, "value must have the key's heads and tokens (3, 7), got (3, 6)"),
    ({"value": VALUE[:, :1]}, ValueError, "value must have the key's heads and tokens (3, 7), got (1, 7)"),
    (
        {"query": QUERY[:, :4]},
        ValueError,
        "query heads must be a positive multiple of key/value heads, got 4 and 3; layout is (batch, heads, tokens",
    ),
    ({"query": QUERY[:, :0]}, ValueError, "query heads must be a positive multiple of key/value heads, got 0 and 3"),
    ({"key": KEY[:, :0], "value": VALUE[:, :0]}, ValueError, "multiple of key/value heads, got 6 and 0"),
    # slopes
    ({"slopes": 0.5}, TypeError, "slopes must be a torch.Tensor, got float"),
    ({"slopes": SLOPES.half()}, TypeError, "slopes must be float32 or float64, got torch.float16: in half precision"),
    ({"slopes": SLOPES.bfloat16()}, TypeError, "compute them with alibi_slopes and keep them out of .half()"),
    ({"slopes": SLOPES.long()}, TypeError, "slopes must be float32 or float64, got torch.int64"),
    (
        {"slopes": SLOPES.to("meta")},
        ValueError,
        "slopes must be on the query's device cpu, got meta; move it with .to()",
    ),
    (
        {"slopes": alibi_slopes(3)},
        ValueError,
        "slopes must have shape (6,), (1, 6) or (2, 6), one per query head, got (3,); see alibi_slopes(6)",
    ),
    ({"slopes": SLOPES[:, None]}, ValueError, "(1, 6) or (2, 6), one per query head, got (6, 1)"),
    ({"slopes": SLOPES.expand(3, 6)}, ValueError, "(1, 6) or (2, 6), one per query head, got (3, 6)"),
    ({"slopes": torch.zeros(2)}, ValueError, "(1, 6) or (2, 6), one per query head, got (2,)"),
    ({"slopes": torch.tensor(0.5)}, ValueError, "(1, 6) or (2, 6), one per query head, got ()"),
    ({"future_slopes": alibi_slopes(3)}, ValueError, "future_slopes must have shape (6,), (1, 6) or (2, 6)"),
    ({"future_slopes": SLOPES.half()}, TypeError, "future_slopes must be float32 or float64, got torch.float16"),
    # numbers
    ({"causal": 1}, TypeError, "causal must be True or False, got 1"),
    ({"causal": None}, TypeError, "causal must be True or False, got None"),
    ({"window": 4}, ValueError, "window must be None or (left, right), got 4; a bare int is ambiguous: write (n, 0)"),
    ({"window": (4,)}, ValueError, "window must be None or (left, right), got (4,)"),
    ({"window": (4, -1)}, ValueError, "window[1] must be an int >= 0, got -1"),
    ({"window": (2.0, 0)}, ValueError, "window[0] must be an int >= 0, got 2.0"),
    ({"window": (True, 0)}, ValueError, "window[0] must be an int >= 0, got True"),
    ({"window": (2**63, 0)}, ValueError, "window[0] must be an int >= 0 and below 2**63, got 9223372036854775808"),
    ({"sinks": -1}, ValueError, "sinks must be an int >= 0, got -1"),
    ({"sinks": 1.0}, ValueError, "sinks must be an int >= 0, got 1.0"),
    ({"prefix": None}, ValueError, "prefix must be an int >= 0, got None"),
    ({"unbiased": True}, ValueError, "unbiased must be an int >= 0, got True"),
    ({"unbiased": -2}, ValueError, "unbiased must be an int >= 0, got -2"),
    (
        {"scale": torch.tensor(1.0)},
        TypeError,
        "scale must be a Python number, got Tensor; a tensor's value is not read",
    ),
    ({"scale": "1"}, TypeError, "scale must be a Python number, got str"),
    ({"scale": math.inf}, ValueError, "scale must be finite in float32, or None for 1 / sqrt(head dim), got inf"),
    ({"scale": math.nan}, ValueError, "scale must be finite in float32, or None for 1 / sqrt(head dim), got nan"),
    ({"scale": -1e39}, ValueError, "scale must be finite in float32, or None for 1 / sqrt(head dim), got -1e+39"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive and finite in float32, or None for none, got 0.0"),
    ({"softcap": -1}, ValueError, "softcap must be positive and finite in float32, or None for none, got -1"),
    ({"softcap": math.inf}, ValueError, "softcap must be positive and finite in float32, or None for none, got inf"),
    ({"softcap": math.nan}, ValueError, "softcap must be positive and finite in float32, or None for none, got nan"),
    ({"softcap": 1e39}, ValueError, "softcap must be positive and finite in float32, or None for none, got 1e+39"),
    ({"softcap": True}, TypeError, "softcap must be a Python number, got bool"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be in [0, 1), got 1.0"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p must be in [0, 1), got -0.1"),
    ({"dropout_p": math.nan}, ValueError, "dropout_p must be in [0, 1), got nan"),
    ({"dropout_p": torch.tensor(0.5)}, TypeError, "dropout_p must be a Python number, got Tensor"),
    ({"dropout_p": None}, TypeError, "dropout_p must be a Python number, got NoneType"),
    ({"tolerance": 1}, ValueError, "tolerance must be in [0, 1), a share of a row's softmax weight, got 1"),
    ({"tolerance": -1e-9}, ValueError, "tolerance must be in [0, 1), a share of a row's softmax weight, got -1e-09"),
    ({"tolerance": math.nan}, ValueError, "tolerance must be in [0, 1), a share of a row's softmax weight, got nan"),
    # masks and segments
    ({"key_mask": [True] * 7}, TypeError, "key_mask must be a torch.Tensor, got list"),
    ({"key_mask": torch.ones(7)}, TypeError, "key_mask must be bool, True = real, got torch.float32"),
    ({"key_mask": torch.ones(7).long()}, TypeError, "key_mask must be bool, True = real, got torch.int64"),
    ({"key_mask": torch.ones(5).bool()}, ValueError, "key_mask must have shape (7,) or (2, 7), got (5,)"),
    ({"key_mask": torch.ones(3, 7).bool()}, ValueError, "key_mask must have shape (7,) or (2, 7), got (3, 7)"),
    ({"key_mask": torch.ones(2, 1, 7).bool()}, ValueError, "key_mask must have shape (7,) or (2, 7), got (2, 1, 7)"),
    ({"key_mask": torch.ones(7).bool().to("meta")}, ValueError, "key_mask must be on the query's device cpu, got meta"),
    (
        {"attn_mask": torch.zeros(5, 7)},
        TypeError,
        "attn_mask must be bool with True = visible, got torch.float32; a float mask of 0 and -inf is `mask == 0`",
    ),
    (
        {"attn_mask": torch.ones(5, 6).bool()},
        ValueError,
        "attn_mask must broadcast to (B, H, T, S) = (2, 6, 5, 7), got (5, 6)",
    ),
    ({"attn_mask": torch.ones(3, 5, 7).bool()}, ValueError, "= (2, 6, 5, 7), got (3, 5, 7)"),
    ({"attn_mask": torch.ones(1, 2, 6, 5, 7).bool()}, ValueError, "= (2, 6, 5, 7), got (1, 2, 6, 5, 7)"),
    ({"attn_mask": True}, TypeError, "attn_mask must be a torch.Tensor, got bool"),
    (
        {"query_segments": torch.zeros(5).long()},
        ValueError,
        "query_segments and key_segments must be given together; in self-attention they are one",
    ),
    ({"key_segments": torch.zeros(7).long()}, ValueError, "query_segments and key_segments must be given together"),
    (
        {"query_segments": torch.zeros(5), "key_segments": torch.zeros(7).long()},
        TypeError,
        "query_segments must be integers, got torch.float32",
    ),
    (
        {"query_segments": torch.zeros(5).long(), "key_segments": torch.zeros(5).long()},
        ValueError,
        "key_segments must have shape (7,) or (2, 7), got (5,)",
    ),
    # positions
    (
        {"query_positions": torch.zeros(5)},
        TypeError,
        "query_positions must be integers, got torch.float32; for real coordinates pass metric='euclidean'",
    ),
    ({"key_positions": torch.zeros(7).bool()}, TypeError, "key_positions must be integers, got torch.bool"),
    ({"key_positions": list(range(7))}, TypeError, "key_positions must be a torch.Tensor, got list"),
    ({"key_positions": torch.arange(5)}, ValueError, "key_positions must have shape (7,) or (2, 7), got (5,)"),
    ({"query_positions": torch.zeros(3, 5).long()}, ValueError, "query_positions must have shape (5,) or (2, 5), got"),
    (
        {"query_positions": torch.zeros(2, 5, 2).long()},
        ValueError,
        "got (2, 5, 2); coordinates need metric='euclidean' or 'manhattan'",
    ),
    ({"key_positions": torch.arange(7).to("meta")}, ValueError, "key_positions must be on the query's device cpu"),
    (
        {"query": torch.zeros(2, 6, 9, 4), "key_positions": torch.arange(7)},
        ValueError,
        "query_positions must be given when there are more queries (9) than keys (7): key_positions alone place only",
    ),
    # metrics
    ({"metric": "cosine"}, ValueError, "metric must be None, 'euclidean' or 'manhattan', got 'cosine'"),
    ({"metric": True}, ValueError, "metric must be None, 'euclidean' or 'manhattan', got True"),
    ({"metric": "manhattan", "causal": False}, ValueError, "key_positions must be given under metric='manhattan'; see"),
    (
        IN_SPACE | {"causal": True},
        ValueError,
        "causal must not be used under metric='euclidean': coordinates have no order",
    ),
    (IN_SPACE | {"window": (1, 1)}, ValueError, "window must not be used under metric='euclidean'"),
    (IN_SPACE | {"window": (None, None)}, ValueError, "window must not be used under metric='euclidean'"),
    (IN_SPACE | {"sinks": 1, "prefix": 2}, ValueError, "sinks, prefix must not be used under metric='euclidean'"),
    (IN_SPACE | {"future_slopes": SLOPES}, ValueError, "future_slopes must not be used under metric='euclidean'"),
    (IN_SPACE | {"key_positions": torch.arange(7)}, ValueError, "key_positions must have shape (7, C) or (2, 7, C)"),
    (IN_SPACE | {"key_positions": POINTS_K.half()}, TypeError, "key_positions must be integers, float32 or float64"),
    (
        IN_SPACE | {"key_positions": torch.zeros(7, 3)},
        ValueError,
        "query_positions and key_positions must have one number of coordinates, got 2 and 3",
    ),
    (
        IN_SPACE | {"query_positions": POINTS_Q.clone().requires_grad_()},
        ValueError,
        "query_positions gets no gradient, yet requires_grad is set; pass query_positions.detach()",
    ),
    # key bounds
    ({"key_bounds": BOUNDS.norms}, TypeError, "key_bounds must come from linbias.key_bounds, got Tensor"),
    ({"key_bounds": (BOUNDS.norms, 4)}, TypeError, "key_bounds must come from linbias.key_bounds, got tuple"),
    ({"key_bounds": BOUNDS._replace(block=0)}, ValueError, "key_bounds.block must be at least 1, got 0; recompute"),
    (
        {"key_bounds": BOUNDS._replace(block=2)},
        ValueError,
        "key_bounds.norms must be torch.float32 of shape (2, 3, 4) for this key and block=2, got torch.float32 of",
    ),
    (
        {"key_bounds": BOUNDS._replace(norms=BOUNDS.norms.double())},
        ValueError,
        "got torch.float64 of (2, 3, 2); recompute with linbias.key_bounds",
    ),
    (
        {"key_bounds": KeyBounds(None, 4)},
        TypeError,
        "key_bounds.norms must be a torch.Tensor, got NoneType",
    ),
    # backend
    ({"backend": "cuda"}, ValueError, "backend must be 'auto' or one of"),
    ({"backend": None}, ValueError, "backend must be 'auto' or one of"),
    (
        {"backend": ["native"]},
        ValueError,
        "backend must be 'auto' or one of 'native', 'triton', 'tiled', 'reference'",
    ),
]


@pytest.mark.parametrize(("change", "error", "says"), BROKEN, ids=[says[:40] for _, _, says in BROKEN])
def test_a_broken_rule_is_named(change: dict, error: type[Exception], says: str):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, "slopes": SLOPES, "causal": True} | change
    with pytest.raises(error) as caught:
        alibi_attention(**arguments)
    assert type(caught.value) is error
    assert says in str(caught.value)


def test_what_the_broken_calls_change_is_all_that_is_wrong_with_them():
    alibi_attention(QUERY, KEY, VALUE, SLOPES, causal=True)
    alibi_attention(QUERY, KEY, VALUE, SLOPES, **IN_SPACE)
    alibi_attention(QUERY, KEY, VALUE, SLOPES, causal=True, key_bounds=BOUNDS)


def test_nothing_reads_a_value():
    """Arguments full of NaN, or of numbers that mean nothing, pass every check."""
    slopes = torch.full((6,), torch.nan)
    mask = torch.zeros(7).bool()
    out = alibi_attention(QUERY, KEY, VALUE, slopes, causal=True, key_mask=mask)
    assert (out == 0).all()


@pytest.mark.parametrize("name", ["slope", "is_causal", "dropout", "attention_mask"])
def test_unknown_options_are_refused(name: str):
    with pytest.raises(TypeError, match=name):
        alibi_attention(QUERY, KEY, VALUE, SLOPES, causal=True, **{name: 1})


@pytest.mark.parametrize("name", ["out_a", "lse_a", "out_b", "lse_b"])
def test_merge_takes_tensors(name: str):
    parts = {"out_a": QUERY, "lse_a": QUERY[..., 0], "out_b": QUERY, "lse_b": QUERY[..., 0]}
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got str"):
        linbias.merge(**(parts | {name: "a"}))


def test_explaining_a_call_draws_no_seed():
    before = torch.get_rng_state()
    told = linbias.backends.explain(QUERY, KEY, VALUE, SLOPES, causal=True, dropout_p=0.1)
    assert "runs this call" in told and torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_that_calls_itself_strided_is_named():
    nested = torch.nested.nested_tensor(list(QUERY))
    with pytest.raises(TypeError, match="query must be dense, .* got a nested tensor; alibi_attention_varlen takes"):
        alibi_attention(nested, KEY, VALUE, SLOPES, causal=True)
