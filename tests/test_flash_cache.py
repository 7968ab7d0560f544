# SPDX-License-Identifier: Apache-2.0
"""flash_attn_with_kvcache: caches of the caller's, written in place, ragged, padded, out of order, in pages."""

import pytest
import torch
from torch import Tensor

from linbias import alibi_slopes, flash
from tests.flash_kernel import CALLS, assert_is_kernels, make


def filled(lengths: list[int], slots: int, kv_heads: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, and caches of `slots` that hold the first `lengths` of them, NaN elsewhere."""
    key, value = torch.randn(len(lengths), slots, kv_heads, 7), torch.randn(len(lengths), slots, kv_heads, 5)
    caches = [torch.full_like(tensor, torch.nan) for tensor in (key, value)]
    for n, length in enumerate(lengths):
        for cache, tensor in zip(caches, (key, value), strict=True):
            cache[n, :length] = tensor[n, :length]
    return key, value, *caches


def assert_rows(
    found: tuple[Tensor, Tensor], q: Tensor, rows: list[tuple[Tensor, Tensor]], slopes: Tensor, **options
) -> None:
    """Each sequence against its own keys alone."""
    for n, (key, value) in enumerate(rows):
        part = found[0][n : n + 1], found[1][n : n + 1]
        assert_is_kernels(part, q[n : n + 1], key[None], value[None], slopes, **options)


@pytest.mark.parametrize("options", CALLS[:6], ids=str)
def test_cache_is_written_in_place_and_attended_to(options):
    """Lengths 5, 0 and 9 of 16 slots, two new tokens each; what lies behind is NaN."""
    lengths = [5, 0, 9]
    key, value, key_cache, value_cache = filled(lengths, 16)
    q, slopes = torch.randn(3, 2, 6, 7), alibi_slopes(6)
    new = [torch.stack([tensor[n, length : length + 2] for n, length in enumerate(lengths)]) for tensor in (key, value)]
    found = flash.flash_attn_with_kvcache(
        q,
        key_cache,
        value_cache,
        *new,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        alibi_slopes=slopes,
        return_softmax_lse=True,
        **options,
    )
    for n, length in enumerate(lengths):
        assert torch.equal(key_cache[n, : length + 2], key[n, : length + 2])
        assert value_cache[n, length + 2 :].isnan().all()
    rows = [(key[n, : length + 2], value[n, : length + 2]) for n, length in enumerate(lengths)]
    assert_rows(found, q, rows, slopes, room=16, **options)


@pytest.mark.parametrize("seqlens", [6, None, "tensor"])
def test_cache_lengths_as_int_tensor_or_all(seqlens):
    length = 16 if seqlens is None else 6
    key, value, key_cache, value_cache = filled([length] * 2, 16)
    q = torch.randn(2, 3, 6, 7)
    given = torch.tensor([6, 6]) if seqlens == "tensor" else seqlens
    found = flash.flash_attn_with_kvcache(
        q,
        key_cache,
        value_cache,
        cache_seqlens=given,
        causal=True,
        alibi_slopes=alibi_slopes(6),
        return_softmax_lse=True,
    )
    assert_rows(found, q, [(key[n, :length], value[n, :length]) for n in range(2)], alibi_slopes(6), causal=True)


def test_cache_int_length_appends_without_masks():
    key, value, key_cache, value_cache = filled([6, 6], 16)
    q = torch.randn(2, 1, 6, 7)
    call = {"cache_seqlens": 6, "causal": True, "alibi_slopes": alibi_slopes(6), "return_softmax_lse": True}
    found = flash.flash_attn_with_kvcache(q, key_cache, value_cache, key[:, 6:7], value[:, 6:7], **call)
    assert torch.equal(key_cache[:, :7], key[:, :7]) and key_cache[:, 7:].isnan().all()
    assert_rows(found, q, [(key[n, :7], value[n, :7]) for n in range(2)], alibi_slopes(6), causal=True)


def test_cache_rows_left_padding_and_order():
    """Row 2 then row 0 of a cache of 3, their first 2 and 4 slots empty; column 0 is the first real one."""
    key, value, key_cache, value_cache = filled([8, 8, 11], 12)
    key_cache[2, :2], value_cache[0, :4] = torch.nan, torch.nan
    q, new_key, new_value = torch.randn(2, 2, 6, 7), torch.randn(2, 1, 3, 7), torch.randn(2, 1, 3, 5)
    for cache in (key_cache, value_cache):
        cache[2, :2], cache[0, :4] = torch.nan, torch.nan
    found = flash.flash_attn_with_kvcache(
        q,
        key_cache,
        value_cache,
        new_key,
        new_value,
        cache_seqlens=torch.tensor([11, 8], dtype=torch.int32),
        cache_batch_idx=torch.tensor([2, 0], dtype=torch.int32),
        cache_leftpad=torch.tensor([2, 4], dtype=torch.int32),
        causal=True,
        alibi_slopes=alibi_slopes(6),
        return_softmax_lse=True,
    )
    rows = [
        (torch.cat([key[2, 2:11], new_key[0]]), torch.cat([value[2, 2:11], new_value[0]])),
        (torch.cat([key[0, 4:8], new_key[1]]), torch.cat([value[0, 4:8], new_value[1]])),
    ]
    assert_rows(found, q, rows, alibi_slopes(6), causal=True)
    assert torch.equal(key_cache[2, 11], new_key[0, 0])


def test_cache_in_pages():
    lengths = [5, 9]
    key, value, *_ = filled(lengths, 12)
    table = torch.tensor([[6, 2, 0], [1, 5, 3]], dtype=torch.int32)
    pools = [torch.full((7, 4, 3, dim), torch.nan) for dim in (7, 5)]
    for pool, tensor in zip(pools, (key, value), strict=True):
        for n, length in enumerate(lengths):
            for slot in range(length):
                pool[table[n, slot // 4], slot % 4] = tensor[n, slot]
    q, new = torch.randn(2, 4, 6, 7), [torch.stack([t[0, 5:9], t[1, 9:13]]) for t in filled([13, 13], 13)[:2]]
    found = flash.flash_attn_with_kvcache(
        q,
        *pools,
        *(tensor[:, :3] for tensor in new),
        cache_seqlens=torch.tensor(lengths),
        block_table=table,
        causal=True,
        alibi_slopes=alibi_slopes(6),
        return_softmax_lse=True,
    )
    rows = [
        (torch.cat([key[n, :length], new[0][n, :3]]), torch.cat([value[n, :length], new[1][n, :3]]))
        for n, length in enumerate(lengths)
    ]
    assert_rows(found, q, rows, alibi_slopes(6), causal=True)
    assert torch.equal(pools[0][2, 1], new[0][0, 0])


NEW = {"k": torch.ones(2, 1, 3, 7), "v": torch.ones(2, 1, 3, 5)}
PAIR = torch.tensor([[0], [1]])


@pytest.mark.parametrize(
    ("name", "error", "arguments"),
    [
        ("rotary_cos", NotImplementedError, {"rotary_cos": torch.ones(16, 2)}),
        ("rotary_sin", NotImplementedError, {"rotary_sin": torch.ones(16, 2)}),
        ("cache_seqlens", ValueError, {"cache_seqlens": 17}),
        ("cache_seqlens", ValueError, {"cache_seqlens": torch.ones(3, dtype=torch.int32)}),
        ("cache_seqlens", ValueError, NEW),
        ("v must", ValueError, {**NEW, "v": torch.ones(2, 2, 3, 5), "cache_seqlens": 3}),
        ("1 more do not fit", ValueError, {**NEW, "cache_seqlens": 16}),
        ("k must not require", RuntimeError, {**NEW, "k": NEW["k"].clone().requires_grad_(), "cache_seqlens": 3}),
        ("cache_batch_idx", ValueError, {"cache_batch_idx": torch.tensor([0])}),
        ("cache_batch_idx", ValueError, {"cache_batch_idx": PAIR[:, 0], "block_table": PAIR}),
        ("cache_leftpad", ValueError, {"cache_leftpad": torch.tensor([0.0, 1.0])}),
        ("block_table", ValueError, {"block_table": PAIR.T}),
        ("window_size", ValueError, {"window_size": (1, 2, 3)}),
        ("window_size", ValueError, {**NEW, "cache_seqlens": 3, "window_size": 5}),
        ("softcap", ValueError, {"softcap": -1.0}),
        ("cache_seqlens must be a torch.Tensor, got bool", TypeError, {"cache_seqlens": True}),
        ("cache_batch_idx must be a torch.Tensor, got int", TypeError, {"cache_batch_idx": 3}),
        ("cache_leftpad must be a torch.Tensor, got int", TypeError, {"cache_leftpad": 3}),
        ("block_table must be a torch.Tensor, got list", TypeError, {"block_table": [[0], [1]]}),
        ("v_cache must have k_cache's shape", ValueError, {"v_cache": torch.ones(2, 16, 1, 5)}),
        ("v must be a torch.Tensor", TypeError, {**NEW, "v": 1.0, "cache_seqlens": 3}),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, error, arguments):
    q, k, v = make(1, 16)
    kept = k.clone()
    with pytest.raises(error, match=name):
        flash.flash_attn_with_kvcache(**({"q": q, "k_cache": k, "v_cache": v} | arguments))
    assert torch.equal(k, kept)


def written(**arguments) -> tuple[str, bool]:
    """What the call says of two sequences of 2 new tokens each, and whether it left the caches alone."""
    caches = [torch.ones(4, 8, 3, dim) for dim in (7, 5)]
    kept = [cache.clone() for cache in caches]
    new = torch.zeros(2, 2, 3, 7), torch.zeros(2, 2, 3, 5)
    with pytest.raises(ValueError, match="must") as caught:
        flash.flash_attn_with_kvcache(torch.ones(2, 1, 6, 7), *caches, *new, causal=True, **arguments)
    return str(caught.value), all(torch.equal(*pair) for pair in zip(caches, kept, strict=True))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("cache_seqlens must be from 0 to 8, got [-1, 3]", {"cache_seqlens": [-1, 3]}),
        ("cache_seqlens must be from 0 to 6, got [3, 7]: of 8 slots, 2 more do not fit", {"cache_seqlens": [3, 7]}),
        ("cache_seqlens must be from 0 to 8, got [50, 3]", {"cache_seqlens": [50, 3]}),
        ("cache_batch_idx must be from 0 to 3, got [0, -1]", {"cache_batch_idx": [0, -1]}),
        ("cache_batch_idx must be from 0 to 3, got [4, 1]", {"cache_batch_idx": [4, 1]}),
        ("cache_batch_idx must lead each new token to a slot of its own", {"cache_batch_idx": [2, 2]}),
        ("cache_leftpad must be from 0 to [3, 3], got [4, 0]", {"cache_leftpad": [4, 0]}),
        ("cache_leftpad must be from 0 to [3, 3], got [0, -1]", {"cache_leftpad": [0, -1]}),
        ("block_table must be from 0 to 3, got [0, -1]", {"block_table": [[0], [-1]]}),
        ("block_table must be from 0 to 3, got [0, 4]", {"block_table": [[0], [4]]}),
        ("block_table must lead each new token to a slot of its own", {"block_table": [[2], [2]]}),
    ],
)
def test_places_in_tensors_are_checked_as_ints_are_before_anything_is_written(words, places, kind):
    given = {"cache_seqlens": [3, 3], **places}
    said, untouched = written(**{name: torch.tensor(numbers, dtype=kind) for name, numbers in given.items()})
    assert words in said and untouched


def test_places_are_checked_where_nothing_is_written_too():
    q, k, v = make(1, 8)
    for places in ({"cache_seqlens": torch.tensor([50, 3])}, {"cache_leftpad": torch.tensor([0, 9])},
                   {"cache_batch_idx": torch.tensor([0, 2])}, {"block_table": torch.tensor([[0], [2]])}):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(places))} must be from 0 to"):
            flash.flash_attn_with_kvcache(q, k, v, window_size=(2, 0), **places)


def test_a_row_that_is_read_twice_and_table_entries_that_nobody_reads_are_legal():
    q, k, v = make(1, 8)
    twice = flash.flash_attn_with_kvcache(q, k, v, cache_batch_idx=torch.tensor([1, 1]))
    assert torch.equal(twice[1:], flash.flash_attn_with_kvcache(q, k, v)[1:])
    table = torch.tensor([[1, -1], [0, 99]])
    paged = flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([8, 5]), block_table=table)
    for n, (page, length) in enumerate(((1, 8), (0, 5))):
        alone = flash.flash_attn_with_kvcache(
            q[n : n + 1], k[page : page + 1], v[page : page + 1], cache_seqlens=length
        )
        torch.testing.assert_close(paged[n : n + 1], alone)


def test_a_query_of_another_dtype_is_refused_before_anything_is_written():
    q, k, v = make(1, 8)
    kept = k.clone()
    with pytest.raises(TypeError, match="key must have the query's dtype"):
        flash.flash_attn_with_kvcache(q.double(), k, v, k[:, :1] + 1, v[:, :1], cache_seqlens=3)
    assert torch.equal(k, kept)
