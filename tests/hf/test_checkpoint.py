# SPDX-License-Identifier: Apache-2.0
"""Fidelity "checkpoint": the family's own formula, its rounding included, a few query rows at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

import linbias
from linbias.hf import attention
from linbias.testing import assert_within_budget, largest_error
from tests.hf.tiny import (
    CACHE,
    base,
    checkpoint_activations,
    every_dtype,
    every_family,
    every_kind,
    exactly,
    gradients,
    labels_of,
    lengths_mask,
    make,
    store,
    tokens,
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """About five query rows at a time, where the texts of these tests would be one block."""
    monkeypatch.setattr(attention, "_BLOCK", 5 * 2 * 6 * 23)


def logits(model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits
    return found if mask is None else found[mask.bool()]


@every_dtype
@every_kind
def test_the_same_bits(kind: str, dtype: torch.dtype):
    model, ids = make(kind).to(dtype), tokens(2, 23)
    for mask in (None, lengths_mask(23, 11), lengths_mask(23, 11) * (torch.arange(23) % 7 != 5)):
        plain = logits(model, ids, mask)
        with linbias.patch(model, fidelity="checkpoint"):
            assert torch.equal(logits(model, ids, mask), plain)


@every_dtype
@every_kind
@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_rows_change_rounding_only(kind: str, dtype: torch.dtype):
    """A product of fewer rows may add in another order. With four heads Falcon's slopes times positions are exact."""
    model, ids, mask = make(kind, heads=4).to(dtype), tokens(2, 23), lengths_mask(23, 11)
    with exactly(model) as exact_model:
        exact = logits(exact_model, ids, mask)
    plain = logits(model, ids, mask)
    with linbias.patch(model, fidelity="checkpoint"):
        assert_within_budget(logits(model, ids, mask), exact, plain, "logits")


@every_kind
@pytest.mark.usefixtures("small_blocks")
def test_gradients_through_blocks(kind: str):
    model, ids, mask = make(kind), tokens(2, 23), lengths_mask(23, 11)

    def loss(model: Any) -> Tensor:
        return model(ids, attention_mask=mask, labels=labels_of(ids, mask), use_cache=False).loss

    plain = gradients(model, loss)
    linbias.patch(model, fidelity="checkpoint")
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, plain[name], msg=lambda text, name=name: f"{name}: {text}")


def test_the_largest_bias_is_honoured_here_too():
    model, ids, found = make("mpt", layers=2, attn_config={"alibi_bias_max": 16}), tokens(2, 13), {}
    for fidelity in ("exact", "checkpoint"):
        with linbias.patch(model, fidelity=fidelity):
            found[fidelity] = logits(model, ids, None)
    torch.testing.assert_close(found["exact"], found["checkpoint"], atol=2e-5, rtol=0)


@every_kind
def test_dropout_draws_what_the_original_draws(kind: str):
    options = {} if kind == "mpt" else {"attention_dropout": 0.25, "hidden_dropout": 0.1}
    model, ids, mask = make(kind, layers=2, **options), tokens(2, 13), lengths_mask(13, 8)
    for block in getattr(base(model), "blocks", []):
        block.attn.attn_dropout_p = 0.25  # transformers' MptConfig takes whole numbers only
    model.train()

    def drawn() -> Tensor:
        torch.manual_seed(5)
        return logits(model, ids, mask)

    plain = drawn()
    assert largest_error(plain, logits(model.eval(), ids, mask).double()) > 0.1
    model.train()
    linbias.patch(model, fidelity="checkpoint")
    assert torch.equal(drawn(), plain)


@pytest.mark.parametrize("reentrant", [False, True])
@every_family
@pytest.mark.usefixtures("small_blocks")
def test_gradient_checkpointing_around_blocks(kind: str, reentrant: bool):
    """What a layer computes again for its gradient, it computes again block by block."""
    model, ids, mask = make(kind, layers=2), tokens(2, 23), lengths_mask(23, 11)
    model.train()

    def loss(model: Any) -> Tensor:
        return model(ids, attention_mask=mask, labels=labels_of(ids, mask), use_cache=False).loss

    plain = gradients(model, loss)
    linbias.patch(model, fidelity="checkpoint")
    checkpoint_activations(model, reentrant=reentrant)
    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(gradient, plain[name], msg=lambda text, name=name: f"{name}: {text}")


@every_kind
def test_4d_masks(kind: str):
    """One that says what the causal rule says changes no bit, and MPT's own reading of floats is kept to the bit."""
    model, ids = make(kind, layers=2), tokens(2, 13)
    causal = torch.ones(13, 13, dtype=torch.bool).tril()[None, None]
    drawn = (torch.rand(2, 6, 13, 13) < 0.6) & causal | torch.eye(13, dtype=torch.bool)
    floats = torch.zeros(drawn.shape).masked_fill(~drawn, torch.finfo(torch.float32).min)
    plain = logits(model, ids, None)
    masked = _logits(model, ids, floats) if kind == "mpt" else None
    linbias.patch(model, fidelity="checkpoint")
    assert torch.equal(_logits(model, ids, causal), plain)
    assert torch.equal(_logits(model, ids, floats), _logits(model, ids, drawn))
    assert masked is None or torch.equal(_logits(model, ids, floats), masked)


def _logits(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask).logits


@every_kind
def test_rounding_of_the_original_is_reproduced(kind: str):
    """700 tokens in bfloat16, where far keys tie in BLOOM and Falcon; and only in this fidelity."""
    model, ids = make(kind, layers=1).bfloat16(), tokens(1, 700)
    model.config.max_seq_len = 700  # where MPT's bias ends; the others do not read it
    plain = logits(model, ids, None)
    with linbias.patch(model, fidelity="checkpoint"):
        assert torch.equal(logits(model, ids, None), plain)
    with linbias.patch(model):
        exact = logits(model, ids, None)
    assert kind == "mpt" or largest_error(exact, plain.double()) > 0.05


@every_kind
def test_cached_steps(kind: str):
    model, ids, mask = make(kind, layers=2), tokens(2, 15), lengths_mask(15, 9)

    def steps(model: Any) -> Tensor:
        cache, start, found = None, 0, []
        for stop in (9, 10, 14, 15):
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache})
            cache, start = store(out), stop
            found.append(out.logits)
        return torch.cat(found, 1)[mask.bool()]

    with torch.no_grad():
        plain = steps(model)
        linbias.patch(model, fidelity="checkpoint")
        assert torch.equal(steps(model), plain)


@every_kind
def test_padding_that_sees_nothing_is_zero(kind: str):
    """Half precision makes such a row NaN in the original (finfo.min plus a negative score overflows)."""
    model, ids, mask = make(kind, layers=2).half(), tokens(2, 9), lengths_mask(9, 5)
    linbias.patch(model, fidelity="checkpoint")
    with torch.no_grad():
        assert model(ids, attention_mask=mask).logits.isfinite().all()


def test_original_gelu_is_kept():
    """BLOOM's five elementwise passes round in between, so only "exact" fuses them."""
    model = make("bloom")
    linbias.patch(model, fidelity="checkpoint")
    gelu = base(model).h[0].mlp.gelu_impl
    assert type(gelu).__module__.startswith("transformers.")
    linbias.unpatch(model)
    linbias.patch(model)
    assert type(base(model).h[0].mlp.gelu_impl).__module__ == "linbias.hf.bloom"


@every_family
def test_second_derivatives_as_the_error_says(kind: str):
    """The exact formula has none, and its error names what a patched model can be asked for."""
    model, ids = make(kind, layers=1), tokens(1, 7)

    def second(model: Any) -> Tensor:
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            logits = model(inputs_embeds=embedded, use_cache=False).logits
            (first,) = torch.autograd.grad(logits.square().sum(), embedded, create_graph=True)
            return torch.autograd.grad(first.square().sum(), embedded)[0]

    expected = second(model)
    with (
        linbias.patch(model),
        pytest.raises(NotImplementedError, match=r"linbias.patch\(model, fidelity='checkpoint'\)"),
    ):
        second(model)
    with linbias.patch(model, fidelity="checkpoint"):
        torch.testing.assert_close(second(model), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
