# SPDX-License-Identifier: Apache-2.0
"""What must hold for every input, whatever the numbers; each on every backend, in float64."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from linbias import alibi_attention, alibi_bias, alibi_slopes, merge
from tests.every import every_backend

# Rounding only: sums of a few dozen products in float64.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
few = hypothesis.settings(max_examples=20)


@st.composite
def calls(draw, max_tokens: int = 40, *, square: bool = False):
    """query, key, value, slopes of one call."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    keys = draw(st.integers(1, max_tokens))
    queries = keys if square else draw(st.integers(1, max_tokens))
    dim = draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.3, 1.0, 4.0]))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    slopes = torch.tensor(draw(st.lists(st.sampled_from([0.0, 2.0**-8, 0.1, 0.5, 3.0]), min_size=kv_heads * group,
                                        max_size=kv_heads * group)), dtype=torch.float64)  # fmt: skip
    return (
        spread * normal(2, kv_heads * group, queries, dim),
        spread * normal(2, kv_heads, keys, dim),
        normal(2, kv_heads, keys, dim + 1),
        slopes,
    )


def positions_of(call) -> dict[str, torch.Tensor]:
    """The default ones, written out."""
    queries, keys = call[0].shape[2], call[1].shape[2]
    return {"query_positions": torch.arange(queries) + keys - queries, "key_positions": torch.arange(keys)}


@every_backend
@few
@hypothesis.given(call=calls(), shift=st.integers(-(2**40), 2**40), causal=st.booleans(), left=st.integers(0, 50))
def test_shifting_all_positions_changes_nothing(backend: str, call, shift: int, causal: bool, left: int):
    options = {"causal": causal, "window": (left, None), "backend": backend}
    moved = {name: given + shift for name, given in positions_of(call).items()}
    torch.testing.assert_close(alibi_attention(*call, **options, **moved), alibi_attention(*call, **options), **CLOSE)


@every_backend
@few
@hypothesis.given(call=calls(), seed=st.integers(0, 2**32), causal=st.booleans())
def test_permuting_keys_with_their_positions_changes_nothing(backend: str, call, seed: int, causal: bool):
    query, key, value, slopes = call
    at = positions_of(call)
    mask = torch.rand(2, key.shape[2], generator=torch.Generator().manual_seed(seed)) < 0.8
    plain = alibi_attention(*call, causal=causal, **at, key_mask=mask, backend=backend)
    order = torch.randperm(key.shape[2], generator=torch.Generator().manual_seed(seed))
    at["key_positions"] = at["key_positions"][order]
    permuted = alibi_attention(
        query,
        key[:, :, order],
        value[:, :, order],
        slopes,
        causal=causal,
        **at,
        key_mask=mask[:, order],
        backend=backend,
    )
    torch.testing.assert_close(permuted, plain, **CLOSE)


@every_backend
@few
@hypothesis.given(call=calls(), slope=st.floats(1e-3, 5.0), causal=st.booleans())
def test_of_equal_keys_the_nearer_weighs_more(backend: str, call, slope: float, causal: bool):
    query, key, _, slopes = call
    queries, keys = query.shape[2], key.shape[2]
    same = key[:, :, :1].expand_as(key)
    value = torch.eye(keys, dtype=torch.float64).expand(2, key.shape[1], keys, keys)
    slopes = torch.full_like(slopes, slope)
    weights = alibi_attention(query, same, value, slopes, causal=causal, backend=backend)
    distance = ((torch.arange(queries) + keys - queries)[:, None] - torch.arange(keys)).abs()
    seen = weights > 0
    for first in range(keys - 1):
        nearer = seen[..., first] & (distance[:, first] < distance[:, first + 1])
        farther = seen[..., first + 1] & (distance[:, first] > distance[:, first + 1])
        assert (weights[..., first] > weights[..., first + 1])[nearer].all()
        assert (weights[..., first] < weights[..., first + 1])[farther].all()


@every_backend
@few
@hypothesis.given(slope=st.floats(0.0, 4.0), distance=st.integers(1, 200), margin=st.floats(1.0, 30.0))
def test_a_large_enough_score_still_wins(backend: str, slope: float, distance: int, margin: float):
    # The key at the start scores slope * distance + margin more than every other: however far, it must lead.
    keys = distance + 1
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    key = torch.zeros(1, 1, keys, 1, dtype=torch.float64)
    key[0, 0, 0] = slope * distance + margin
    value = torch.zeros_like(key)
    value[0, 0, 0] = 1.0
    slopes = torch.tensor([slope], dtype=torch.float64)
    weight = alibi_attention(query, key, value, slopes, causal=True, scale=1.0, backend=backend).item()
    others = sum(math.exp(-slope * d - margin) for d in range(distance))
    assert weight == pytest.approx(1 / (1 + others), rel=1e-11)


@every_backend
@few
@hypothesis.given(call=calls(square=True), data=st.data())
def test_causal_rows_do_not_know_the_future(backend: str, call, data: st.DataObject):
    query, key, value, slopes = call
    now = data.draw(st.integers(0, key.shape[2] - 1))
    options = {"causal": True, "backend": backend}
    before = alibi_attention(query, key, value, slopes, **options)
    key, value = key.clone(), value.clone()
    key[:, :, now:] = data.draw(st.sampled_from([0.0, -1e3, 1e3]))
    value[:, :, now:] = 1e6
    after = alibi_attention(query, key, value, slopes, **options)
    torch.testing.assert_close(after[:, :, :now], before[:, :, :now], **CLOSE)


@every_backend
@few
@hypothesis.given(
    call=calls(), content=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]), seed=st.integers(0, 2**32),
    causal=st.booleans(),
)  # fmt: skip
def test_contents_of_padding_never_matter(backend: str, call, content: float, seed: int, causal: bool):
    query, key, value, slopes = call
    mask = torch.rand(2, key.shape[2], generator=torch.Generator().manual_seed(seed)) < 0.5
    grad_out = torch.randn((*query.shape[:3], value.shape[3]), dtype=torch.float64)

    def run(key, value):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value, slopes)]
        out = alibi_attention(*leaves, causal=causal, key_mask=mask, backend=backend)
        return out, *torch.autograd.grad(out, leaves, grad_out)

    hidden = ~mask[:, None, :, None]
    plain = run(key, value)
    filled = run(key.masked_fill(hidden, content), value.masked_fill(hidden, content))
    for one, other in zip(filled, plain, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert (filled[2].masked_select(hidden) == 0).all() and (filled[3].masked_select(hidden) == 0).all()


@every_backend
@few
@hypothesis.given(call=calls(), data=st.data(), causal=st.booleans())
def test_two_halves_of_the_keys_merge_to_the_whole(backend: str, call, data: st.DataObject, causal: bool):
    query, key, value, slopes = call
    at, cut = positions_of(call), data.draw(st.integers(0, key.shape[2]))
    options = {"causal": causal, "backend": backend, "return_aux": True}
    whole, aux = alibi_attention(*call, **options, **at)
    halves = []
    for part in (slice(0, cut), slice(cut, None)):
        half = at | {"key_positions": at["key_positions"][part]}
        out, half_aux = alibi_attention(query, key[:, :, part], value[:, :, part], slopes, **options, **half)
        halves += [out, half_aux.lse]
    out, lse = merge(*halves)
    torch.testing.assert_close(out, whole, **CLOSE)
    torch.testing.assert_close(lse, aux.lse, **CLOSE)


@few
@hypothesis.given(heads=st.integers(1, 20), tokens=st.integers(0, 30), unbiased=st.integers(0, 3))
def test_the_symmetric_bias_equals_its_transpose(heads: int, tokens: int, unbiased: int):
    at = torch.arange(tokens)
    bias = alibi_bias(alibi_slopes(heads), at, at, unbiased=unbiased)
    assert bias.equal(bias.mT)
    assert (bias <= 0).all() and (bias.diagonal(dim1=2, dim2=3) == 0).all()


@every_backend
@few
@hypothesis.given(call=calls(square=True), steep=st.floats(0.0, 3.0))
def test_reversing_the_text_swaps_the_sides(backend: str, call, steep: float):
    query, key, value, slopes = call
    future = torch.full_like(slopes, steep)
    options = {"causal": False, "backend": backend}
    out = alibi_attention(query, key, value, slopes, future_slopes=future, **options)
    backwards = alibi_attention(query.flip(2), key.flip(2), value.flip(2), future, future_slopes=slopes, **options)
    torch.testing.assert_close(backwards.flip(2), out, **CLOSE)


@every_backend
@few
@hypothesis.given(call=calls(), causal=st.booleans(), cap=st.none() | st.floats(0.5, 20.0))
def test_weights_are_a_convex_combination(backend: str, call, causal: bool, cap: float | None):
    query, key, _, slopes = call
    ones = torch.ones(*key.shape[:3], 1, dtype=torch.float64)
    out, aux = alibi_attention(query, key, ones, slopes, causal=causal, softcap=cap, backend=backend, return_aux=True)
    seen = aux.lse > -math.inf
    torch.testing.assert_close(out[..., 0], seen.double(), **CLOSE)


@every_backend
@few
@hypothesis.given(call=calls(), causal=st.booleans())
def test_grouped_heads_equal_repeated_ones(backend: str, call, causal: bool):
    query, key, value, slopes = call
    group = query.shape[1] // key.shape[1]
    repeated = (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), slopes)
    options = {"causal": causal, "backend": backend}
    torch.testing.assert_close(alibi_attention(*call, **options), alibi_attention(*repeated, **options), **CLOSE)


@every_backend
@few
@hypothesis.given(call=calls(), seed=st.integers(0, 2**32), causal=st.booleans())
def test_segments_equal_separate_calls(backend: str, call, seed: int, causal: bool):
    query, key, value, slopes = call
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randint(0, 3, (tensor.shape[2],), generator=generator) for tensor in (query, key)]
    at = positions_of(call)
    options = {"causal": causal, "backend": backend}
    packed = alibi_attention(*call, query_segments=numbers[0], key_segments=numbers[1], **options)
    for number in range(3):
        rows, columns = numbers[0] == number, numbers[1] == number
        own = {"query_positions": at["query_positions"][rows], "key_positions": at["key_positions"][columns]}
        alone = alibi_attention(query[:, :, rows], key[:, :, columns], value[:, :, columns], slopes, **own, **options)
        torch.testing.assert_close(packed[:, :, rows], alone, **CLOSE)
