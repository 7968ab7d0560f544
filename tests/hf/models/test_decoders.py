# SPDX-License-Identifier: Apache-2.0
"""What all decoders of our own have in common, each held against its family's formula in dense.py."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from linbias.testing.judge import assert_within_budget
from tests.hf.models.dense import VOCABULARY, every_kind, logits, make
from tests.hf.tiny import checkpoint_activations

from linbias.hf.cache import AlibiCache  # isort: skip
from linbias.hf.decoder import CACHE  # isort: skip
from transformers import DynamicCache, StaticCache  # isort: skip

# Its slopes follow the length of the text, so that steps are not one pass: see test_jais.py.
every_steady_kind = pytest.mark.parametrize("kind", [name for name in every_kind.args[1] if name != "btlm-trained"])


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def dense(kind: str, model: Any, ids: Tensor, real: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    weights = {name: part.detach().to(dtype) for name, part in model.state_dict().items()}
    return logits(kind, weights, ids, real)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_logits_are_the_formulas(kind: str, dtype: torch.dtype) -> None:
    model, ids = make(kind).to(dtype), ids_of(2, 11)
    exact, plain = dense(kind, model, ids), dense(kind, model, ids, dtype=dtype)
    with torch.no_grad():
        assert_within_budget(model(ids).logits, exact, plain, kind)


@every_kind
def test_logits_and_gradients_in_float64(kind: str) -> None:
    model, ids = make(kind).double(), ids_of(2, 11)
    weights = {name: part.detach().clone().requires_grad_() for name, part in model.named_parameters()}
    weights.setdefault("lm_head.weight", next(iter(weights.values())))
    expected, found = logits(kind, weights, ids), model(ids).logits
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert weights[name].grad is not None, name
            torch.testing.assert_close(
                parameter.grad, weights[name].grad, msg=lambda text, name=name: f"{name}: {text}"
            )


@every_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_what_each_is_alone(kind: str, side: str) -> None:
    model, ids = make(kind).double(), ids_of(3, 9)
    real = torch.ones_like(ids)
    for row, length in enumerate((9, 5, 7)):
        real[row, : 9 - length] = 0
    real = real if side == "left" else real.flip(1)
    with torch.no_grad():
        found = model(ids, attention_mask=real).logits
        for row, mask in enumerate(real.bool()):
            torch.testing.assert_close(found[row, mask], model(ids[row : row + 1, mask]).logits[0])


@every_steady_kind
@pytest.mark.parametrize("cache", [DynamicCache, AlibiCache])
def test_steps_are_one_pass(kind: str, cache: Any) -> None:
    model, ids = make(kind).double(), ids_of(2, 9)
    kept, steps = cache(), []
    with torch.no_grad():
        for start, stop in ((0, 3), (3, 7), (7, 8), (8, 9)):
            steps.append(model(ids[:, start:stop], use_cache=True, cache=kept).logits)
        torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits)


@every_kind
def test_every_cache_generates_what_none_does(kind: str) -> None:
    model, ids = make(kind), ids_of(2, 5)
    real = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    options = {"attention_mask": real, "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    static = StaticCache(config=model.config, max_cache_len=12)
    for cache in (DynamicCache(), AlibiCache(), static):
        found = model.generate(ids, use_cache=True, **{CACHE: cache}, **options)
        if kind != "btlm-trained":  # whose steps have slopes of their own
            assert found.tolist() == expected.tolist(), type(cache).__name__
        else:
            assert found.shape == expected.shape


@every_kind
def test_caches_agree_on_beams(kind: str) -> None:
    model, ids = make(kind), ids_of(2, 5)
    options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False, "use_cache": True}
    kept = [model.generate(ids, **{CACHE: cache}, **options).tolist() for cache in (DynamicCache(), AlibiCache())]
    assert kept[0] == kept[1]


@every_steady_kind
def test_packed_documents_are_each_alone(kind: str) -> None:
    model, ids = make(kind).double(), ids_of(1, 11)
    starts = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        found = model(ids, position_ids=starts, use_cache=False).logits
        alone = [model(ids[:, :4]).logits, model(ids[:, 4:]).logits]
        torch.testing.assert_close(found, torch.cat(alone, 1))
        numbered = model(ids, attention_mask=torch.tensor([[1] * 4 + [2] * 7]), use_cache=False).logits
    torch.testing.assert_close(numbered, found)


@every_kind
def test_checkpointed_gradients_are_the_same(kind: str) -> None:
    plain, ids = make(kind, **NO_DROPOUT[kind.split("-", maxsplit=1)[0]]).double(), ids_of(2, 7)
    saved = copy.deepcopy(plain).train()
    checkpoint_activations(saved, reentrant=False)
    for model in (plain, saved):
        model(ids, labels=ids, use_cache=False).loss.backward()
    for first, second in zip(plain.parameters(), saved.parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None)
        assert first.grad is None or torch.equal(first.grad, second.grad)


_GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_DROPOUT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("jais", "btlm", "refact"), _GPT2_DROPOUT),
    **dict.fromkeys(("baichuan", "baichuan2", "mpt"), {}),
}


@every_kind
def test_attentions_and_hidden_states_are_shown(kind: str) -> None:
    model, ids = make(kind).double(), ids_of(2, 7)
    with torch.no_grad():
        shown = model(ids, output_attentions=True, output_hidden_states=True)
    assert len(shown.attentions) == 2 and len(shown.hidden_states) == 3
    torch.testing.assert_close(shown.attentions[0].sum(-1), torch.ones(2, 6, 7, dtype=torch.float64))
    as_tuple = model(ids, return_dict=False)
    torch.testing.assert_close(as_tuple[0], shown.logits)


@every_kind
def test_loss_and_kept_logits(kind: str) -> None:
    model, ids = make(kind).double(), ids_of(2, 7)
    with torch.no_grad():
        found = model(ids, labels=ids)
        expected = torch.nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        # transformers computes its loss in float32.
        torch.testing.assert_close(found.loss.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model(ids, logits_to_keep=2).logits, found.logits[:, -2:])


@every_kind
def test_saved_models_load_again(kind: str, tmp_path: Any) -> None:
    model, ids = make(kind), ids_of(2, 7)
    model.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    base = type(model.base_model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
        assert torch.equal(base(ids).last_hidden_state, model.base_model(ids).last_hidden_state)


def test_names_that_mean_nothing_are_refused() -> None:
    model, ids = make("jais"), ids_of(1, 3)
    with pytest.raises(TypeError, match="JAISModel takes no token_type_ids"):
        model(ids, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="two names of one argument"):
        model(ids, cache=DynamicCache(), past_key_values=DynamicCache())
