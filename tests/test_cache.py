# SPDX-License-Identifier: Apache-2.0
"""KVCache against one pass over the whole text, whatever the storage, the padding and what was done to it before.

test_cache_calls.py covers single calls, test_streaming.py eviction, test_pages.py what only pages do.
"""

import pytest
import torch
from torch import Tensor

from linbias import BackendUnavailable, alibi_slopes, backends
from linbias.cache import KVCache
from linbias.semantics.pages import gather_pages
from tests.caching import (
    STORAGES,
    assert_equals_full,
    make,
    poisoned,  # noqa: F401  (a fixture)
    run,
)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> dict[str, int]:
    return STORAGES[request.param]


@pytest.mark.parametrize("backend", [*backends.available(), "auto"])
def test_prefill_then_steps_equal_one_pass(storage, backend):
    query, key, value = make(23)
    try:
        actual = run(KVCache(**storage), query, key, value, alibi_slopes(6), backend=backend)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
    assert_equals_full(actual, query, key, value, alibi_slopes(6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(storage, dtype):
    query, key, value = make(23, dtype=dtype)
    assert_equals_full(run(KVCache(**storage), query, key, value, alibi_slopes(6)), query, key, value, alibi_slopes(6))


def test_chunks_longer_than_a_block_and_one_query_head_a_key_head(storage):
    query, key, value = make(53, batch=3, heads=5, kv_heads=5)
    actual = run(KVCache(**storage), query, key, value, alibi_slopes(5), steps=(16, 16, 5, 16))
    assert_equals_full(actual, query, key, value, alibi_slopes(5))


def test_fewer_queries_than_appended_tokens_are_the_last_ones(storage):
    query, key, value = make(11)
    cache = KVCache(**storage)
    cache.append(key, value)
    assert_equals_full(cache.attend(query[:, :, -3:], alibi_slopes(6)), query, key, value, alibi_slopes(6))


MASKS = {
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]],
}


@pytest.mark.parametrize("side", MASKS)
def test_padding_on_any_side_never_shows(storage, side):
    """Each sequence as if it were alone, although its padding is NaN and infinite."""
    mask = torch.tensor(MASKS[side], dtype=torch.bool)
    slopes = alibi_slopes(6)
    prompt, steps = make(5, batch=3), make(6, batch=3)
    query, key, value = (tensor.clone() for tensor in prompt)
    for tensor, poison in ((query, torch.nan), (key, torch.inf), (value, torch.nan)):
        tensor.masked_fill_(~mask[:, None, :, None], poison)
    cache = KVCache(**storage)
    cache.append(key, value, mask=mask)
    first = cache.attend(query, slopes)
    later = run(cache, *steps, slopes, steps=(1, 1, 4))
    assert cache.lengths.tolist() == (mask.sum(1) + 6).tolist()
    assert not first[~mask[:, None].expand(first.shape[:3])].any()
    for n, real in enumerate(mask):
        alone = [torch.cat([a[n : n + 1, :, real], b[n : n + 1]], 2) for a, b in zip(prompt, steps, strict=True)]
        actual = torch.cat([first[n : n + 1, :, real], later[n : n + 1]], 2)
        assert_equals_full(actual, *alone, slopes)


def test_options_count_within_each_ragged_sequence(storage):
    """Sinks, prefix and unbiased tokens are those of the sequence, not of the padded batch."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    query, key, value = make(6)
    slopes, future = alibi_slopes(6), alibi_slopes(6, rule="geometric")
    cache = KVCache(**storage)
    cache.append(key, value, mask=mask)
    for options in (
        {"window": (1, 0), "sinks": 1},
        {"prefix": 2},
        {"unbiased": 1},
        {"causal": False, "future_slopes": future},
        {"softcap": 0.7, "scale": 0.3, "tolerance": 0.0},
        {"unbiased": 2, "prefix": 3, "causal": True, "window": (2, None), "sinks": 1},
    ):
        actual = cache.attend(query, slopes, **options)
        for n, real in enumerate(mask):
            alone = [tensor[n : n + 1, :, real] for tensor in (query, key, value)]
            assert_equals_full(actual[n : n + 1, :, real], *alone, slopes, **options)


def test_attn_mask_covers_the_slots_for_drafts_that_branch():
    """Two drafts of the same next token do not see each other, and stand at the same position."""
    query, key, value = make(5, batch=1)
    cache = KVCache()
    cache.append(key[:, :, :3], value[:, :, :3])
    cache.append(key[:, :, 3:], value[:, :, 3:], positions=torch.tensor([3, 3]))
    assert cache.positions.tolist() == [[0, 1, 2, 3, 3]]
    apart = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]], dtype=torch.bool)
    actual = cache.attend(query[:, :, 3:], alibi_slopes(6), attn_mask=apart)
    for n in (3, 4):
        chosen = [tensor[:, :, [0, 1, 2, n]] for tensor in (query, key, value)]
        assert_equals_full(actual[:, :, n - 3 : n - 2], *chosen, alibi_slopes(6))


def test_given_positions_jump_repeat_and_continue(storage):
    query, key, value = make(9)
    places = torch.tensor([[0, 5, 5, 2, 9, 10, 11, 40, 41], [3, 2, 1, 0, -4, -3, -2, 7, 8]])
    cache = KVCache(**storage)
    cache.append(key[:, :, :2], value[:, :, :2], positions=places[:, :2])
    cache.append(key[:, :, 2:5], value[:, :, 2:5], positions=places[:, 2:5])
    cache.append(key[:, :, 5:7], value[:, :, 5:7])  # one after the token before
    cache.append(key[:, :, 7:8], value[:, :, 7:8], positions=places[:, 7:8])
    cache.append(key[:, :, 8:], value[:, :, 8:])
    assert cache.positions[:, :9].tolist() == places.tolist()
    actual = cache.attend(query[:, :, 8:], alibi_slopes(6))
    assert_equals_full(actual, query, key, value, alibi_slopes(6), query_positions=places, key_positions=places)


def test_shifting_all_positions_changes_nothing(storage):
    query, key, value = make(8)
    outputs = []
    for shift in (0, -100):
        cache = KVCache(**storage)
        cache.append(key, value, positions=torch.arange(8) + shift)
        outputs.append(cache.attend(query, alibi_slopes(6)))
    assert torch.equal(*outputs)


def test_crop_takes_rejected_drafts_back(storage):
    query, key, value = make(12)
    cache = KVCache(**storage)
    cache.append(key[:, :, :7], value[:, :, :7])
    cache.append(*(100 * torch.randn(2, 3, 4, tensor.shape[3]) for tensor in (key, value)))
    cache.drop(1)
    cache.crop(7)
    assert cache.lengths.tolist() == [7, 7]
    assert_equals_full(run(cache, query[:, :, 7:], key[:, :, 7:], value[:, :, 7:], alibi_slopes(6), steps=(1, 4)),
                       query, key, value, alibi_slopes(6))  # fmt: skip


@pytest.mark.parametrize("method", ["crop", "drop"])
def test_crop_by_another_count_for_each_sequence(storage, method):
    """Speculative decoding: 3 drafts of the first sequence were right, none of the second's."""
    query, key, value = make(11)
    slopes = alibi_slopes(6)
    cache = KVCache(**storage)
    cache.append(key[:, :, :9], value[:, :, :9])
    getattr(cache, method)(torch.tensor([8, 5]) if method == "crop" else torch.tensor([1, 4]))
    assert cache.lengths.tolist() == [8, 5]
    actual = run(cache, query[:, :, 9:], key[:, :, 9:], value[:, :, 9:], slopes, steps=(2,))
    for n, kept in enumerate((8, 5)):
        alone = [torch.cat([t[n : n + 1, :, :kept], t[n : n + 1, :, 9:]], 2) for t in (query, key, value)]
        assert_equals_full(actual[n : n + 1], *alone, slopes)


def test_crop_to_nothing_starts_again(storage):
    query, key, value = make(6)
    cache = KVCache(**storage)
    cache.append(key * 50, value, positions=torch.arange(6) + 9)
    cache.crop(0)
    assert_equals_full(run(cache, query, key, value, alibi_slopes(6), steps=(4, 2)), query, key, value, alibi_slopes(6))
    cache.reset()
    assert cache.seen.tolist() == [0, 0]
    assert_equals_full(run(cache, query, key, value, alibi_slopes(6), steps=(6,)), query, key, value, alibi_slopes(6))


def test_beams_reorder_and_select(storage):
    """One prompt becomes three beams, which swap and go on; each equals the text it stands for."""
    slopes = alibi_slopes(6)
    prompt, step, last = make(6, batch=1), make(1, batch=3), make(2, batch=3)
    cache = KVCache(**storage)
    cache.append(*prompt[1:])
    cache.select([0, 0, 0])
    cache.append(*step[1:])
    cache.reorder(torch.tensor([2, 0, 0]))
    cache.append(*last[1:])
    actual = cache.attend(last[0], slopes)
    for n, parent in enumerate((2, 0, 0)):
        parts = zip(prompt, (tensor[parent : parent + 1] for tensor in step), (t[n : n + 1] for t in last), strict=True)
        assert_equals_full(actual[n : n + 1], *(torch.cat(part, 2) for part in parts), slopes)
    cache.select([1])
    assert cache.lengths.tolist() == [9]
    assert torch.equal(cache.attend(last[0][1:2], slopes), actual[1:2])


class Texts:
    """What a cache should hold, as plain lists of tokens."""

    def __init__(self, batch: int) -> None:
        self.tokens: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(batch)]

    def append(self, key: Tensor, value: Tensor, mask: Tensor) -> None:
        for n, text in enumerate(self.tokens):
            text += [(key[n, :, t], value[n, :, t]) for t in range(key.shape[2]) if mask[n, t]]

    def assert_attends(self, actual: Tensor, query: Tensor, real: Tensor, **options) -> None:
        """Row by row of each sequence: the query stands where its token does."""
        for n, text in enumerate(self.tokens):
            rows = real[n].nonzero()[:, 0]
            key, value = (torch.stack(parts, 1)[None] for parts in zip(*text, strict=True))
            missing = len(text) - len(rows)
            filled = torch.cat([query.new_zeros(1, query.shape[1], missing, 7), query[n : n + 1, :, rows]], 2)
            assert_equals_full(actual[n : n + 1, :, rows], filled, key, value, alibi_slopes(6), **options)


@pytest.mark.parametrize("seed", range(3))
def test_any_course_of_events(storage, seed):
    """Appends with any padding, crops, drops and beam swaps at random, against lists."""
    torch.manual_seed(seed)
    texts, cache, batch = Texts(3), KVCache(**{**storage, "capacity": 200} if "capacity" in storage else storage), 3
    for turn in range(12):
        tokens = int(torch.randint(1, 6, ()))
        query, key, value = make(tokens, batch)
        mask = torch.rand(batch, tokens) < (0.7 if turn % 3 else 2.0)
        mask[:, -1] = True
        cache.append(key, value, mask=None if bool(mask.all()) else mask)
        texts.append(key, value, mask)
        assert cache.lengths.tolist() == [len(text) for text in texts.tokens]
        texts.assert_attends(cache.attend(query, alibi_slopes(6)), query, mask)
        event = int(torch.randint(0, 4, ()))
        if event == 0:
            counts = torch.stack([torch.randint(1, len(text) + 1, ()) for text in texts.tokens])
            cache.crop(counts)
            texts.tokens = [text[:count] for text, count in zip(texts.tokens, counts.tolist(), strict=True)]
        elif event == 1:
            index = torch.randint(0, batch, (batch,))
            cache.reorder(index)
            texts.tokens = [list(texts.tokens[n]) for n in index.tolist()]
        elif event == 2:
            shortest = min(len(text) for text in texts.tokens)
            cache.crop(shortest)
            texts.tokens = [text[:shortest] for text in texts.tokens]


def test_bounds_are_never_below_the_norms_they_bound(storage):
    """Whatever was overwritten, cropped or moved; and a block that is NaN is never skipped."""
    cache = KVCache(**storage)
    cache.append(100 * torch.randn(2, 3, 10, 7), torch.randn(2, 3, 10, 5))
    cache.crop(torch.tensor([3, 8]))
    key, value = torch.randn(2, 3, 6, 7), torch.randn(2, 3, 6, 5)
    key[0, 0, 0, 0] = torch.nan
    cache.append(key, value)
    cache.reorder([1, 0])
    stored, _, bounds, table = cache._opened().read(cache._layout.end, 2)
    norms = bounds.norms
    if table is not None:
        stored, norms = gather_pages(stored, table), gather_pages(norms, table)
    for n, length in enumerate(cache.lengths.tolist()):
        for slot in range(length):
            own, bound = stored[n, :, slot].norm(dim=-1), norms[n, :, slot // bounds.block]
            assert ((own <= bound) | bound.isnan()).all()
    assert norms.isnan().any()


def test_keys_out_of_reach_are_skipped():
    query, key, value = make(3000, batch=1)
    cache = KVCache()
    cache.append(key, value)
    steep = alibi_slopes(6, max_bias=2.0)
    out, aux = cache.attend(query[:, :, -1:], steep, backend="tiled", return_aux=True)
    assert int(aux.computed.sum()) < 0.3 * 6 * 3000
    assert aux.skipped.max() <= torch.finfo(torch.float32).eps / 4
    assert_equals_full(out, query[:, :, -1:], key, value, steep)


def test_growing_copies_each_token_a_few_times_at_most():
    cache = KVCache(block=8)
    places, copied = set(), 0
    for n in range(500):
        cache.append(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        place = cache._opened().key.data_ptr()
        copied += n if place not in places else 0
        places.add(place)
    assert copied <= 4 * 500
    assert cache.nbytes <= 1.6 * 500 * 4 * 4


def test_garbage_in_a_static_cache_has_no_effect():
    """Slots 6 to 15 hold NaN; nothing ever moves; and more than its capacity is refused."""
    query, key, value = make(16)
    cache, slopes = KVCache(capacity=16), alibi_slopes(6)
    cache.append(key[:, :, :6], value[:, :, :6])
    place = cache._opened().key.data_ptr()
    assert cache._opened().key[:, :, 6:].isnan().all()
    assert_equals_full(cache.attend(query[:, :, :6], slopes), *(t[:, :, :6] for t in (query, key, value)), slopes)
    cache.append(key[:, :, 6:], value[:, :, 6:])
    assert cache._opened().key.data_ptr() == place
    with pytest.raises(IndexError, match=r"capacity=16 and holds 16 tokens, so 1 more"):
        cache.append(key[:, :, :1], value[:, :, :1])
    assert_equals_full(cache.attend(query[:, :, 6:], slopes), query, key, value, slopes)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_compiled_step_is_compiled_once(backend):
    query, key, value = make(16)
    cache, slopes, graphs = KVCache(capacity=16), alibi_slopes(6), []
    cache.append(key[:, :, :6], value[:, :, :6])

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    @torch.compile(backend=count, fullgraph=True)
    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache.append(key, value)
        return cache.attend(query, slopes, backend=backend)

    parts = zip(*(tensor[:, :, 6:].split(1, 2) for tensor in (query, key, value)), strict=True)
    with torch.no_grad():
        outputs = [step(*(part.clone() for part in token)) for token in parts]
    assert len(graphs) == 1
    assert_equals_full(torch.cat(outputs, 2), query, key, value, slopes)
