# SPDX-License-Identifier: Apache-2.0
"""Documents packed into one row: each is what it is alone, however a caller says where they start, or an error."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import linbias
from linbias.hf.cache import AlibiCache
from linbias.hf.documents import number_documents
from tests.hf.tiny import (
    CACHE,
    HEADS,
    base,
    every_family,
    every_kind,
    gradients,
    lengths_mask,
    make,
    store,
    tokens,
    transformers,
)

SIZES = (5, 1, 7)
POSITIONS = torch.cat([torch.arange(size) for size in SIZES])[None]
NUMBERS = torch.cat([torch.full((size,), n + 1) for n, size in enumerate(SIZES)])[None]
BOUNDARIES = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
ONES = torch.ones(1, 13, dtype=torch.int64)
WAYS: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": POSITIONS},
    "positions of a row": {"position_ids": POSITIONS[0].int()},
    "positions anywhere": {"position_ids": POSITIONS + 40},
    "positions and a mask": {"position_ids": POSITIONS, "attention_mask": ONES},
    "positions and a mask of floats": {"position_ids": POSITIONS, "attention_mask": ONES.float()},
    "positions and a mask of booleans": {"position_ids": POSITIONS, "attention_mask": ONES.bool()},
    "boundaries": {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES, "max_length_q": 7, "max_length_k": 7},
    "boundaries of one side": {"cu_seq_lens_k": BOUNDARIES.tolist()},
    "numbers from 0": {"seq_idx": NUMBERS.int() - 1},
    "all that the collator gives": {
        "position_ids": POSITIONS,
        "seq_idx": NUMBERS.int() - 1,
        "cu_seq_lens_q": BOUNDARIES,
        "cu_seq_lens_k": BOUNDARIES,
    },
    "a mask of numbers": {"attention_mask": NUMBERS},
    "a mask of numbers in bytes": {"attention_mask": NUMBERS.to(torch.uint8)},
    "a mask of numbers in floats": {"attention_mask": NUMBERS.float()},
    "numbers and positions": {"attention_mask": NUMBERS, "position_ids": POSITIONS},
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
every_fidelity = pytest.mark.parametrize("fidelity", ["exact", "checkpoint"])


@every_way
@every_fidelity
@every_kind
def test_documents_of_their_own(kind: str, fidelity: Any, way: dict[str, Any]):
    """Through the language model and through the base model alone."""
    model, ids = make(kind, layers=2), tokens(1, 13)
    linbias.patch(model, fidelity=fidelity)
    with torch.no_grad():
        for run in (lambda *args, **options: model(*args, **options).logits, lambda *a, **o: base(model)(*a, **o)[0]):
            alone = torch.cat([run(part) for part in ids.split(SIZES, 1)], 1)
            torch.testing.assert_close(run(ids, **way), alone, atol=2e-5, rtol=0)


@pytest.mark.parametrize("head", [head for head in HEADS if head not in ("lm", "sequence")])
@every_family
def test_every_head(kind: str, head: str):
    model, ids = make(kind, head, layers=1), tokens(1, 13)
    linbias.patch(model)
    with torch.no_grad():
        alone = torch.cat([model(part, use_cache=False)[0] for part in ids.split(SIZES, 1)], 1)
        for way in ({"position_ids": POSITIONS}, {"attention_mask": NUMBERS}):
            torch.testing.assert_close(model(ids, **way)[0], alone, atol=2e-5, rtol=0)


@every_fidelity
@every_family
def test_a_training_step(kind: str, fidelity: Any):
    """As DataCollatorWithFlattening packs it: the loss and the gradients of the texts one by one."""
    model, parts = make(kind, layers=2), [{"input_ids": tokens(1, size)[0].tolist()} for size in SIZES]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    linbias.patch(model, fidelity=fidelity)
    batch = collator(parts)

    def apart(model: Any) -> Tensor:
        texts = [torch.tensor([part["input_ids"]]) for part in parts]
        losses = [model(text, labels=text).loss * (text.shape[1] - 1) for text in texts if text.shape[1] > 1]
        return torch.stack(losses).sum() / sum(size - 1 for size in SIZES)

    expected = gradients(model, apart)
    for name, gradient in gradients(model, lambda m: m(**batch).loss).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=1e-4)


@every_fidelity
@every_kind
def test_rows_packed_differently_and_padded(kind: str, fidelity: Any):
    """Padding between, before and after the documents belongs to none of them."""
    model, ids = make(kind, layers=2), tokens(3, 9)
    numbers = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2], [0, 1, 1, 1, 0, 2, 2, 0, 0], [1] * 9])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [1, 0, 1, 2, 1, 0, 1, 1, 1], list(range(9))])
    linbias.patch(model, fidelity=fidelity)
    with torch.no_grad():
        both = [
            model(ids, attention_mask=numbers).logits,
            model(ids, attention_mask=(numbers > 0).long(), position_ids=positions).logits,
        ]
        for row, number in ((0, 1), (0, 2), (1, 1), (1, 2), (2, 1)):
            alone = model(ids[row][numbers[row] == number][None]).logits[0]
            for packed in both:
                torch.testing.assert_close(packed[row][numbers[row] == number], alone, atol=2e-5, rtol=0)


@every_family
def test_one_text_is_one_text(kind: str):
    """Positions that generate makes, of padded batches and with holes, start nothing anew; nor do those of a suffix."""
    model, ids = make(kind, layers=1), tokens(2, 9)
    mask = lengths_mask(9, 6)
    mask[1, 5] = 0
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    linbias.patch(model)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        for positions in (counted, torch.arange(9)[None], torch.arange(9)):
            assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, expected)
        whole = model(ids, position_ids=torch.arange(9)[None] + 100)
        assert torch.equal(whole.logits, model(ids).logits) and store(whole).get_seq_length() == 9


@pytest.mark.parametrize("way", [WAYS["positions"], WAYS["boundaries"], WAYS["a mask of numbers"]])
@every_fidelity
@every_family
def test_a_cache_keeps_one_text_a_row(kind: str, fidelity: Any, way: dict[str, Any]):
    model, ids = make(kind, layers=1), tokens(1, 13)
    linbias.patch(model, fidelity=fidelity)
    for part in (model, base(model)):
        caches = [transformers.DynamicCache(), AlibiCache()]
        caches.append(transformers.StaticCache(config=model.config, max_cache_len=20))
        for cache in caches:
            with (
                torch.no_grad(),
                pytest.raises(ValueError, match="several documents into a row, and a cache keeps one"),
            ):
                part(ids, **way, **{CACHE: cache})
            assert cache.get_seq_length() == 0
        with pytest.raises(ValueError, match="several documents are packed here: pass use_cache=False"):
            part(ids, use_cache=True, **way)
        assert store(part(ids, **way)) is None, "the configuration's own use_cache makes none"


@every_family
def test_masks_that_say_nothing_clear(kind: str):
    model, ids = make(kind, layers=1), tokens(1, 4)
    linbias.patch(model)
    wrong = {
        "number them in their order": [1, 2, 2, 1],
        "got values below 0": [1, 1, 1, -1],
        "got fractions": [0.0, 0.5, 1.0, 1.0],
        "anything between is a bias": [0.0, -0.5, 0.0, 0.0],
        "may mean all visible": [0.0, 0.0, 0.0, 0.0],
    }
    for message, mask in wrong.items():
        with pytest.raises(ValueError, match=message):
            model(ids, attention_mask=torch.tensor([mask]))
    for boundaries in ([0, 3], [0, 3, 2, 4], [1, 4], [0, 5]):
        with pytest.raises(
            ValueError, match="cu_seq_lens_q must rise from 0 to the number of tokens, 4, of a batch of 1"
        ):
            model(ids, cu_seq_lens_q=torch.tensor(boundaries))
    with pytest.raises(ValueError, match=r"position_ids must have shape \(4,\) or \(1, 4\), got \(1, 3\)"):
        model(ids, position_ids=torch.tensor([[0, 1, 0]]))


@pytest.mark.parametrize("hidden", [-1e9, -1e4, -torch.inf, torch.finfo(torch.bfloat16).min], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_fidelity
@every_family
def test_floats_of_two_dimensions_are_read_as_those_of_four(kind: str, fidelity: Any, dtype: Any, hidden: float):
    model, ids, mask = make(kind, layers=2), tokens(2, 9), lengths_mask(9, 6)
    floats = torch.zeros(2, 9).masked_fill(mask == 0, hidden).to(dtype)
    linbias.patch(model, fidelity=fidelity)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask)
        for cache in (None, AlibiCache()) if fidelity == "exact" else (None,):
            found = model(ids, attention_mask=floats, **{CACHE: cache}).logits
            torch.testing.assert_close(found[mask.bool()], expected.logits[mask.bool()], atol=2e-5, rtol=0)


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("kind", ["bloom", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mpt", "falcon"))])
def test_compiled(kind: str):
    """Values are not read then, and documents are their own all the same."""
    model, ids = make(kind, layers=1), tokens(1, 13)
    linbias.patch(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in ids.split(SIZES, 1)], 1)
        for way in (WAYS["positions"], WAYS["a mask of numbers"]):
            torch.testing.assert_close(compiled(ids, use_cache=False, **way).logits, alone, atol=2e-5, rtol=0)


def test_what_is_numbered():
    mask, several = number_documents(None, (2, 4), {"seq_idx": torch.tensor([[3, 3, 1, 1]])}, None)
    assert several and mask is not None and mask.tolist() == [[1, 1, 2, 2]] * 2
    holes = torch.tensor([[1, 1, 0, 1]])
    assert number_documents(holes, (1, 4), {"position_ids": torch.tensor([[4, 5, 1, 6]])}, None) == (holes, False)
    mask, several = number_documents(holes, (1, 4), {"position_ids": torch.tensor([[4, 5, 1, 0]])}, None)
    assert several and mask is not None and mask.tolist() == [[1, 1, 0, 2]]
