# SPDX-License-Identifier: Apache-2.0
"""Patched models give what the unpatched ones mean: outputs, losses and gradients, within the rounding budget.

The truth is transformers' own code in float64 with a bias that nothing rounds; "plain" is the unpatched model in the
dtype tested.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import linbias
from linbias.hf.cache import AlibiCache
from linbias.testing import assert_within_budget, largest_error
from tests.hf.tiny import (
    CACHE,
    FALCON,
    KINDS,
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
    transformers,
    unrounded,
)

slow = pytest.mark.slow
some_heads = pytest.mark.parametrize("heads", [pytest.param(4, marks=slow), 6, pytest.param(12, marks=slow)])
MASKS = {
    "none": torch.ones(3, 17, dtype=torch.int64),
    "left": lengths_mask(17, 9, 12),
    "right": lengths_mask(17, 9, 12, side="right"),
    "holes": lengths_mask(17, 9, 12) * (torch.arange(17) % 5 != 3),
}


def pass_through(model: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Every hidden state and the logits of real tokens, the loss and the gradients."""
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    real = mask.bool()
    found = {f"hidden {n}": state[real].detach() for n, state in enumerate(out.hidden_states)}
    found["logits"] = out.logits[real].detach()
    labels = labels_of(ids, mask)
    return found | gradients(model, lambda m: m(ids, attention_mask=mask, labels=labels).loss)


def assert_same(actual: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor], label: str) -> None:
    assert actual.keys() == exact.keys() == plain.keys()
    for name, tensor in actual.items():
        # A mean of log-probabilities: the error of one number may be small by luck, so it is held to the logits'.
        error = largest_error(plain["logits"], exact["logits"]) if name == "loss" else plain[name]
        assert_within_budget(tensor, exact[name], error, f"{label}: {name}")


@every_dtype
@some_heads
@every_kind
def test_hidden_states_logits_losses_and_gradients(kind: str, heads: int, dtype: torch.dtype):
    model = make(kind, heads=heads).to(dtype)
    ids, mask = tokens(3, 23), lengths_mask(23, 11, 17)
    with exactly(model) as exact_model:
        exact = pass_through(exact_model, ids, mask)
    with unrounded(model):
        plain = pass_through(model, ids, mask)
    with linbias.patch(model):
        actual = pass_through(model, ids, mask)
    assert_same(actual, exact, plain, f"{kind} {heads} heads {dtype}")


@every_kind
def test_float64_is_float64(kind: str):
    """No slope on its way through float32: Falcon's are no numbers of that."""
    model, ids, mask = make(kind).double(), tokens(3, 23), lengths_mask(23, 11, 17)
    with torch.no_grad(), exactly(model) as exact_model:
        exact = exact_model(ids, attention_mask=mask).logits[mask.bool()]
    linbias.patch(model)
    with torch.no_grad():
        error = largest_error(model(ids, attention_mask=mask).logits[mask.bool()], exact)
    assert error < (1e-8 if kind == "bloom" else 1e-11), "the constant in BLOOM's own GELU has eight digits"


@every_family
def test_the_budget_is_too_small_for_a_wrong_slope(kind: str):
    model, ids, mask = make(kind), tokens(3, 23), lengths_mask(23, 11, 17)
    with torch.no_grad(), exactly(model) as exact_model:
        exact = exact_model(ids, attention_mask=mask).logits[mask.bool()]
    with torch.no_grad(), unrounded(model):
        plain = model(ids, attention_mask=mask).logits[mask.bool()]
    linbias.patch(model)
    slopes = type(base(model)).alibi_slopes
    with mock.patch.object(type(base(model)), "alibi_slopes", lambda self: slopes(self) * 1.001), torch.no_grad():
        wrong = model(ids, attention_mask=mask).logits[mask.bool()]
    with pytest.raises(AssertionError, match="budget"):
        assert_within_budget(wrong, exact, plain, "a slope 0.1 % too steep")


@pytest.mark.parametrize("padding", MASKS)
@every_kind
def test_any_padding(kind: str, padding: str):
    model, ids, mask = make(kind, layers=2), tokens(3, 17), MASKS[padding]
    real = mask.bool()
    with torch.no_grad():
        with exactly(model) as exact_model:
            exact = exact_model(ids, attention_mask=mask).logits[real]
        with unrounded(model):
            plain = model(ids, attention_mask=mask).logits[real]
        with linbias.patch(model):
            given = [mask, mask.bool(), mask.float()]
            actual = [model(ids, attention_mask=form).logits for form in given]
    assert_within_budget(actual[0][real], exact, plain, f"{kind} {padding}")
    for other in actual[1:]:
        assert torch.equal(actual[0], other), "the type of a mask of 0 and 1 means nothing"


@pytest.mark.parametrize("head", ["base", "sequence", "token", "qa"])
@every_family
def test_every_head(kind: str, head: str):
    options = {} if head in ("base", "qa") else {"num_labels": 5}
    model, ids, mask = make(kind, head, layers=2, **options), tokens(3, 19), lengths_mask(19, 6, 11, side="right")
    ids = ids.masked_fill(mask == 0, 0)

    def results(model: Any) -> list[Tensor]:
        out = model(ids, attention_mask=mask)
        names = ["logits", "start_logits", "end_logits", "last_hidden_state"]
        found = [getattr(out, name, None) for name in names]
        return [part if head == "sequence" else part[mask.bool()] for part in found if part is not None]

    with torch.no_grad():
        with exactly(model) as exact_model:
            exact = results(exact_model)
        with unrounded(model):
            plain = results(model)
        report = linbias.patch(model)
        actual = results(model)
    assert report.layers == 2
    for ours, truth, theirs in zip(actual, exact, plain, strict=True):
        assert_within_budget(ours, truth, theirs, f"{kind} {head}")


@pytest.mark.parametrize("head", ["sequence", "token", "qa"])
@every_family
def test_every_head_trains(kind: str, head: str):
    """Loss and all gradients. Answers are sought in padding too, so the text for those has none."""
    mask = lengths_mask(13, 6, 11, side="right") if head != "qa" else torch.ones(3, 13, dtype=torch.int64)
    ids = tokens(3, 13).masked_fill(mask == 0, 0)
    options = {} if head == "qa" else {"num_labels": 5}
    labels = {
        "sequence": {"labels": torch.tensor([0, 4, 2])},
        "token": {"labels": torch.randint(5, (3, 13)).masked_fill(mask == 0, -100)},
        "qa": {"start_positions": torch.tensor([0, 5, 2]), "end_positions": torch.tensor([3, 7, 12])},
    }[head]
    model = make(kind, head, layers=2, **options)

    def results(model: Any) -> dict[str, Tensor]:
        out = model(ids, attention_mask=mask)
        logits = out.start_logits if head == "qa" else out.logits
        found = {"logits": logits.detach() if head == "sequence" else logits.detach()[mask.bool()]}
        return found | gradients(model, lambda m: m(ids, attention_mask=mask, **labels).loss)

    with exactly(model) as exact_model:
        exact = results(exact_model)
    with unrounded(model):
        plain = results(model)
    linbias.patch(model)
    actual = results(model)
    assert len(actual) == 2 + len(list(model.parameters()))
    # What adds one number to the scores of all places has no part in where an answer is: a sum that is 0, not small.
    for name in [name for name, tensor in exact.items() if tensor.abs().max() < 1e-12]:
        assert head == "qa" and actual.pop(name).abs().max() < 1e-6
        del exact[name], plain[name]
    assert_same(actual, exact, plain, f"{kind} {head}")


@every_dtype
@some_heads
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@every_kind
def test_cached_steps(kind: str, static: bool, heads: int, dtype: torch.dtype):
    """A prompt, three single tokens and a piece of four, in a padded batch, equal one pass."""
    model, ids, mask = make(kind, layers=2, heads=heads).to(dtype), tokens(3, 16), lengths_mask(16, 9, 11)
    real = mask.bool()
    with torch.no_grad():
        with exactly(model) as exact_model:
            exact = exact_model(ids, attention_mask=mask).logits[real]
        with unrounded(model):
            plain = model(ids, attention_mask=mask).logits[real]
        linbias.patch(model)
        cache = transformers.StaticCache(config=model.config, max_cache_len=21) if static else None
        logits, start = [], 0
        for stop in (9, 10, 11, 12, 16):
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache})
            cache, start = store(out), stop
            logits.append(out.logits)
    assert_within_budget(torch.cat(logits, 1)[real], exact, plain, f"{kind} in steps")


@every_dtype
@some_heads
@every_kind
def test_beams(kind: str, heads: int, dtype: torch.dtype):
    """Two prompts, two beams each, that change places between steps, on every cache."""
    model = make(kind, layers=2, heads=heads).to(dtype)
    prompts, mask, orders = tokens(2, 9), lengths_mask(9, 5), ([1, 1, 2, 3], [0, 1, 3, 3], [1, 0, 2, 2])
    drawn = [tokens(4, 1) for _ in orders]

    def full(model: Any) -> Tensor:
        """The last logits of each step's whole texts."""
        texts, real, found = prompts.repeat_interleave(2, 0), mask.repeat_interleave(2, 0), []
        for order, new in zip(orders, drawn, strict=True):
            texts, real = torch.cat([texts[order], new], 1), torch.cat([real[order], torch.ones_like(new)], 1)
            found.append(model(texts, attention_mask=real).logits[:, -1])
        return torch.stack(found)

    def cached(cache: Any) -> Tensor:
        model(prompts, attention_mask=mask, use_cache=True, **{CACHE: cache})
        cache.batch_repeat_interleave(2)
        real, found = mask.repeat_interleave(2, 0), []
        for order, new in zip(orders, drawn, strict=True):
            cache.reorder_cache(torch.tensor(order))
            real = torch.cat([real[order], torch.ones_like(new)], 1)
            found.append(model(new, attention_mask=real, use_cache=True, **{CACHE: cache}).logits[:, -1])
        return torch.stack(found)

    with torch.no_grad():
        with exactly(model) as exact_model:
            exact = full(exact_model)
        with unrounded(model):
            plain = full(model)
        linbias.patch(model)
        for cache in (transformers.DynamicCache(config=model.config), AlibiCache(), AlibiCache(page_size=4)):
            assert_within_budget(cached(cache), exact, plain, f"{kind} beams on {type(cache).__name__}")


@every_kind
def test_output_attentions_show_the_softmax_and_change_nothing(kind: str):
    model, ids, mask = make(kind, layers=2, heads=4), tokens(2, 13), lengths_mask(13, 8)
    with torch.no_grad():
        with linbias.patch(model):
            quiet = model(ids, attention_mask=mask).logits
            shown = model(ids, attention_mask=mask, output_attentions=True)
        # Four heads and few tokens: nothing in Falcon's bias rounds, so its own formula is exact as well.
        with linbias.patch(model, fidelity="checkpoint"):
            own = model(ids, attention_mask=mask, output_attentions=True)
    assert torch.equal(quiet, shown.logits)
    for ours, theirs in zip(shown.attentions, own.attentions, strict=True):
        assert ours.shape == (2, 4, 13, 13)
        real = mask.bool()[:, None, :, None].expand_as(ours)
        torch.testing.assert_close(ours[real], theirs[real], atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.sum(-1), mask[:, None, :].float().expand(2, 4, 13))


@pytest.mark.parametrize("reentrant", [False, True])
@every_family
def test_gradient_checkpointing(kind: str, reentrant: bool):
    model, ids, mask = make(kind, layers=2), tokens(2, 13), lengths_mask(13, 8)
    linbias.patch(model)
    model.train()

    def loss(model: Any) -> Tensor:
        return model(ids, attention_mask=mask, labels=labels_of(ids, mask), use_cache=False).loss

    whole = gradients(model, loss)
    checkpoint_activations(model, reentrant=reentrant)
    again = gradients(model, loss)
    for name, gradient in whole.items():
        assert torch.equal(gradient, again[name]), name
    assert store(model(ids, use_cache=True)) is None, "an empty cache would look like a filled one"


class TestDropout:
    @pytest.mark.parametrize("kind", ["bloom", "falcon", "falcon-multi-query", "falcon-new-decoder"])
    def test_hidden_dropout_stays_where_it_was(self, kind: str):
        """The same draws in the same places: the residual branches."""
        model, ids = make(kind, hidden_dropout=0.3), tokens(2, 13)
        model.train()
        torch.manual_seed(5)
        plain = model(ids).logits
        linbias.patch(model)
        torch.manual_seed(5)
        torch.testing.assert_close(model(ids).logits, plain, atol=2e-5, rtol=0)

    @every_family
    def test_attention_dropout_is_drawn_in_training_only(self, kind: str):
        options = {} if kind == "mpt" else {"attention_dropout": 0.5}
        model, ids = make(kind, **options), tokens(2, 13)
        for block in getattr(base(model), "blocks", []):
            block.attn.attn_dropout_p = 0.5
        linbias.patch(model)
        with torch.no_grad():
            calm = model(ids).logits
            assert torch.equal(calm, model(ids).logits)
            model.train()
            first, second = model(ids).logits, model(ids).logits
        assert largest_error(first, calm) > 1e-2
        assert largest_error(first, second) > 1e-2

    @every_family
    def test_attention_dropout_has_the_rate_asked_for(self, kind: str):
        """Where every query sees one key of weight 1, what is kept is 1 / (1 - p) of it, and p of it is not."""
        options = {} if kind == "mpt" else {"attention_dropout": 0.25}
        model, ids, alone = make(kind, layers=1, **options), tokens(9, 60), torch.eye(60, dtype=torch.bool)[None, None]
        (block,) = base(model).blocks if kind == "mpt" else base(model).h
        if kind == "mpt":
            block.attn.attn_dropout_p = 0.25  # transformers' MptConfig takes whole numbers only
        mix = block.attn.out_proj if kind == "mpt" else block.self_attention.dense
        linbias.patch(model)
        contexts: list[Tensor] = []
        mix.register_forward_pre_hook(lambda _, inputs: contexts.append(inputs[0]))
        with torch.no_grad():
            model(ids, attention_mask=alone)
            model.train()(ids, attention_mask=alone)
        calm, drawn = contexts
        kept = drawn != 0
        torch.testing.assert_close(drawn[kept], calm[kept] / 0.75)
        # 9 * 60 * 6 pairs: three standard deviations.
        assert abs((~kept).float().mean() - 0.25) < 3 * (0.25 * 0.75 / (9 * 60 * 6)) ** 0.5


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"slow_but_exact": True, "pretraining_tp": 4},
            {"apply_residual_connection_post_layernorm": True},
        ],
        ids=["slow-but-exact", "residual-after-norm"],
    )
    def test_bloom(self, options: dict[str, Any]):
        self._holds(make("bloom", layers=2, **options))

    @pytest.mark.parametrize("options", [{"clip_qkv": 0.7}, {"softmax_scale": 0.9}, {"softmax_scale": 0.0}], ids=str)
    def test_mpt(self, options: dict[str, Any]):
        self._holds(make("mpt", layers=2, attn_config=options))

    @pytest.mark.parametrize("options", [{"num_ln_in_parallel_attn": 1}, {"activation": "relu"}], ids=str)
    def test_falcon(self, options: dict[str, Any]):
        self._holds(make("falcon-new-decoder", layers=2, **options))

    @every_family
    def test_embeddings_instead_of_ids(self, kind: str):
        model, ids = make(kind, layers=2), tokens(2, 13)
        linbias.patch(model)
        with torch.no_grad():
            embedded = model.get_input_embeddings()(ids)
            assert torch.equal(model(ids).logits, model(inputs_embeds=embedded).logits)
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(ids, inputs_embeds=embedded)

    @every_family
    def test_tuples_and_hidden_states(self, kind: str):
        model, ids = make(kind, "base", layers=2), tokens(2, 13)
        arguments = {"use_cache": True, "output_hidden_states": True, "return_dict": False}
        with torch.no_grad():
            plain = model(ids, **arguments)
            with linbias.patch(model):
                actual = model(ids, **arguments)
        assert len(actual) == len(plain) == 3
        assert type(actual[1]) is type(plain[1]) and actual[1].get_seq_length() == 13
        assert [state.shape for state in actual[2]] == [state.shape for state in plain[2]]

    def _holds(self, model: Any) -> None:
        ids, mask = tokens(2, 13), lengths_mask(13, 8)
        real = mask.bool()
        with torch.no_grad():
            with exactly(model) as exact_model:
                exact = exact_model(ids, attention_mask=mask).logits[real]
            with unrounded(model):
                plain = model(ids, attention_mask=mask).logits[real]
            with linbias.patch(model):
                actual = model(ids, attention_mask=mask).logits[real]
        assert_within_budget(actual, exact, plain, "logits")


def test_falcon_layouts_share_keys():
    """Keys enter the cache once for each group that shares them."""
    assert FALCON in KINDS
    for kind, groups in (("falcon", 6), ("falcon-multi-query", 1), ("falcon-new-decoder", 2)):
        model = make(kind, layers=1)
        linbias.patch(model)
        with torch.no_grad():
            cache = store(model(tokens(1, 5), use_cache=True))
        assert cache.layers[0].keys.shape == (1, groups, 5, 8), kind
