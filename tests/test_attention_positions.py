# SPDX-License-Identifier: Apache-2.0
"""Padding, positions, alignment, both directions: flat attention to know by hand, on every backend."""

import pytest
import torch

from linbias import (
    alibi_attention,
    alibi_attention_varlen,
    alibi_bias,
    alibi_slopes,
    positions_from_mask,
)
from tests.every import every_backend
from tests.flat import FOUR, HALF, THREE, assert_close, flat


@every_backend
def test_left_padding(backend: str):
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    assert positions_from_mask(mask).tolist() == [[0, 0, 0, 1, 2]]
    padded = flat(HALF, 5, 5, causal=True, key_mask=mask.bool(), backend=backend)
    assert_close(padded[0, 0, 4], [0, 0, *THREE])
    at = positions_from_mask(mask)
    counted = flat(HALF, 5, 5, causal=True, key_mask=mask.bool(), query_positions=at, key_positions=at, backend=backend)
    assert_close(counted[0, 0, 4], [0, 0, *THREE])
    assert_close(flat(HALF, 3, 3, causal=True, backend=backend)[0, 0, 2], THREE)


@every_backend
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("garbage", [0.0, torch.nan, torch.inf])
def test_the_mask_is_honoured_whatever_the_padding_holds(backend: str, side: str, garbage: float):
    query, key, value = (torch.randn(2, 4, 5, 8) for _ in range(3))
    real = torch.ones(2, 5, dtype=torch.bool)
    shorter = slice(2, 5) if side == "left" else slice(0, 3)
    real[1] = False
    real[1, shorter] = True
    hidden = ~real[:, None, :, None]
    slopes = alibi_slopes(4)
    padded = alibi_attention(
        query, key.masked_fill(hidden, garbage), value.masked_fill(hidden, garbage), slopes, causal=True, key_mask=real,
        backend=backend,
    )  # fmt: skip
    for item, rows in ((0, slice(0, 5)), (1, shorter)):
        one = [tensor[item : item + 1, :, rows] for tensor in (query, key, value)]
        alone = alibi_attention(*one, slopes, causal=True, backend=backend)
        torch.testing.assert_close(padded[item : item + 1, :, rows], alone, rtol=1e-6, atol=1e-6)


@every_backend
def test_right_and_left_padding_agree(backend: str):
    query, key, value = (torch.randn(1, 4, 3, 8) for _ in range(3))
    slopes = alibi_slopes(4)
    assert positions_from_mask(torch.tensor([1, 1, 1, 0, 0]))[:3].tolist() == [0, 1, 2]
    outs = []
    for pad in ((0, 0, 2, 0), (0, 0, 0, 2)):
        real = torch.nn.functional.pad(torch.ones(3), pad[2:]).bool()
        padded = [torch.nn.functional.pad(tensor, pad) for tensor in (query, key, value)]
        outs.append(alibi_attention(*padded, slopes, causal=True, key_mask=real, backend=backend)[:, :, real])
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_row_without_keys_is_zero_and_not_nan(backend: str, dtype: torch.dtype):
    leaves = [torch.randn(1, 2, 3, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([False, False, True])
    out, aux = alibi_attention(*leaves, alibi_slopes(2), causal=True, key_mask=mask, backend=backend, return_aux=True)
    assert (out[:, :, :2] == 0).all() and (aux.lse[:, :, :2] == -torch.inf).all()
    out.sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
    assert (leaves[0].grad[:, :, :2] == 0).all()


@every_backend
def test_any_positions(backend: str):
    at = torch.tensor([[0, 1, 5, 9], [0, 2, 2, 3]])
    slopes = alibi_slopes(3)
    bias = alibi_bias(slopes, at, at)
    for b in range(2):
        for h in range(3):
            expected = [[-slopes[h].item() * abs(p - r) for r in at[b].tolist()] for p in at[b].tolist()]
            assert bias[b, h].tolist() == expected
    assert bias[1, 0, 1, 2] == 0
    query, key, value = (torch.randn(2, 3, 4, 8) for _ in range(3))
    dense = (query @ key.mT / 8**0.5 + bias).softmax(-1) @ value
    found = alibi_attention(
        query, key, value, slopes, causal=False, query_positions=at, key_positions=at, backend=backend
    )
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-6)


@every_backend
def test_packed_documents(backend: str):
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    segments = {"query_segments": documents, "key_segments": documents}
    assert_close(flat(HALF, 7, 7, causal=True, **segments, backend=backend)[0, 0, 6], [0, 0, 0, *FOUR])
    tokens = torch.randn(7, 4, 8)
    slopes, ends = alibi_slopes(4), torch.tensor([0, 3, 7])
    item = tokens.transpose(0, 1)[None]
    packed = alibi_attention(item, item, item, slopes, causal=True, **segments, backend=backend)
    varlen = alibi_attention_varlen(tokens, tokens, tokens, slopes, ends, ends, 4, 4, causal=True, backend=backend)
    assert_close(varlen.transpose(0, 1)[None], packed.double())
    for part in (slice(0, 3), slice(3, 7)):
        own = item[:, :, part]
        alone = alibi_attention(own, own, own, slopes, causal=True, backend=backend)
        assert_close(packed[:, :, part], alone.double())


@every_backend
def test_one_query_on_five_keys(backend: str):
    found = flat(alibi_slopes(2), 1, 5, causal=True, backend=backend)[0, :, 0]
    assert_close(found[0], [0.1758119, 0.1871507, 0.1992209, 0.2120696, 0.2257469])
    assert_close(found[1, [0, 4]], [0.1984406, 0.2015655])


@every_backend
def test_calls_of_different_shapes_never_mix(backend: str):
    for shape in ((5, 5), (5, 6), (3, 3), (1, 9), (8, 8), (5, 5)):
        for heads in (4, 8):
            slopes = alibi_slopes(heads)
            weights = flat(slopes, *shape, causal=True, backend=backend)
            at = torch.arange(shape[0]) + shape[1] - shape[0]
            bias = alibi_bias(slopes, at, torch.arange(shape[1]))
            hidden = torch.arange(shape[1]) > at[:, None]
            assert_close(weights[0], bias[0].masked_fill(hidden, -torch.inf).softmax(-1).double())
            assert (bias.diagonal(shape[1] - shape[0], 2, 3) == 0).all()


@every_backend
def test_ends_are_aligned(backend: str):
    assert (flat(HALF, 1, 6, causal=True, backend=backend) > 0).all()
    two = flat(HALF, 2, 6, causal=True, backend=backend)[0, 0]
    assert (two[0] > 0).tolist() == [True] * 5 + [False] and (two[1] > 0).all()
    # Each row is heaviest, and its bias 0, at its own key.
    assert two.argmax(-1).tolist() == [4, 5]
    bias = alibi_bias(HALF, torch.tensor([4, 5]), torch.arange(6))[0, 0]
    assert bias[0, 4] == 0 and bias[1, 5] == 0


@every_backend
def test_distance_is_zero_at_the_own_position(backend: str):
    # A constant a row changes no weight, so only the lse shows a distance counted from the length.
    _, aux = alibi_attention(
        torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), HALF, causal=True, backend=backend,
        return_aux=True,
    )  # fmt: skip
    assert aux.lse.item() == 0.0
    query, key, value = (torch.randn(1, 4, 33, 16).half() for _ in range(3))
    full = alibi_attention(query, key, value, alibi_slopes(4), causal=True, backend=backend)
    decode = alibi_attention(query[:, :, -1:], key, value, alibi_slopes(4), causal=True, backend=backend)
    assert (decode - full[:, :, -1:]).abs().max() < 2e-3


@every_backend
@pytest.mark.parametrize("path", ["prefill", "decode", "window", "symmetric", "segments", "varlen", "grouped"])
def test_every_path_applies_the_bias(backend: str, path: str):
    query, key, value = torch.randn(1, 4, 20, 8), torch.randn(1, 4, 20, 8), torch.randn(1, 4, 20, 8)

    def run(slopes: torch.Tensor) -> torch.Tensor:
        call = {"causal": path != "symmetric", "backend": backend}
        if path == "varlen":
            tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
            ends = torch.tensor([0, 9, 20])
            return alibi_attention_varlen(*tokens, slopes, ends, ends, 11, 11, **call)
        if path == "decode":
            return alibi_attention(query[:, :, -1:], key, value, slopes, **call)
        if path == "grouped":
            return alibi_attention(query, key[:, :2], value[:, :2], slopes, **call)
        if path == "window":
            call["window"] = (9, 0)
        if path == "segments":
            call |= {"query_segments": torch.arange(20) // 8, "key_segments": torch.arange(20) // 8}
        return alibi_attention(query, key, value, slopes, **call)

    assert (run(alibi_slopes(4)) - run(torch.zeros(4))).abs().max() > 1e-2


@every_backend
def test_without_a_mask_bias_and_causality_stay(backend: str):
    none = {"key_mask": None, "attn_mask": None}
    query, value = torch.zeros(1, 1, 4, 4), torch.eye(4)[None, None]
    for grad in (True, False):  # training and inference differ in nothing but this
        with torch.set_grad_enabled(grad):
            leaf = query.clone().requires_grad_()
            out = alibi_attention(leaf, leaf, value, HALF, causal=True, **none, backend=backend)
        assert (out[0, 0].triu(1) == 0).all()
        assert_close(out[0, 0, 3].detach(), FOUR)


@every_backend
def test_an_encoder_needs_the_symmetric_bias(backend: str):
    quarter = torch.tensor([0.25])
    assert_close(flat(quarter, 4, 4, causal=False, backend=backend)[0, 0, 1], [0.2461, 0.3160, 0.2461, 0.1917], 5e-5)
    by_index = (0.25 * torch.arange(4.0)).softmax(-1)
    assert_close(by_index[[0, 3]], [0.1653, 0.3499], 5e-5)
    causal = flat(quarter, 4, 4, causal=True, backend=backend)[0, 0, 1]
    assert_close(causal[:2], by_index[:2].double() / by_index[:2].double().sum())


@every_backend
def test_symmetric_and_one_sided(backend: str):
    at = torch.arange(6)
    bias = alibi_bias(alibi_slopes(3), at, at)
    assert bias.equal(bias.mT)
    tokens = torch.randn(1, 3, 6, 8)
    slopes = alibi_slopes(3)

    def reversal(future: torch.Tensor | None) -> torch.Tensor:
        """What reading the same tokens backwards changes."""
        options = {"causal": False, "future_slopes": future, "backend": backend}
        forwards = alibi_attention(tokens, tokens, tokens, slopes, **options)
        other = tokens.flip(2)
        return (alibi_attention(other, other, other, slopes, **options).flip(2) - forwards).abs().max()

    assert reversal(None) < 1e-5
    assert reversal(4 * slopes) > 1e-2
    assert reversal(torch.full((3,), torch.inf)) > 1e-2


@every_backend
def test_cross_attention_by_explicit_positions(backend: str):
    expected = [0.1315425, 0.168904, 0.216877, 0.168904, 0.1315425, 0.1024454, 0.0797846]
    quarter = torch.tensor([0.25])
    for at in ([2], [0, 1, 2, 3, 4], [4, 2]):
        places = {"query_positions": torch.tensor(at), "key_positions": torch.arange(7)}
        found = flat(quarter, len(at), 7, causal=False, **places, backend=backend)
        assert_close(found[0, 0, at.index(2)], expected)
