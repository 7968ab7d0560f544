# SPDX-License-Identifier: Apache-2.0
"""Dropout: the generator against its published answers, the mask against its documentation, and its statistics."""

import math

import pytest
import torch
from torch._functorch import config as functorch

from linbias import alibi_attention, alibi_attention_varlen, alibi_slopes
from linbias.semantics.dropout import draw_seed, keep_mask, philox4x32, threshold
from tests import oracle

# The known answers that Random123 publishes for philox4x32-10: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_generator_gives_the_published_words(counter: tuple, key: tuple, words: tuple):
    # A seed is an int64, so a key whose second half has its top bit set comes as a negative number.
    seed = key[0] | key[1] << 32
    seed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    found = philox4x32(seed, tuple(torch.tensor(word) for word in counter))
    assert tuple(int(word) for word in found) == words
    assert oracle.philox4x32(counter, key) == words


@pytest.mark.parametrize("first_key", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("keys", [0, 1, 5, 9])
def test_mask_is_the_documented_one_from_any_start(first_key: int, keys: int):
    seed, p = 0x0123456789ABCDEF, 0.4
    b, h, i = torch.arange(2), torch.arange(3), torch.arange(5) + 70_000
    found = keep_mask(torch.tensor(seed), p, b[:, None, None], h[:, None], i, first_key, keys)
    assert found.shape == (2, 3, 5, keys)
    for b, h, row in ((0, 0, 0), (1, 2, 4), (0, 1, 3)):
        expected = [
            oracle.philox4x32((j // 4, 70_000 + row, h, b), (seed & 0xFFFFFFFF, seed >> 32))[j % 4]
            >= math.floor(p * 2**32)
            for j in range(first_key, first_key + keys)
        ]
        assert found[b, h, row].tolist() == expected


def test_threshold():
    assert threshold(0.0) == 0 and threshold(0.5) == 2**31 and threshold(1 - 2**-40) == 2**32 - 1


def drop(p: float, seed: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, H, T, S) weights over flat scores after dropout, and lse."""
    flat = torch.zeros(1, 4, 100, 3)
    value = torch.eye(100).expand(1, 4, 100, 100)
    torch.manual_seed(seed)
    out, aux = alibi_attention(
        flat, flat, value, torch.zeros(4), causal=False, dropout_p=p, return_aux=True, backend="reference", **options
    )
    return out, aux.lse


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_share_dropped_and_scale_of_the_kept(p: float):
    weights, _ = drop(p, seed=1)
    kept = weights != 0
    count = kept.numel()
    # Five standard deviations of a binomial.
    assert abs(kept.double().mean().item() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / count)
    torch.testing.assert_close(weights[kept], torch.full((int(kept.sum()),), 0.01 / (1 - p)), rtol=1e-6, atol=0)
    # No row, column or head is treated apart.
    for dims in ((0, 1, 2), (0, 1, 3), (0, 2, 3)):
        shares = kept.double().mean(dims)
        assert ((shares - (1 - p)).abs() <= 5 * math.sqrt(p * (1 - p) / (count / shares.numel()))).all()


def test_neighbours_are_independent():
    kept = (drop(0.5, seed=2)[0] != 0).double() - 0.5
    for shifted in (kept.roll(1, -1), kept.roll(1, -2), kept.roll(1, 1), kept.roll(4, -1)):
        correlation = 4 * (kept * shifted).mean().item()
        assert abs(correlation) <= 5 / math.sqrt(kept.numel())


def test_seed_comes_from_torch_and_rules_the_mask():
    first, again, other = drop(0.3, seed=3)[0], drop(0.3, seed=3)[0], drop(0.3, seed=4)[0]
    assert first.equal(again) and not first.equal(other)
    torch.manual_seed(5)
    one, two = (draw_seed(torch.device("cpu")) for _ in range(2))
    assert one.shape == () and one.dtype == torch.int64 and one >= 0 and one != two


def test_lse_and_no_dropout_are_untouched():
    weights, lse = drop(0.0, seed=6)
    _, dropped_lse = drop(0.7, seed=6)
    assert lse.equal(dropped_lse)
    state = torch.get_rng_state()
    alibi_attention(weights, weights, weights, torch.zeros(4), causal=True, dropout_p=0.0)
    assert torch.get_rng_state().equal(state), "without dropout no random number is drawn"


def test_expected_output_is_that_without_dropout():
    query = torch.randn(1, 2, 3, 4)
    slopes = alibi_slopes(2)
    exact = alibi_attention(query, query, query, slopes, causal=False)
    runs = torch.stack([alibi_attention(query, query, query, slopes, causal=False, dropout_p=0.5) for _ in range(400)])
    error = (runs.mean(0) - exact).abs()
    assert (error <= 5 * runs.std(0) / math.sqrt(400) + 1e-6).all()


def test_varlen_counts_indices_through_the_call():
    # One packed item: b is 0, and i and j run on from sequence to sequence.
    bounds, slopes = torch.tensor([0, 3, 7]), torch.zeros(2)
    flat, value = torch.zeros(7, 2, 3), torch.eye(7)[:, None].expand(7, 2, 7)
    torch.manual_seed(8)
    out = alibi_attention_varlen(
        flat, flat, value, slopes, bounds, bounds, 4, 4, causal=False, dropout_p=0.5, backend="reference"
    )
    torch.manual_seed(8)
    seed = draw_seed(torch.device("cpu"))
    kept = keep_mask(seed, 0.5, torch.zeros(1).long(), torch.arange(2)[:, None], torch.arange(7), 0, 7)
    same = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    share = (same[:, None] == same) * (2 / torch.tensor([3, 3, 3, 4, 4, 4, 4]))[:, None]
    torch.testing.assert_close(out.transpose(0, 1), kept * share)


def test_no_mask_is_drawn_anew_in_a_compiled_backward():
    query, slopes = torch.randn(1, 2, 5, 4, requires_grad=True), alibi_slopes(2)

    @torch.compile(fullgraph=True)
    def compiled(query):
        return alibi_attention(query, query, query, slopes, causal=True, dropout_p=0.5)

    with functorch.patch(activation_memory_budget=0.5):
        with pytest.raises(RuntimeError, match="dropout_p must be 0 under torch.compile"):
            compiled(query)
        with torch.no_grad():
            compiled(query)  # nothing is drawn twice without a backward
