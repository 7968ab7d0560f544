# SPDX-License-Identifier: Apache-2.0
"""Caches with a window: what is evicted, that nothing visible is, and both meanings of distance."""

import pytest
import torch
from torch import Tensor

from linbias import alibi_attention, alibi_slopes
from linbias.cache import KVCache
from tests.caching import (
    assert_equals_full,
    assert_weights,
    make,
    one_hot,
    poisoned,  # noqa: F401  (a fixture)
    run,
    weights,
)

pytestmark = pytest.mark.usefixtures("poisoned")
STEPS = (7, 1, 1, 1, 4, 9, 1, 1, 1, 1, 1, 1, 1, 1, 6)
STORAGES = {"slots": {"block": 3}, "pages": {"page_size": 4}}


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> dict[str, int]:
    return STORAGES[request.param]


@pytest.mark.parametrize(("left", "sinks"), [(5, 0), (5, 2), (0, 1), (4, 5), (100, 3)])
def test_evicting_and_going_on_equals_the_window_over_the_whole_text(storage, left, sinks):
    query, key, value = make(37)
    cache = KVCache(window=(left, 0), sinks=sinks, **storage)
    actual = run(cache, query, key, value, alibi_slopes(6), steps=STEPS)
    assert_equals_full(actual, query, key, value, alibi_slopes(6), window=(left, 0), sinks=sinks)
    assert cache.seen.tolist() == [37, 37]
    kept = cache.positions[0].tolist()
    needed = [*range(min(sinks, 37)), *range(max(sinks, 37 - left - 1), 37)]
    assert set(needed) <= set(kept) and kept == sorted(kept)


def test_the_window_is_inclusive(storage):
    """left=2 keeps three keys, left=0 only the query's own, and a wide one is none."""
    half = torch.tensor([0.5])
    for tokens, window, expected in (
        (5, (2, 0), [0.0, 0.0, 0.1863237, 0.3071959, 0.5064804]),
        (3, (0, 0), [0.0, 0.0, 1.0]),
        (4, (9, None), [0.1015363, 0.1674051, 0.2760043, 0.4550542]),
    ):
        assert_weights(weights(one_hot(tokens, window=window, **storage), half)[0, 0], expected)


def test_memory_stays_and_is_used_again(storage):
    cache = KVCache(window=(19, 0), sinks=2, **storage)  # a query sees 20 keys and the sinks
    sizes, places = set(), set()
    for n in range(400):
        cache.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
        if n > 100:
            sizes.add(cache.nbytes)
            places.add(cache._opened().key.data_ptr())
    assert len(sizes) == len(places) == 1
    assert cache.nbytes <= 2.5 * 22 * 2 * 2 * 4 * 4
    assert int(cache.lengths) < 30 and int(cache.seen) == 400


def test_memory_of_a_long_prompt_is_given_back():
    query, key, value = make(1000, batch=1)
    cache = KVCache(window=(10, 0), sinks=1, block=4)
    cache.append(key[:, :, :990], value[:, :, :990])
    first = cache.attend(query[:, :, :990], alibi_slopes(6))
    held = cache.nbytes
    later = run(cache, query[:, :, 990:], key[:, :, 990:], value[:, :, 990:], alibi_slopes(6), steps=(1,) * 10)
    assert cache.nbytes < held / 20
    actual = torch.cat([first[:, :, -20:], later], 2)
    assert_equals_full(actual, query[:, :, -30:], key, value, alibi_slopes(6), window=(10, 0), sinks=1)


@pytest.mark.parametrize("distance", ["text", "cache"])
def test_sequences_of_different_lengths_evict_by_their_own(storage, distance):
    mask = torch.tensor([[0] * 8 + [1] * 3, [1] * 11, [1] * 5 + [0] * 6], dtype=torch.bool)
    prompt, steps = make(11, batch=3), make(22, batch=3)
    options = {"window": (6, 0), "sinks": 2, "distance": distance}
    cache, counts = KVCache(**options, **storage), (1, 1, 5, 1, 1, 12, 1)
    cache.append(*prompt[1:], mask=mask)
    first = cache.attend(prompt[0], alibi_slopes(6))
    later = run(cache, *steps, alibi_slopes(6), steps=counts)
    for n, real in enumerate(mask):
        alone = KVCache(**options)
        expected = run(
            alone, *(tensor[n : n + 1, :, real] for tensor in prompt), alibi_slopes(6), steps=(int(real.sum()),)
        )
        torch.testing.assert_close(first[n : n + 1, :, real], expected)
        expected = run(alone, *(tensor[n : n + 1] for tensor in steps), alibi_slopes(6), steps=counts)
        torch.testing.assert_close(later[n : n + 1], expected)
        text = [torch.cat([a[n : n + 1, :, real], b[n : n + 1]], 2) for a, b in zip(prompt, steps, strict=True)]
        if distance == "text":
            assert_equals_full(later[n : n + 1], *text, alibi_slopes(6), window=(6, 0), sinks=2)
        else:
            assert_equals_capped(later[n : n + 1], *text, alibi_slopes(6), left=6, sinks=2)


def assert_equals_capped(
    actual: Tensor, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, left: int, sinks: int
) -> None:
    """The definition, row by row: a sink's distance is min(p - r, sinks + left - r)."""
    rows, tokens = actual.shape[2], key.shape[2]
    for i in range(rows):
        here = tokens - rows + i
        near = list(range(max(sinks, here - left), here + 1))
        kept = [*range(min(sinks, here + 1)), *near]
        places = torch.tensor([here - min(here - r, sinks + left - r) if r < sinks else r for r in kept])
        assert_equals_full(
            actual[:, :, i : i + 1],
            query[:, :, here : here + 1],
            key[:, :, kept],
            value[:, :, kept],
            slopes,
            causal=False,
            query_positions=torch.tensor([here]),
            key_positions=places,
        )


@pytest.mark.parametrize("steps", [STEPS, (37,), (20, 17), (1,) * 37], ids=str)
def test_distance_in_the_cache_follows_its_definition(storage, steps):
    query, key, value = make(37)
    cache = KVCache(window=(5, 0), sinks=3, distance="cache", **storage)
    actual = run(cache, query, key, value, alibi_slopes(6), steps=steps)
    assert_equals_capped(actual, query, key, value, alibi_slopes(6), left=5, sinks=3)


def test_distance_in_the_cache_is_streaming_llms():
    """Keep the first 3 tokens and the last 5 before the new one in a plain list, and number them as they lie there."""
    query, key, value = make(30)
    cache = KVCache(window=(5, 0), sinks=3, distance="cache")
    kept: list[int] = []
    for n in range(30):
        kept = [*kept[:3], *kept[3:][-5:], n]
        cache.append(key[:, :, n : n + 1], value[:, :, n : n + 1])
        actual = cache.attend(query[:, :, n : n + 1], alibi_slopes(6))
        assert_equals_full(actual, query[:, :, n : n + 1], key[:, :, kept], value[:, :, kept], alibi_slopes(6))


@pytest.mark.parametrize("rows", [1, 4])
def test_the_aux_of_capped_distances_covers_sinks_and_window(rows):
    """lse is that of all scores; what was skipped stays within the tolerance; both parts were counted."""
    query, key, value = make(40)
    cache = KVCache(window=(9, 0), sinks=2, distance="cache")
    cache.append(key, value)
    out, aux = cache.attend(query[:, :, -rows:], alibi_slopes(6), tolerance=1e-3, return_aux=True)
    exact = cache.attend(query[:, :, -rows:], alibi_slopes(6), tolerance=0.0, backend="reference")
    assert (out - exact).abs().max() <= 2e-3 * value.abs().max()
    assert (aux.skipped <= 1e-3).all() and (aux.computed >= rows).all()
    ones = KVCache(window=(9, 0), sinks=2, distance="cache")
    ones.append(torch.zeros(1, 1, 40, 2), torch.ones(1, 1, 40, 1))
    lse = ones.attend(torch.zeros(1, 1, rows, 2), torch.tensor([0.5]), return_aux=True)[1].lse
    distances = torch.tensor([*range(10), 10.0, 11.0], dtype=torch.float64)
    torch.testing.assert_close(lse.double(), (-0.5 * distances).logsumexp(0).expand(1, 1, rows), atol=1e-6, rtol=0)


def test_sinks_fade_in_the_text_and_stay_in_the_cache():
    """Slope 0.5, window of 9: after 100 tokens e^(-0.5 * 99) is left of the first, and e^(-0.5 * 10) in the cache."""
    for distance, far in (("text", 99), ("cache", 10)):
        cache = one_hot(100, window=(9, 0), sinks=1, distance=distance)
        seen = torch.tensor([*range(10), far], dtype=torch.float64)
        expected = (-0.5 * seen).softmax(0)[-1]
        report = cache.report(torch.tensor([0.5]), tolerance=1e-9)
        torch.testing.assert_close(report.sink_weight[0, 0], expected)
        assert report.visible.tolist() == [[11 if distance == "cache" else 10]]
        torch.testing.assert_close(
            weights(cache, torch.tensor([0.5]))[0, 0, 0].double(), expected, atol=1e-7, rtol=1e-4
        )


def test_options_count_in_the_text_after_eviction(storage):
    """Tokens without bias are the text's first, kept as sinks."""
    query, key, value = make(30)
    for distance in ("text", "cache"):
        cache = KVCache(window=(5, 0), sinks=2, distance=distance, **storage)
        actual = run(cache, query, key, value, alibi_slopes(6), steps=(7, *(1,) * 20, 3), unbiased=2)
        assert_equals_full(actual, query, key, value, alibi_slopes(6), window=(5, 0), sinks=2, unbiased=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_and_window_are_rounded_once(dtype: torch.dtype):
    """Several rows are merged of two parts, whose sum may be far smaller than they are."""
    query, key, value = (each[:1] for each in make(23, dtype=dtype))
    value = torch.where(torch.arange(23)[:, None] < 2, -value, value)
    cache, exact = (KVCache(window=(4, 0), sinks=2, distance="cache") for _ in range(2))
    cache.append(key, value)
    exact.append(key.double(), value.double())
    slopes = alibi_slopes(6)
    actual, expected = cache.attend(query[:, :, -9:], slopes), exact.attend(query[:, :, -9:].double(), slopes.double())
    # One rounding of the result, and those of float32 on the way, of numbers as large as values are.
    once = torch.finfo(dtype).eps / 2 * expected.abs()
    assert ((actual - expected).abs() <= once + 64 * torch.finfo(torch.float32).eps * value.abs().max()).all()


def test_slopes_and_queries_get_gradients_through_both_parts():
    query, key, value = make(20, batch=1, heads=2, kv_heads=1, dtype=torch.float64)
    cache = KVCache(window=(5, 0), sinks=3, distance="cache")
    cache.append(key, value)
    rows, slopes = query[:, :, -3:].requires_grad_(), alibi_slopes(2).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda q, s: cache.attend(q, s, backend="reference"), (rows, slopes))


def test_windows_crop_as_far_as_nothing_needed_was_evicted(storage):
    query, key, value = make(40)
    slopes = alibi_slopes(6)
    cache = KVCache(window=(5, 0), sinks=2, **storage)
    run(cache, query[:, :, :34], key[:, :, :34], value[:, :, :34], slopes, steps=(30, 4))
    cache.drop(torch.tensor([3, 1]))
    assert cache.seen.tolist() == [31, 33]
    actual = run(cache, query[:, :, 34:], key[:, :, 34:], value[:, :, 34:], slopes, steps=(1, 5))
    for n, kept in enumerate((31, 33)):
        alone = [torch.cat([t[n : n + 1, :, :kept], t[n : n + 1, :, 34:]], 2) for t in (query, key, value)]
        assert_equals_full(actual[n : n + 1], *alone, slopes, window=(5, 0), sinks=2)
    with pytest.raises(ValueError, match="cannot crop to .*evicted already"):
        cache.crop(9)


@pytest.mark.parametrize("name", ["window", "sinks", "prefix"])
def test_options_that_eviction_decided_are_refused_by_name(name):
    with pytest.raises(TypeError, match=f"attend takes no {name}, which is the cache's"):
        one_hot(3, window=(2, 0)).attend(torch.zeros(1, 1, 1, 2), torch.tensor([0.5]), **{name: 1})
    with pytest.raises(ValueError, match="positions cannot be given to a cache with a window"):
        cache = KVCache(window=(2, 0))
        cache.append(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), positions=torch.tensor([3]))


def test_endless_generation_at_constant_memory_equals_the_whole_text(storage):
    """300 steps behind a window of 12: the last row is what the whole text would give."""
    query, key, value = make(300, batch=1)
    cache = KVCache(window=(12, 0), sinks=4, **storage)
    cache.append(key[:, :, :1], value[:, :, :1])
    for n in range(1, 300):
        cache.append(key[:, :, n : n + 1], value[:, :, n : n + 1])
    actual = cache.attend(query[:, :, -1:], alibi_slopes(6))
    full = alibi_attention(query[:, :, -1:], key, value, alibi_slopes(6), causal=True, window=(12, 0), sinks=4)
    torch.testing.assert_close(actual, full)


@pytest.mark.parametrize("length", [51, 60])
@pytest.mark.parametrize("storage", [{"block": 3}, {"page_size": 16}, {"page_size": 4}], ids=str)
def test_a_sequence_that_got_only_padding_keeps_its_newest_tokens_window(storage, length):
    """Its newest token, or several of them, is asked again: nothing of what they see may be gone."""
    query, key, value = make(64)
    options = {"window": (3, 0), "sinks": 4}
    for padded, rows in ((2, 1), (5, 4)):
        cache = KVCache(**options, **storage)
        for start in range(0, length, 3):
            cache.append(*(tensor[:, :, start : start + 3] for tensor in (key, value)))
        real = torch.stack([torch.zeros(padded), torch.ones(padded)]).bool()
        for _ in range(2):
            cache.append(key[:, :, :padded], value[:, :, :padded], mask=real)
            out = cache.attend(query[:, :, length - rows : length], alibi_slopes(6))
            text = [tensor[:1, :, :length] for tensor in (query, key, value)]
            assert_equals_full(out[:1], *text, alibi_slopes(6), **options)


def test_after_a_crop_the_newest_token_sees_its_whole_window(storage):
    query, key, value = make(40)
    cache = KVCache(window=(5, 0), sinks=2, **storage)
    run(cache, query, key, value, alibi_slopes(6), steps=(30, 10))
    for length in (34, 30):
        cache.crop(length)
        text = [tensor[:, :, :length] for tensor in (query, key, value)]
        out = cache.attend(text[0][:, :, -1:], alibi_slopes(6))
        assert_equals_full(out, *text, alibi_slopes(6), window=(5, 0), sinks=2)


def assert_rows_right_or_refused(cache: KVCache, query: Tensor, key: Tensor, value: Tensor, most: int) -> int:
    """How many of the newest rows can be asked for; those are right, and more are refused."""
    for rows in range(1, most + 1):
        try:
            out = cache.attend(query[:, :, query.shape[2] - rows :], alibi_slopes(6))
        except ValueError as refused:
            assert f"cannot attend from the last {rows} tokens: tokens 2 to" in str(refused)
            assert "were evicted already" in str(refused)
            return rows - 1
        assert_equals_full(out, query, key, value, alibi_slopes(6), window=(8, 0), sinks=2)
    return most


@pytest.mark.parametrize("storage", [{"block": 3}, {"page_size": 2}], ids=str)
def test_rows_whose_window_was_evicted_are_refused_and_the_others_right(storage):
    """Step by step, after a drop, and after an append of nothing but padding."""
    query, key, value = make(60)
    cache = KVCache(window=(8, 0), sinks=2, **storage)
    for n in range(60):
        cache.append(key[:, :, n : n + 1], value[:, :, n : n + 1])
    found = assert_rows_right_or_refused(cache, query, key, value, 60)
    assert 1 <= found < 60
    with pytest.raises(ValueError, match="tokens 2 to [0-9]+ were evicted already"):
        cache.attend(query, alibi_slopes(6))
    for _ in range(2):
        none = torch.zeros(2, 3, dtype=torch.bool)
        cache.append(key[:, :, :3], value[:, :, :3], mask=none)
        assert 1 <= assert_rows_right_or_refused(cache, query, key, value, 2) <= 2
    cache.append(key[:, :, :6], value[:, :, :6])
    cache.drop(6)
    assert 1 <= assert_rows_right_or_refused(cache, query, key, value, 60) < 60


def test_rows_are_refused_by_the_sequence_that_lost_what_they_see():
    """The first sequence is young and has lost nothing; later keys that the window shows do not matter."""
    query, key, value = make(60)
    cache = KVCache(window=(8, None), sinks=2, block=4)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0] = False
    for start in range(0, 60, 20):
        part = slice(start, start + 20)
        cache.append(key[:, :, part], value[:, :, part], mask=mask if start < 40 else None)
    assert cache.attend(query[:, :, -20:], alibi_slopes(6)).isfinite().all()
    with pytest.raises(ValueError, match="cannot attend from the last 60 tokens"):
        cache.attend(query, alibi_slopes(6))


def test_taking_back_more_than_there_is_is_an_error(storage):
    query, key, value = make(40)
    cache = KVCache(window=(5, 0), sinks=2, **storage)
    run(cache, query, key, value, alibi_slopes(6), steps=(30, 10))
    with pytest.raises(ValueError, match="count must be at most the tokens that a sequence has had, got 41 of 40"):
        cache.drop(41)
    with pytest.raises(ValueError, match="were evicted already"):
        cache.drop(40)
    assert cache.seen.tolist() == [40, 40]
