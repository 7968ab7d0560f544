# SPDX-License-Identifier: Apache-2.0
"""Single calls of KVCache: their weights, what they refuse, gradients, conversions."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linbias import BackendUnavailable, alibi_attention, alibi_slopes, backends, key_bounds
from linbias.cache import KVCache
from linbias.prepare import prepare
from tests.caching import (
    STORAGES,
    assert_equals_full,
    assert_weights,
    make,
    one_hot,
    poisoned,  # noqa: F401  (a fixture)
    run,
    weights,
)

HALF = torch.tensor([0.5])
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> dict[str, int]:
    return STORAGES[request.param]


def test_one_query_sees_the_bias_over_the_keys(storage):
    """Not the bias over the query's own length, which would be 0 and the weights uniform."""
    found = weights(one_hot(5, **storage), alibi_slopes(2))
    assert_weights(found[0, 0], [0.1758119, 0.1871507, 0.1992209, 0.2120696, 0.2257469])
    torch.testing.assert_close(found[1, 0, [0, 4]], torch.tensor([0.1984406, 0.2015655]), atol=5e-7, rtol=0)


def test_caches_share_nothing_between_shapes_or_objects(storage):
    """Lengths that come and go, and two caches with 4 and 8 heads in turn."""
    for tokens, keys in ((5, 5), (5, 6), (3, 3), (1, 9), (8, 8)):
        inputs = {heads: make(keys, heads=heads, kv_heads=3 if heads == 6 else 2) for heads in (4, 6)}
        caches = {heads: KVCache(**storage) for heads in inputs}
        for heads, (_, key, value) in inputs.items():
            caches[heads].append(key, value)
        for heads, (query, key, value) in inputs.items():
            actual = caches[heads].attend(query[:, :, keys - tokens :], alibi_slopes(heads))
            assert_equals_full(actual, query, key, value, alibi_slopes(heads))


def test_queries_align_with_the_last_keys(storage):
    cache = one_hot(6, **storage)
    assert (weights(cache, HALF)[0, 0] > 0).all()
    assert ((weights(cache, HALF, rows=2)[0] > 0).sum(1)).tolist() == [5, 6]


def test_the_newest_key_has_no_bias():
    """The log-sum-exp is that of a bias of 0 at the own position; and decode in fp16 equals prefill in fp16."""
    cache = one_hot(3)
    _, aux = cache.attend(torch.zeros(1, 1, 1, 2), HALF, return_aux=True)
    expected = torch.tensor([0.0, -0.5, -1.0], dtype=torch.float64).logsumexp(0)
    assert abs(float(aux.lse) - float(expected)) < 1e-6
    query, key, value = make(40, dtype=torch.float16)
    cache = KVCache()
    cache.append(key, value)
    rows, row = cache.attend(query, alibi_slopes(6)), cache.attend(query[:, :, -1:], alibi_slopes(6))
    assert (rows[:, :, -1:] - row).abs().max() < 2e-3


@pytest.mark.parametrize("backend", [*backends.available(), "auto"])
def test_every_path_applies_the_slopes_or_refuses(storage, backend):
    query, key, value = make(12)
    cache = KVCache(**storage)
    try:
        for part in (slice(0, 11), slice(11, 12)):
            cache.append(key[:, :, part], value[:, :, part])
            call = [cache.attend(query[:, :, part], s, backend=backend) for s in (alibi_slopes(6), torch.zeros(6))]
            assert (call[0] - call[1]).abs().max() > 1e-2
    except BackendUnavailable as reason:
        assert backend in str(reason) and "backend='auto'" in str(reason)
        pytest.skip(str(reason))


def test_any_length_works_after_any_other(storage):
    cache = KVCache(**storage)
    for tokens in (16, 17, 1):
        query, key, value = make(tokens)
        cache.reset()
        assert_equals_full(
            run(cache, query, key, value, alibi_slopes(6), steps=(tokens,)), query, key, value, alibi_slopes(6)
        )


def test_slopes_by_sequence_and_wrong_ones_refused(storage):
    query, key, value = make(9)
    cache = KVCache(**storage)
    cache.append(key, value)
    slopes = torch.stack([alibi_slopes(6), alibi_slopes(6, rule="geometric")])
    both = cache.attend(query, slopes)
    for n in range(2):
        assert_equals_full(both[n : n + 1], *(t[n : n + 1] for t in (query, key, value)), slopes[n])
    assert torch.equal(cache.attend(query, slopes[:1]), cache.attend(query, slopes[0]))
    for wrong in (torch.ones(2), torch.ones(6, 1), torch.ones(3), torch.ones(3, 6)):
        with pytest.raises(ValueError, match=r"slopes must have shape \(6,\), \(1, 6\) or \(2, 6\)"):
            cache.attend(query[:, :, -1:], wrong)


@pytest.mark.parametrize(
    "name", ["key_mask", "key_positions", "query_positions", "query_segments", "key_segments", "key_bounds", "metric"]
)
def test_options_the_cache_owns_are_refused_by_name(name):
    with pytest.raises(TypeError, match=f"attend takes no {name}, which is the cache's"):
        one_hot(3).attend(torch.zeros(1, 1, 1, 2), HALF, **{name: None})


def test_unknown_options_and_empty_caches_are_refused():
    with pytest.raises(TypeError, match="attend has no option 'is_causal'"):
        one_hot(3).attend(torch.zeros(1, 1, 1, 2), HALF, is_causal=True)
    with pytest.raises(RuntimeError, match="the cache is empty"):
        KVCache().attend(torch.zeros(1, 1, 1, 2), HALF)
    with pytest.raises(ValueError, match="query must have shape"):
        one_hot(3).attend(torch.zeros(1, 1, 2), HALF)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sinks": 1}, r"sinks and distance='cache' need window=\(left, ...\)"),
        ({"distance": "cache"}, r"sinks and distance='cache' need"),
        ({"distance": "tokens"}, "distance must be 'text' or 'cache', got 'tokens'"),
        ({"window": 4}, "window must be None or"),
        ({"capacity": 8, "page_size": 4}, "capacity goes with neither"),
        ({"capacity": 8, "window": (4, 0)}, "capacity goes with neither"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
    ],
)
def test_wrong_constructions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        KVCache(**arguments)


def test_tokens_that_do_not_fit_leave_the_cache_as_it_was(storage):
    query, key, value = make(6)
    cache = KVCache(**storage)
    with pytest.raises(ValueError, match="value must be torch.float32 of shape"):
        cache.append(key, value[:, :, :5])
    cache.append(key[:, :, :5], value[:, :, :5])
    for wrong_key, wrong_value in ((key.double(), value.double()), (key[:1], value[:1]), (key[..., :5], value)):
        with pytest.raises(ValueError, match="key must be torch.float32 of shape"):
            cache.append(wrong_key, wrong_value)
    with pytest.raises(ValueError, match="4 dimensions|floating with shape"):
        cache.append(key[0], value[0])
    with pytest.raises(TypeError, match="mask must be bool"):
        cache.append(key, value, mask=torch.ones(6))
    with pytest.raises(TypeError, match="positions must be integers"):
        cache.append(key, value, positions=torch.ones(6))
    with pytest.raises(ValueError, match="length must be an int >= 0"):
        cache.crop(-1)
    with pytest.raises(ValueError, match=r"count must be an int or integers of shape \(2,\)"):
        cache.drop(torch.tensor([1]))
    with pytest.raises(TypeError, match="index must be integers"):
        cache.select(torch.tensor([True, False]))
    with pytest.raises(ValueError, match="reorder needs 2 numbers"):
        cache.reorder([0])
    cache.append(key[:, :, 5:], value[:, :, 5:])
    assert_equals_full(cache.attend(query, alibi_slopes(6)), query, key, value, alibi_slopes(6))


def test_keys_with_gradients_are_refused_and_queries_get_theirs(storage):
    query, key, value = make(6)
    cache = KVCache(**storage)
    for tensor in (key, value):
        tensor.requires_grad_()
        with pytest.raises(RuntimeError, match=r"torch.no_grad\(\) or .detach\(\)"):
            cache.append(key, value)
        tensor.requires_grad_(False)
    with torch.no_grad():
        cache.append(key.requires_grad_(), value)
    slopes = alibi_slopes(6).requires_grad_()
    query.requires_grad_()
    cache.attend(query, slopes, backend="tiled").sum().backward()
    found = query.grad, slopes.grad
    expected = torch.autograd.grad(
        alibi_attention(query, key.detach(), value, slopes, causal=True).sum(), (query, slopes)
    )
    torch.testing.assert_close(found, expected)


def test_a_backward_after_the_next_append_raises_instead_of_using_overwritten_keys():
    query, key, value = make(6)
    cache = KVCache()
    cache.append(key, value)
    out = cache.attend(query.requires_grad_(), alibi_slopes(6), backend="tiled")
    cache.append(key, value)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_filled_in_inference_mode_and_used_outside(storage):
    query, key, value = make(8)
    cache = KVCache(**storage)
    mask = torch.ones(2, 6, dtype=torch.bool)
    with torch.inference_mode():
        cache.append(key[:, :, :6], value[:, :, :6], mask=mask, positions=torch.arange(6))
        cache.select([1, 0, 0])
        cache.to("cpu", torch.float64)
        cache.to("cpu", torch.float32)
        cache.select([1, 0])
    cache.append(key[:, :, 6:], value[:, :, 6:])
    actual = cache.attend(query[:, :, 6:].requires_grad_(), alibi_slopes(6))
    assert actual.requires_grad
    assert_equals_full(actual.detach(), query, key, value, alibi_slopes(6))


def test_conversion_and_copies(storage):
    query, key, value = make(8)
    cache = KVCache(**storage)
    cache.append(key[:, :, :7], value[:, :, :7], mask=torch.tensor([True] * 7))
    twin = copy.deepcopy(cache).to("cpu", torch.float16)
    twin.append(key[:, :, 7:].half(), value[:, :, 7:].half())
    cache.append(key[:, :, 7:], value[:, :, 7:])
    assert_equals_full(cache.attend(query, alibi_slopes(6)), query, key, value, alibi_slopes(6))
    half = [tensor.half() for tensor in (query, key, value)]
    assert_equals_full(twin.attend(half[0], alibi_slopes(6)), *half, alibi_slopes(6))
    assert twin.to("meta").attend(half[0].to("meta"), alibi_slopes(6, device="meta"), backend="reference").is_meta


@pytest.mark.parametrize("batch", [2, 0])
@pytest.mark.parametrize("window", [{}, {"window": (3, 0), "sinks": 1, "distance": "cache"}], ids=["all", "window"])
def test_nothing_at_all_is_legal(storage, batch, window):
    """No tokens, only padding, no queries, no sequences: outputs of 0, lse of -inf."""
    if window and "capacity" in storage:
        pytest.skip("a static cache has no window")
    cache = KVCache(**storage, **window)
    query, key, value = make(3, batch=batch)
    cache.append(key[:, :, :0], value[:, :, :0])
    assert not cache.attend(query, alibi_slopes(6)).any()
    cache.append(key, value, mask=torch.zeros(batch, 3, dtype=torch.bool))
    out, aux = cache.attend(query, alibi_slopes(6), return_aux=True)
    assert not out.any() and (aux.lse == -torch.inf).all()
    cache.append(key, value)
    assert cache.attend(query[:, :, :0], alibi_slopes(6)).shape == (batch, 6, 0, 5)
    assert_equals_full(cache.attend(query, alibi_slopes(6)), query, key, value, alibi_slopes(6))


def test_autocast_converts_the_keys_and_does_without_their_bounds():
    """Rounding a key to bfloat16 may lengthen it beyond the bound that was kept of it."""
    query, key, value = make(30)
    cache = KVCache(block=16)
    cache.append(key, value)
    with torch.autocast("cpu", torch.bfloat16):
        actual = cache.attend(query, alibi_slopes(6), backend="tiled")
        expected = alibi_attention(query, key, value, alibi_slopes(6), causal=True, backend="tiled")
        _, operands = prepare(query, key, value, alibi_slopes(6), {"causal": True, "key_bounds": key_bounds(key)})
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)
    assert operands.bound_norms is None


def test_aux_and_dropout_are_those_of_the_call():
    query, key, value = make(8)
    cache = KVCache()
    cache.append(key, value)
    torch.manual_seed(1)
    out, aux = cache.attend(query, alibi_slopes(6), dropout_p=0.5, return_aux=True)
    torch.manual_seed(1)
    expected, other = alibi_attention(query, key, value, alibi_slopes(6), causal=True, dropout_p=0.5, return_aux=True)
    assert torch.equal(out, expected) and torch.equal(aux.lse, other.lse)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "float16"])
def test_a_conversion_that_cannot_be_leaves_the_cache_as_it_was(storage, dtype):
    query, key, value = make(8)
    cache = KVCache(**storage)
    cache.append(key, value)
    with pytest.raises(TypeError, match="dtype must be a floating torch.dtype"):
        cache.to(dtype=dtype)
    assert_equals_full(cache.attend(query, alibi_slopes(6)), query, key, value, alibi_slopes(6))


@pytest.mark.parametrize("index", [[0, 7], torch.tensor([0, 7]), [-1, 0]], ids=str)
def test_sequences_that_do_not_exist_are_named(storage, index):
    cache = KVCache(**storage)
    cache.append(*make(3)[1:])
    with pytest.raises(ValueError, match=r"index must hold numbers from 0 to 1, one of the 2 sequences, got (7|-1)"):
        cache.select(index)
    with pytest.raises(ValueError, match="index must hold numbers from 0 to 1"):
        cache.reorder(index)
    for wrong in (None, "ab", [[0]], [0.5]):
        with pytest.raises(TypeError, match="index must be integers of shape"):
            cache.select(wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"tolerance": "a"}, "tolerance"), ({"tolerance": 2.0}, "tolerance"), ({"scale": "a"}, "scale")],
)
def test_a_report_checks_its_numbers(options, words):
    query, key, value = make(3)
    cache = KVCache()
    cache.append(key, value)
    with pytest.raises((TypeError, ValueError), match=f"{words} must be"):
        cache.report(alibi_slopes(6), query=query, **options)


def test_without_values_to_read(storage):
    """Under FakeTensorMode there are shapes alone."""
    with FakeTensorMode():
        query, key, value = make(13)
        cache = KVCache(**storage)
        cache.append(key[:, :, :12], value[:, :, :12])
        cache.append(key[:, :, 12:], value[:, :, 12:])
        out = cache.attend(query[:, :, 12:], torch.ones(6))
    assert out.shape == (2, 6, 1, 5)


def test_drop_takes_back_what_is_there_and_no_more(storage):
    query, key, value = make(5)
    cache = KVCache(**storage)
    cache.append(key[:, :, :3], value[:, :, :3])
    for count in (4, 99, torch.tensor([3, 4])):
        with pytest.raises(ValueError, match="count must be at most the tokens that a sequence has had, got .* of "):
            cache.drop(count)
    with pytest.raises(ValueError, match=r"count must be at least 0 for each sequence, got \[1, -1\]"):
        cache.drop(torch.tensor([1, -1]))
    with pytest.raises(ValueError, match=r"length must be at least 0 for each sequence, got \[1, -1\]"):
        cache.crop(torch.tensor([1, -1]))
    for wrong in (True, -1, 1.5):
        with pytest.raises(ValueError, match="count must be an int >= 0"):
            cache.drop(wrong)
    assert cache.lengths.tolist() == [3, 3]
    cache.drop(torch.tensor([3, 0]))
    assert cache.lengths.tolist() == [0, 3]
    with pytest.raises(ValueError, match="count must be at most"):
        cache.drop(1)
    cache.append(key[:, :, 3:], value[:, :, 3:])
    actual = cache.attend(query[:, :, 3:], alibi_slopes(6))
    assert_equals_full(actual[1:], query[1:], key[1:], value[1:], alibi_slopes(6))


def test_tokens_of_one_position_see_each_other_in_one_call_and_not_step_by_step():
    """Positions 0, 0, 4 under causal: row 0 sees the later token of its own position only if that is there already."""
    places, flat, ones = torch.tensor([0, 0, 4]), torch.zeros(1, 1, 3, 2), torch.eye(3)[None, None]
    whole, steps = KVCache(), KVCache()
    whole.append(flat, ones, positions=places)
    together = whole.attend(flat, HALF)
    rows = []
    for n in range(3):
        steps.append(flat[:, :, n : n + 1], ones[:, :, n : n + 1], positions=places[n : n + 1])
        rows.append(steps.attend(flat[:, :, :1], HALF))
    assert_weights(together[0, 0, 0], [0.5, 0.5, 0.0])
    assert_weights(rows[0][0, 0, 0], [1.0, 0.0, 0.0])
    assert_weights(together[0, 0, 2], [0.1065070, 0.1065070, 0.7869861])
    torch.testing.assert_close(torch.cat(rows[1:], 2), together[:, :, 1:])


def test_short_caches_measure_no_key_for_a_step_and_long_ones_do():
    """Bounds that nobody measured are not given; copies measure for themselves."""
    query, key, value = make(700, batch=1)
    cache = KVCache()
    cache.append(key[:, :, :500], value[:, :, :500])
    storage = cache._opened()
    assert storage.read(500, 1)[2] is None and storage.read(500, 2)[2].norms.isfinite().all()
    cache.append(key[:, :, 500:510], value[:, :, 500:510])
    twin = copy.deepcopy(cache)
    assert storage.read(510, 1)[2] is None
    for each in (cache, twin):
        for n in range(510, 700):
            each.append(key[:, :, n : n + 1], value[:, :, n : n + 1])
        bounds = each._opened().read(700, 1)[2]
        torch.testing.assert_close(bounds.norms, key_bounds(key, 64).norms)


@pytest.mark.parametrize("kind", [{}, {"page_size": 4}, {"capacity": 40}], ids=str)
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_middle_is_removed_and_the_gap_closed(kind: dict[str, int], placed: bool, ragged: bool):
    torch.manual_seed(0)
    key, value, query = torch.randn(3, 3, 2, 23, 8)
    places = torch.arange(23).cumsum(0) if placed else None  # 0 1 3 6 10 ...: 10 tokens from 5 on are as far as said
    mask = torch.arange(23) < torch.tensor([23, 17, 4])[:, None] if ragged else None
    cache = KVCache(**kind)
    cache.append(key, value, mask=mask, positions=places)
    cache.remove(5, 15)
    left = torch.cat([torch.arange(5), torch.arange(15, 23)])
    shifted = None if places is None else torch.where(left < 5, places[left], places[left] - places[15] + places[5])
    fresh = KVCache(**kind)
    fresh.append(key[:, :, left], value[:, :, left], mask=None if mask is None else mask[:, left], positions=shifted)
    assert cache.lengths.equal(fresh.lengths) and cache.positions[:, :13].equal(fresh.positions[:, :13])
    for one in (cache, fresh):
        one.append(key[:, :, :1], value[:, :, :1])
    found, wanted = (one.attend(query[:, :, :1], alibi_slopes(2)) for one in (cache, fresh))
    torch.testing.assert_close(found, wanted)


def test_what_cannot_be_removed_is_named():
    cache, windowed = KVCache(), KVCache(window=(4, 0))
    for one in (cache, windowed):
        one.append(torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8))
    for start, stop in ((3, 2), (0, 10), (11, 12)):
        with pytest.raises(ValueError, match="start and stop must be 0 <= start <= stop <= 9"):
            cache.remove(start, stop)
    with pytest.raises(ValueError, match="start must be an int"):
        cache.remove(-1, 2)
    with pytest.raises(ValueError, match="remove needs a cache without a window"):
        windowed.remove(1, 2)
    cache.remove(0, 9)
    assert cache.lengths.tolist() == [0]
