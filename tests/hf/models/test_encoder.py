# SPDX-License-Identifier: Apache-2.0
"""What every published encoder does alike: padding, packing, precision, training, and transformers' own machinery."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import linbias
from linbias.testing import assert_within_budget
from tests.hf.models import encoders
from tests.hf.models.encoders import lengths_mask
from tests.hf.tiny import checkpoint_activations

pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")

from linbias.hf import mlp  # noqa: E402
from linbias.hf.models import batch, jina, jina_code, mosaic  # noqa: E402

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 40,
}
KINDS = {
    "jina": (jina, {"feed_forward_type": "geglu"}),
    "jina-code": (jina_code, {"feed_forward_type": "geglu"}),
    "mosaic": (mosaic, {}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = (11, 17, 1, 6)


def make(kind: str, head: str = "Model", **options: Any) -> Any:
    home, more = KINDS[kind]
    published = home.PUBLISHED
    name = ("Bert" if kind == "mosaic" else "JinaBert") + head
    return encoders.randomised(published.classes[name](published.config(**{**SIZES, **more, **options})))


def texts() -> list[Tensor]:
    return [torch.randint(1, 53, (length,)) for length in LENGTHS]


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    mask = lengths_mask(*map(len, rows), side=side)
    ids = torch.zeros_like(mask)
    for number, row in enumerate(rows):
        ids[number, mask[number].bool()] = row
    return ids, mask


class TestPadding:
    @every_kind
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_a_text_has_its_vectors_whatever_it_is_padded_with(self, kind: str, side: str) -> None:
        model, rows = make(kind).double(), texts()
        ids, mask = padded(rows, side)
        with torch.no_grad():
            together = model(ids, attention_mask=mask)
            for number, row in enumerate(rows):
                alone = model(row[None])
                found = together.last_hidden_state[number, mask[number].bool()]
                encoders.assert_close(found, alone.last_hidden_state[0].numpy())
                encoders.assert_close(together.pooler_output[number], alone.pooler_output[0].numpy())
        assert not together.last_hidden_state[~mask.bool()].any()

    @every_kind
    def test_packed_and_padded_agree(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, (ids, mask) = make(kind).double(), padded(texts(), "left")
        mask[0, -4] = 0  # a hole, across which distances go on counting places
        types = torch.randint(0, 2, ids.shape)
        with torch.no_grad():
            packed = model(ids, attention_mask=mask, token_type_ids=types, output_hidden_states=True)
            monkeypatch.setattr(batch, "unwatched", lambda: False)  # as under a compiler
            other = model(ids, attention_mask=mask, token_type_ids=types, output_hidden_states=True)
        assert len(packed.hidden_states) == 4
        for one, two in zip(
            (*packed.hidden_states, packed.pooler_output), (*other.hidden_states, other.pooler_output), strict=True
        ):
            encoders.assert_close(one, two.numpy())

    def test_only_real_tokens_reach_the_layers(self) -> None:
        model, (ids, mask) = make("mosaic"), padded(texts(), "right")
        shapes: list[torch.Size] = []
        model.encoder.layer[1].register_forward_pre_hook(lambda layer, given: shapes.append(given[0].shape))
        model(ids, attention_mask=mask)
        model(ids)
        assert shapes == [(1, sum(LENGTHS), 24), (4, 17, 24)]

    def test_one_padded_text_is_a_plain_call(self) -> None:
        # No positions and no segments: the fastest that there is.
        ids, mask = torch.ones(1, 9, dtype=torch.int64), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0]])
        found = batch.read_batch(mask, ids, packed=True)
        assert found.queries.plain
        assert found.queries.length == 5

    @pytest.mark.parametrize("masked", [torch.zeros(2, 5, dtype=torch.bool), torch.tensor([[0] * 5, [1] * 5])])
    def test_texts_of_padding_alone_are_zeros(self, masked: Tensor) -> None:
        model = make("jina", "ForSequenceClassification", num_labels=3)
        out = model.bert(torch.ones(2, 5, dtype=torch.int64), attention_mask=masked)
        assert not out.last_hidden_state[~masked.bool()].any()
        assert out.last_hidden_state.isfinite().all()
        assert out.pooler_output.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
    def test_masks_of_any_type_mean_the_same(self, dtype: torch.dtype) -> None:
        model, (ids, mask) = make("jina"), padded(texts(), "left")
        assert torch.equal(model(ids, attention_mask=mask)[0], model(ids, attention_mask=mask.to(dtype))[0])


class TestBadInput:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({}, "exactly one of input_ids and inputs_embeds"),
            ({"input_ids": torch.ones(5, dtype=torch.int64)}, r"input_ids must have shape \(batch, tokens\)"),
            ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must have shape \(2, 5\)"),
            ({"attention_mask": torch.ones(2, 1, 5, 5)}, "no masks of pairs"),
            ({"attention_mask": torch.tensor([[1, 1, 2, 2, 2]] * 2)}, "give each text a row"),
            ({"token_type_ids": torch.zeros(2, 4, dtype=torch.int64)}, r"token_type_ids must have shape \(2, 5\)"),
        ],
    )
    def test_is_refused(self, given: dict[str, Any], message: str) -> None:
        ids = {"input_ids": torch.ones(2, 5, dtype=torch.int64)} if given else {}
        with pytest.raises(ValueError, match=message):
            make("jina")(**{**ids, **given})

    @pytest.mark.parametrize("name", ["position_ids", "head_mask", "past_key_values", "encoder_hidden_states", "spam"])
    def test_arguments_without_a_meaning_are_named(self, name: str) -> None:
        with pytest.raises(TypeError, match=name):
            make("mosaic", "ForMaskedLM")(torch.ones(1, 3, dtype=torch.int64), **{name: torch.zeros(1, 3)})


class TestPrecision:
    @every_kind
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
    def test_errors_stay_within_those_of_the_dense_formula(self, kind: str, dtype: torch.dtype) -> None:
        model, (ids, mask) = make(kind, layer_norm_eps=1e-5).to(dtype), padded(texts(), "right")
        exact = copy.deepcopy(model).double()
        with torch.no_grad():
            found, truth = (each(ids, attention_mask=mask).last_hidden_state for each in (model, exact))
            with dense_attention():
                plain = model(ids, attention_mask=mask).last_hidden_state
        assert found.dtype == dtype
        assert_within_budget(found, truth, plain, f"{kind} {dtype}")

    def test_half_leaves_the_slopes_alone(self) -> None:
        assert not list(make("jina").buffers())


@contextmanager
def dense_attention() -> Iterator[None]:
    """A packed batch through torch's operations, with bias and mask as a dense tensor in the model's dtype."""

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, cache: Any) -> tuple[Tensor, None]:
        places, rows = mask.keys.places(), mask.keys.segment
        bias = -mask.slopes[:, None, None] * (places[:, None, :, None] - places[:, None, None, :]).abs()
        bias = bias.masked_fill(rows[:, None, :, None] != rows[:, None, None, :], -torch.inf).to(query.dtype)
        scores = query @ key.transpose(-1, -2) * layer.score_scale + bias
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2), None

    with mock.patch("linbias.hf.models.encoder.attend_in_layer", attend):
        yield


class TestTraining:
    @every_kind
    def test_gradients_are_those_of_the_dense_formula(self, kind: str) -> None:
        model, (ids, mask) = make(kind, "ForMaskedLM").double(), padded(texts(), "left")
        labels = ids.masked_fill(mask == 0, -100)

        def gradients() -> dict[str, Tensor]:
            model.zero_grad()
            model(ids, attention_mask=mask, labels=labels).logits.square().sum().backward()
            return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}

        found = gradients()
        with dense_attention():
            expected = gradients()
        assert set(found) == set(expected)
        # Some have a gradient of 0 (a key's bias moves all scores of a row alike), so the largest sets the scale.
        scale = max(float(part.abs().max()) for part in expected.values())
        for name, part in expected.items():
            assert (found[name] - part).abs().max() <= 2**-40 * scale, name

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointed_layers_give_the_same_gradients_under_dropout(self, reentrant: bool) -> None:
        model, (ids, mask) = make("jina", "ForTokenClassification"), padded(texts(), "right")
        labels = torch.zeros_like(ids)
        found = []
        for _ in range(2):
            model.train().zero_grad()
            torch.manual_seed(5)
            model(ids, attention_mask=mask, labels=labels).loss.backward()
            found.append({name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None})
            checkpoint_activations(model, reentrant=reentrant)
        assert found[0].keys() == found[1].keys()
        for name, part in found[0].items():
            torch.testing.assert_close(found[1][name], part, msg=name)

    def test_attention_is_dropped_in_training_alone(self) -> None:
        model, ids = make("mosaic", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5), torch.ones(1, 9).long()
        once, twice = model(ids)[0], model(ids)[0]
        assert torch.equal(once, twice)
        model.train()
        assert not torch.equal(model(ids)[0], model(ids)[0])

    @pytest.mark.parametrize(
        ("labels", "kind"),
        [
            (torch.tensor([0, 2]), "single_label_classification"),
            (torch.tensor([[0.0, 1, 1], [1, 0, 0]]), "multi_label_classification"),
        ],
    )
    def test_a_classifier_has_the_loss_of_its_problem(self, labels: Tensor, kind: str) -> None:
        model = make("mosaic", "ForSequenceClassification", num_labels=3, problem_type=kind)
        out = model(torch.randint(1, 53, (2, 7)), labels=labels)
        loss = (
            torch.nn.functional.cross_entropy
            if labels.dim() == 1
            else torch.nn.functional.binary_cross_entropy_with_logits
        )
        torch.testing.assert_close(out.loss, loss(out.logits, labels))


class TestTransformers:
    @every_kind
    def test_the_weights_of_the_attention_are_returned_where_they_are_asked_for(self, kind: str) -> None:
        model, (ids, mask) = make(kind).double(), padded(texts(), "left")
        with torch.no_grad():
            out = model(ids, attention_mask=mask, output_attentions=True)
            encoders.assert_close(out.last_hidden_state, model(ids, attention_mask=mask).last_hidden_state.numpy())
        assert [part.shape for part in out.attentions] == [(4, 6, 17, 17)] * 3
        for part in out.attentions:
            real = mask.bool()
            torch.testing.assert_close(
                part.sum(-1)[real[:, None].expand(-1, 6, -1)], torch.ones(6 * sum(LENGTHS)).double()
            )
            assert not part.masked_select(~real[:, None, None]).any()

    def test_a_tuple_is_returned_where_it_is_asked_for(self) -> None:
        model, ids = make("jina", "ForSequenceClassification", num_labels=3), torch.ones(2, 5).long()
        (logits,) = model(ids, return_dict=False)
        assert torch.equal(logits, model(ids).logits)
        hidden, pooled = model.bert(ids, return_dict=False)
        assert torch.equal(pooled, model.bert(ids).pooler_output)
        assert torch.equal(hidden, model.bert(ids).last_hidden_state)

    @every_kind
    def test_a_model_built_on_the_meta_device_is_whole_once_it_has_weights(self, kind: str) -> None:
        model, ids = make(kind), torch.randint(1, 53, (2, 7))
        with torch.device("meta"):
            hollow = type(model)(model.config)
        hollow.load_state_dict(model.state_dict(), assign=True)
        with torch.no_grad():
            assert torch.equal(hollow.eval()(ids)[0], model(ids)[0])

    def test_embeddings_may_be_given_in_place_of_ids(self) -> None:
        model, (ids, mask) = make("mosaic"), padded(texts(), "left")
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask)[0], model(ids, attention_mask=mask)[0])

    def test_the_vocabulary_can_grow(self) -> None:
        model = make("jina", "ForMaskedLM")
        model.resize_token_embeddings(59)
        logits = model(torch.full((1, 5), 58)).logits
        assert logits.shape == (1, 5, 59)
        assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight

    def test_autocast_reaches_the_attention(self) -> None:
        model, (ids, mask) = make("mosaic"), padded(texts(), "left")
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = model(ids, attention_mask=mask).last_hidden_state
        exact = model(ids, attention_mask=mask).last_hidden_state
        assert (out - exact).abs().max() < 0.1 * exact.abs().max()

    def test_a_device_map_does_not_cut_layers(self, tmp_path: Path) -> None:
        pytest.importorskip("accelerate", reason="accelerate is missing: pip install accelerate")
        model, ids = make("jina"), torch.randint(1, 53, (2, 7))
        model.save_pretrained(tmp_path)
        mapped = jina.JinaBertModel.from_pretrained(tmp_path, device_map={"": "cpu"})
        assert torch.equal(mapped(ids)[0], model(ids)[0])
        assert model._no_split_modules == {"JinaBertLayer"}

    @pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # peft calls what transformers renames
    def test_adapters_sit_on_the_named_projections(self) -> None:
        peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
        model = make("mosaic", "ForSequenceClassification", num_labels=3)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["Wqkv", "wo"], task_type="SEQ_CLS"))
        adapted(input_ids=torch.randint(1, 53, (2, 7)), labels=torch.tensor([0, 1])).loss.backward()
        trained = [name for name, part in adapted.named_parameters() if part.grad is not None]
        assert sum("lora_B" in name for name in trained) == 2 * 3


class TestLongTexts:
    @every_kind
    def test_the_mlp_goes_through_in_blocks(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model, ids = make(kind).double(), torch.randint(1, 53, (2, 19))
        with torch.no_grad():
            whole = model(ids)[0]
            monkeypatch.setattr(mlp, "_LEAST_ROWS", 7)
            monkeypatch.setattr(mlp, "_BLOCK", 0)
            seen: list[int] = []
            monkeypatch.setattr(torch.nn.GELU, "forward", _counted(torch.nn.GELU.forward, seen))
            encoders.assert_close(model(ids)[0], whole.numpy())
        assert seen == [7, 7, 7, 7, 7, 3] * 3

    def test_nothing_of_the_size_of_all_pairs_is_made(self) -> None:
        # 4,001 tokens: a bias of one head would be 16 million elements, the widest tensor here is 0.7 million.
        model, largest = make("mosaic", num_hidden_layers=1), [0]
        ids = torch.randint(1, 53, (1, 4001))
        with torch.no_grad(), _Largest(largest):
            model(ids)
        assert largest[0] <= 4001 * 24 * 8


def _counted(forward: Any, seen: list[int]) -> Any:
    def counted(layer: Any, hidden: Tensor) -> Tensor:
        seen.append(hidden.shape[1])
        return forward(layer, hidden)

    return counted


class _Largest(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, largest: list[int]) -> None:
        super().__init__()
        self.largest = largest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in torch.utils._pytree.tree_leaves(out):
            if isinstance(part, Tensor):
                self.largest[0] = max(self.largest[0], part.numel())
        return out


def test_slopes_are_the_authors() -> None:
    assert linbias.alibi_slopes(6).tolist() == encoders.SLOPES[6]
