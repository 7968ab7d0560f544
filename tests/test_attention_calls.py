# SPDX-License-Identifier: Apache-2.0
"""What a call is used for, on every backend: any length, device or split of the heads, windows, training."""

import math

import pytest
import torch

import linbias
from linbias import BackendUnavailable, alibi_attention, alibi_attention_varlen, alibi_attention_weights, alibi_slopes
from tests.every import every_backend
from tests.flat import FOUR, HALF, THREE, assert_close, flat


@every_backend
def test_a_call_longer_than_any_before(backend: str):
    def layer(tokens: torch.Tensor) -> torch.Tensor:
        return alibi_attention(tokens, tokens, tokens, alibi_slopes(2), causal=True, backend=backend)

    for length in (16, 17, 33, 1):
        assert layer(torch.randn(1, 2, length, 4)).isfinite().all()


@every_backend
def test_slopes_by_head_and_by_item(backend: str):
    query = torch.randn(2, 4, 5, 8)

    def run(slopes: torch.Tensor) -> torch.Tensor:
        return alibi_attention(query, query, query, slopes, causal=True, backend=backend)

    slopes = alibi_slopes(4)
    assert run(slopes[None]).equal(run(slopes)) and run(slopes.expand(2, 4)).equal(run(slopes))
    per_item = torch.stack((slopes, 3 * slopes))
    for item in range(2):
        torch.testing.assert_close(run(per_item)[item], run(per_item[item])[item])
    for wrong in (torch.zeros(2), slopes[:, None], torch.zeros(3, 4), alibi_slopes(2)):
        with pytest.raises(ValueError, match=r"slopes must have shape \(4,\), \(1, 4\) or \(2, 4\)"):
            run(wrong)


@pytest.mark.parametrize("backend", linbias.backends.available())
def test_a_backend_applies_the_bias_or_says_why_not(backend: str):
    query = torch.randn(1, 4, 20, 8)
    try:
        biased = alibi_attention(query, query, query, alibi_slopes(4), causal=True, backend=backend)
    except BackendUnavailable as reason:
        assert isinstance(reason, NotImplementedError)
        assert backend in str(reason) and "backend='auto'" in str(reason)
    else:
        unbiased = alibi_attention(query, query, query, torch.zeros(4), causal=True, backend=backend)
        assert (biased - unbiased).abs().max() > 1e-2


@every_backend
def test_weights_that_agree_with_the_output(backend: str):
    query, key, value = (torch.randn(1, 4, 6, 8) for _ in range(3))
    weights = alibi_attention_weights(query, key, alibi_slopes(4), causal=True)
    assert_close(weights.sum(-1), torch.ones(1, 4, 6))
    out = alibi_attention(query, key, value, alibi_slopes(4), causal=True, backend=backend)
    assert_close(weights @ value, out.double())


@every_backend
def test_results_live_where_the_query_does(backend: str):
    query = torch.randn(1, 2, 200, 4)
    options = {"causal": True, "window": (70, 0), "sinks": 1, "unbiased": 1, "dropout_p": 0.1, "backend": backend}
    torch.manual_seed(0)
    plain = alibi_attention(query, query, query, alibi_slopes(2), **options)
    slopes = alibi_slopes(2)
    with torch.device("meta"):  # whatever the default device, results live where the query does
        torch.manual_seed(0)
        out = alibi_attention(query, query, query, slopes, **options)
    assert out.device.type == "cpu" and out.equal(plain)
    with pytest.raises(ValueError, match="slopes must be on the query's device cpu, got meta; move it with"):
        alibi_attention(query, query, query, slopes.to("meta"), causal=True)


@every_backend
def test_learned_slopes_run_forward_and_backward(backend: str):
    slopes = alibi_slopes(4).requires_grad_()
    tokens = torch.randn(7, 4, 8)
    ends = torch.tensor([0, 3, 7])
    item = tokens.transpose(0, 1)[None]
    for out in (
        alibi_attention(item, item, item, slopes, causal=True, backend=backend),
        alibi_attention_varlen(tokens, tokens, tokens, slopes, ends, ends, 4, 4, causal=True, backend=backend),
        alibi_attention_weights(item, item, slopes, causal=True),
        linbias.alibi_bias(slopes, torch.arange(3), torch.arange(3)),
    ):
        (gradient,) = torch.autograd.grad(out.square().sum(), slopes)
        assert gradient.isfinite().all() and (gradient != 0).all()


@every_backend
def test_nearer_keys_weigh_more(backend: str):
    row = flat(HALF, 4, 4, causal=True, backend=backend)[0, 0, 3]
    assert (row.diff() > 0).all()
    assert_close(row, FOUR)


@every_backend
def test_a_mask_and_causal_hold_together(backend: str):
    mask = torch.tensor([True, False, True, True])
    for option in ({"attn_mask": mask}, {"key_mask": mask}):
        found = flat(HALF, 4, 4, causal=True, **option, backend=backend)[0, 0]
        assert (found.triu(1) == 0).all() and (found[:, 1] == 0).all()
        e = torch.tensor([-1.5, -torch.inf, -0.5, 0.0]).softmax(-1)
        assert_close(found[3], e.double())


@every_backend
def test_a_window_is_inclusive(backend: str):
    assert_close(flat(HALF, 4, 4, causal=True, window=(2, 0), backend=backend)[0, 0, 3], [0, *THREE])
    for wide in ((3, 0), (99, 0), (None, None)):
        assert_close(flat(HALF, 4, 4, causal=True, window=wide, backend=backend)[0, 0, 3], FOUR)
    assert_close(flat(HALF, 4, 4, causal=True, window=(0, 0), backend=backend)[0, 0], torch.eye(4).double())


@every_backend
def test_shifting_a_context_changes_nothing(backend: str):
    query, key, value = (torch.randn(1, 4, 9, 8) for _ in range(3))
    at = torch.arange(9) * 3
    outs = [
        alibi_attention(
            query, key, value, alibi_slopes(4), causal=True, query_positions=at + shift, key_positions=at + shift,
            backend=backend,
        )
        for shift in (0, -100)
    ]  # fmt: skip
    assert outs[0].equal(outs[1])


@every_backend
def test_slopes_get_a_gradient(backend: str):
    slope = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    weights = flat(slope, 3, 3, causal=True, dtype=torch.float64, backend=backend)
    weights[0, 0, 2, 0].backward()
    assert slope.grad.item() == pytest.approx(-0.2459765, abs=1e-7)
    # The key-index form owes the same, for the gradients of a row's scores sum to 0.
    other = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (other * torch.arange(3)).softmax(-1)[0].backward()
    assert other.grad.item() == pytest.approx(-0.2459765, abs=1e-7)


@every_backend
def test_no_batch_size_is_fixed_beforehand(backend: str):
    slopes = alibi_slopes(4)
    tokens = torch.randn(7, 4, 5, 8)
    parts = [alibi_attention(part, part, part, slopes, causal=True, backend=backend) for part in tokens.split(4)]
    assert [len(part) for part in parts] == [4, 3]
    whole = alibi_attention(tokens, tokens, tokens, slopes, causal=True, backend=backend)
    torch.testing.assert_close(torch.cat(parts), whole)


@every_backend
def test_a_bias_before_the_scale_is_a_smaller_slope(backend: str):
    # Falcon divides bias and product by sqrt(64) alike.
    assert_close(flat(HALF, 4, 4, causal=True, backend=backend)[0, 0, 3], FOUR)
    found = flat(HALF / 8, 4, 4, causal=True, backend=backend)[0, 0, 3]
    assert_close(found, [0.2270728, 0.2417178, 0.2573072, 0.2739021])


@every_backend
def test_key_index_and_relative_form_agree_under_causal(backend: str):
    query, key, value = (torch.randn(2, 4, 9, 8) for _ in range(3))
    slopes = alibi_slopes(4)
    scores = query @ key.mT / math.sqrt(8) + slopes[:, None, None] * torch.arange(9)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    assert_close(alibi_attention(query, key, value, slopes, causal=True, backend=backend), expected.double())


@every_backend
@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 8, 2), (12, 6, 3), (40, 8, 4)])
def test_ranks_together_are_the_whole(backend: str, heads: int, kv_heads: int, ranks: int):
    query = torch.randn(1, heads, 5, 8)
    key, value = torch.randn(1, kv_heads, 7, 8), torch.randn(1, kv_heads, 7, 8)
    slopes = alibi_slopes(heads)
    parts = zip(query.chunk(ranks, 1), key.chunk(ranks, 1), value.chunk(ranks, 1), slopes.chunk(ranks), strict=True)
    found = torch.cat([alibi_attention(*part, causal=True, backend=backend) for part in parts], 1)
    torch.testing.assert_close(found, alibi_attention(query, key, value, slopes, causal=True, backend=backend))


@every_backend
def test_a_query_head_keeps_its_slope_in_its_group(backend: str):
    slopes = alibi_slopes(8)
    query = torch.zeros(1, 8, 1, 4)
    key, value = torch.zeros(1, 2, 4, 4), torch.eye(4).expand(1, 2, 4, 4).clone()
    value[:, 1] *= 10  # head 5 reads kv head 1
    found = alibi_attention(query, key, value, slopes, causal=True, backend=backend)
    expected = (-slopes[5].item() * torch.tensor([3.0, 2.0, 1.0, 0.0])).softmax(-1)
    assert_close(found[0, 5, 0], 10 * expected.double(), atol=1e-5)
