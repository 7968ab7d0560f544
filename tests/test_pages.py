# SPDX-License-Identifier: Apache-2.0
"""What only paged caches do: tables, shared and reused pages, pages left unread."""

import pytest
import torch

from linbias import alibi_attention, alibi_slopes, key_bounds
from linbias.backends import native
from linbias.cache import KVCache
from linbias.semantics.pages import gather_pages
from linbias.testing import assert_within_budget
from tests.caching import (
    assert_equals_full,
    make,
    poisoned,  # noqa: F401  (a fixture)
    run,
)

pytestmark = pytest.mark.usefixtures("poisoned")


def test_lengths_5_and_9_in_blocks_of_4():
    """The weight of each key is that of its distance from its own sequence's last token; unused slots have none."""
    mask = torch.tensor([[1] * 5 + [0] * 4, [1] * 9], dtype=torch.bool)
    cache = KVCache(page_size=4)
    cache.append(torch.zeros(2, 1, 9, 2), torch.eye(9).expand(2, 1, 9, 9), mask=mask)
    assert (cache.block_table > 0).sum(1).tolist() == [2, 3]
    slopes = torch.tensor([0.5, 0.25])
    found = cache.attend(torch.zeros(2, 2, 1, 2), slopes)[:, :, 0]
    for n, length in enumerate((5, 9)):
        bias = -slopes[:, None] * torch.arange(length - 1, -1, -1)
        torch.testing.assert_close(found[n, :, :length], bias.softmax(1), atol=5e-7, rtol=0)
        assert not found[n, :, length:].any()


def test_the_pool_holds_what_the_table_says():
    _, key, value = make(9)
    cache = KVCache(page_size=4)
    cache.append(key, value)
    for n in range(2):
        pages = cache.block_table[n].long()
        assert torch.equal(cache.key_pages[pages].flatten(0, 1)[:9].transpose(0, 1), key[n])
        assert torch.equal(cache.value_pages[pages].flatten(0, 1)[:9].transpose(0, 1), value[n])
    with pytest.raises(ValueError, match=r"no pages; make it with KVCache\(page_size=...\)"):
        other = KVCache()
        other.append(key, value)
        _ = other.block_table


def test_short_sequences_take_only_the_pages_they_need():
    mask = torch.zeros(4, 40, dtype=torch.bool)
    for n, length in enumerate((40, 1, 5, 0)):
        mask[n, :length] = True
    cache = KVCache(page_size=4)
    cache.append(*make(40, batch=4)[1:], mask=mask)
    assert (cache.block_table > 0).sum(1).tolist() == [10, 1, 2, 0]
    assert cache.key_pages.shape[0] == 16  # 13 and the empty one, grown by doubling


def test_pages_that_fall_free_are_used_again():
    inputs = make(23)
    cache = KVCache(page_size=4)
    cache.append(*inputs[1:])
    held = cache.key_pages.shape[0]
    for kept in (3, 9, 0):
        cache.crop(kept)
        query, key, value = make(20 - kept)
        cache.append(key, value)
        assert cache.key_pages.shape[0] == held
    assert_equals_full(cache.attend(query, alibi_slopes(6)), query, key, value, alibi_slopes(6))
    cache.reset()
    assert_equals_full(run(cache, *inputs, alibi_slopes(6)), *inputs, alibi_slopes(6))
    assert cache.key_pages.shape[0] == held


def test_beams_share_pages_until_they_write():
    """Eight beams of a prompt of 10 pages take one page each beside it; dropping seven frees theirs."""
    prompt, step = make(42, batch=1), make(1, batch=8)
    cache = KVCache(page_size=4)
    cache.append(*prompt[1:])
    cache.select([0] * 8)
    assert len(set(cache.block_table.flatten().tolist())) == 11
    cache.append(*step[1:])
    table = cache.block_table
    assert len(set(table[:, :10].flatten().tolist())) == 10 and len(set(table[:, 10].tolist())) == 8
    actual = cache.attend(step[0], alibi_slopes(6))
    for n in range(8):
        text = [torch.cat([a, b[n : n + 1]], 2) for a, b in zip(prompt, step, strict=True)]
        assert_equals_full(actual[n : n + 1], *text, alibi_slopes(6))
    cache.select([5])
    held = cache.key_pages.shape[0]
    cache.append(*make(7 * 4, batch=1)[1:])
    assert cache.key_pages.shape[0] == held


def test_padding_of_one_sequence_never_reaches_a_page_it_shares():
    """Cropped to 1 and 3 tokens of the same page; the first then takes in nothing but padding."""
    query, key, value = make(3, batch=1)
    cache = KVCache(page_size=4)
    cache.append(key, value)
    cache.select([0, 0])
    cache.crop(torch.tensor([1, 3]))
    noise = torch.full((2, 3, 2, 7), torch.nan), torch.full((2, 3, 2, 5), torch.nan)
    cache.append(*noise, mask=torch.tensor([[False, False], [False, False]]))
    actual = cache.attend(query.expand(2, -1, -1, -1), alibi_slopes(6))
    assert_equals_full(actual[1:], query, key, value, alibi_slopes(6))


@pytest.mark.skipif(not native.INSTALLED, reason="the extension was not built: no C++ compiler")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.1}, {"tolerance": 1e-3}], ids=str)
def test_pages_nobody_sees_are_not_read(rows, options):
    """NaN in a page out of reach never shows, and the promise on the skipped weight holds."""
    query, key, value = make(400)
    steep = 2 * alibi_slopes(6, max_bias=2.0)
    cache = KVCache(page_size=8)
    cache.append(key, value)
    call = {"causal": True, "backend": "reference", **options}
    plain = alibi_attention(query[:, :, -rows:], key, value, steep, **call)
    exact = alibi_attention(query[:, :, -rows:].double(), key.double(), value.double(), steep, **call)
    out, aux = cache.attend(query[:, :, -rows:], steep, return_aux=True, backend="native", **options)
    assert (aux.computed < 2 * 300 * rows).all() and (aux.computed >= 2 * 10 * rows).all()
    tolerance = options.get("tolerance", torch.finfo(torch.float32).eps / 4)
    assert (aux.skipped > 0).all() and (aux.skipped <= tolerance).all()
    allowance = 2 * tolerance * value.abs().max().item()
    assert_within_budget(out, exact, plain, "out", allowance=allowance)
    cache.key_pages[cache.block_table[:, 5].long()] = torch.nan
    assert torch.equal(cache.attend(query[:, :, -rows:], steep, backend="native", **options), out)


def test_a_page_that_is_used_again_has_a_bound_of_its_own():
    """Huge and NaN keys, then small ones in the same pages: the bounds are those of what is there."""
    cache = KVCache(page_size=4)
    _, key, value = make(24)
    cache.append(torch.where(key > 1, torch.nan, 1e6 * key), value)
    held = cache.key_pages.shape[0]
    cache.crop(2)
    cache.crop(0)
    cache.append(key, value)
    assert cache.key_pages.shape[0] == held
    pools = cache._opened().read(24, 1)
    norms = gather_pages(pools.bounds.norms, pools.table)
    torch.testing.assert_close(norms, key_bounds(key, 4).norms)
    cache.select([1, 0, 1])
    cache.append(*(each[[1, 0, 1]] for each in make(2)[1:]))
    pools = cache._opened().read(26, 1)
    assert torch.equal(gather_pages(pools.bounds.norms, pools.table)[:, :, :6], norms[[1, 0, 1]])


def test_pages_with_a_large_key_are_read():
    """One key of huge norm in the middle, in the direction of the query: far away and still the strongest."""
    query, key, value = make(400, batch=1)
    key[:, :, 100] = 100 * query[:, ::2, -1]
    steep = 2 * alibi_slopes(6, max_bias=2.0)
    cache = KVCache(page_size=8)
    cache.append(key, value)
    actual = cache.attend(query[:, :, -1:], steep)
    assert_equals_full(actual, query[:, :, -1:], key, value, steep)
    assert (actual - value[:, :, 100].repeat_interleave(2, 1)[:, :, None]).abs().amax((0, 2, 3)).min() < 1e-3


def test_nothing_is_left_unread_where_it_would_be_wrong_to():
    """Flat heads, negative slopes, tolerance 0, tokens without bias, masks, NaN keys."""
    query, key, value = make(400, batch=1)
    steep = 2 * alibi_slopes(6, max_bias=2.0)
    cache = KVCache(page_size=8)
    cache.append(key, value)
    row = query[:, :, -1:]
    near = torch.ones(400, dtype=torch.bool)
    near[-60:] = False  # hides the query's own key, on whose weight the reach is built
    for slopes, options in (
        (torch.zeros(6), {}),
        (torch.full((6,), -0.01), {}),
        (steep, {"tolerance": 0.0}),
        (steep, {"unbiased": 100}),
        (steep, {"attn_mask": near}),
    ):
        assert_equals_full(cache.attend(row, slopes, **options), row, key, value, slopes, **options)
    key[:, :, 100] = torch.nan
    cache.reset()
    cache.append(key, value)
    assert cache.attend(row, steep).isnan().all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tolerance": 1.5}, ValueError, r"tolerance must be in \[0, 1\).*got 1.5"),
        ({"tolerance": -0.1}, ValueError, r"tolerance must be in \[0, 1\).*got -0.1"),
        ({"tolerance": "x"}, TypeError, "tolerance must be a Python number, got str"),
        ({"scale": "x"}, TypeError, "scale must be a Python number, got str"),
        ({"scale": torch.nan}, ValueError, "scale must be finite"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    ],
)
def test_options_are_checked_as_given(options, error, words):
    query, key, value = make(400, batch=1)
    cache = KVCache(page_size=8)
    cache.append(key, value)
    with pytest.raises(error, match=words):
        cache.attend(query[:, :, -1:], 2 * alibi_slopes(6, max_bias=2.0), **options)
