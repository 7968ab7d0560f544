# SPDX-License-Identifier: Apache-2.0
"""JinaBERT against its formulas, written out in numpy, and its published names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.hf.models import encoders
from tests.hf.models.encoders import gelu, layer_norm, lengths_mask, linear, weights_of

pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")

from linbias.hf.models import jina, jina_code  # noqa: E402
from linbias.hf.models.jina import PUBLISHED, JinaBertConfig  # noqa: E402

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "type_vocab_size": 2,
}
LAYOUTS = [(code, kind) for code in (False, True) for kind in ("geglu", "reglu", "original")]
every_layout = pytest.mark.parametrize(("code", "kind"), LAYOUTS, ids=str)


def make(head: str = "Model", *, code: bool = False, kind: str = "geglu", **options: Any) -> Any:
    found = (jina_code if code else jina).PUBLISHED
    config = found.config(**{**SIZES, "feed_forward_type": kind, **options})
    return encoders.randomised(found.classes[f"JinaBert{head}"](config))


def formula(weights: dict[str, np.ndarray], ids: np.ndarray, types: np.ndarray, code: bool, kind: str) -> np.ndarray:
    return encoders.jina(weights, ids, types, heads=SIZES["num_attention_heads"], code=code, kind=kind)


class TestFormula:
    @every_layout
    def test_vectors_of_padded_texts_are_the_formulas(self, code: bool, kind: str) -> None:
        model = make(code=code, kind=kind).double()
        lengths = (7, 13, 1)
        mask, ids = lengths_mask(*lengths, side="left"), torch.randint(1, 53, (3, 13))
        types = torch.randint(0, 2, (3, 13))
        with torch.no_grad():
            out = model(ids, attention_mask=mask, token_type_ids=types)
        weights = weights_of(model)
        for row, length in enumerate(lengths):
            expected = formula(weights, ids[row, -length:].numpy(), types[row, -length:].numpy(), code, kind)
            encoders.assert_close(out.last_hidden_state[row, -length:], expected)
            pooled = np.tanh(linear(weights, "pooler.dense", expected[0]))
            encoders.assert_close(out.pooler_output[row], pooled)
            assert not out.last_hidden_state[row, :-length].any()

    def test_logits_over_the_vocabulary_are_the_formulas(self) -> None:
        model = make("ForMaskedLM").double()
        ids = torch.randint(1, 53, (1, 11))
        labels = torch.where(torch.arange(11) % 3 == 0, ids, -100)
        with torch.no_grad():
            out = model(ids, labels=labels)
        weights = weights_of(model)
        base = {name.removeprefix("bert."): part for name, part in weights.items()}
        hidden = formula(base, ids[0].numpy(), np.zeros(11, int), False, "geglu")
        hidden = gelu(linear(weights, "cls.predictions.transform.dense", hidden))
        hidden = layer_norm(weights, "cls.predictions.transform.LayerNorm", hidden)
        logits = hidden @ weights["bert.embeddings.word_embeddings.weight"].T + weights["cls.predictions.bias"]
        encoders.assert_close(out.logits[0], logits)
        chosen = [place for place in range(11) if place % 3 == 0]
        shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        loss = -np.mean([shares[place, int(ids[0, place])] for place in chosen])
        # transformers' loss takes logits in float32.
        assert abs(float(out.loss) - loss) <= 4 * 2**-24 * np.abs(logits).max()

    def test_a_rerankers_score_is_the_formulas(self) -> None:
        model = make("ForSequenceClassification", num_labels=1).double()
        ids = torch.randint(1, 53, (1, 9))
        with torch.no_grad():
            score = model(ids).logits
        weights = weights_of(model)
        base = {name.removeprefix("bert."): part for name, part in weights.items()}
        first = formula(base, ids[0].numpy(), np.zeros(9, int), False, "geglu")[0]
        expected = linear(weights, "classifier", np.tanh(linear(base, "pooler.dense", first)))
        encoders.assert_close(score[0], expected)


_COMMON = {
    "embeddings.word_embeddings.weight": (53, 24),
    "embeddings.token_type_embeddings.weight": (2, 24),
    "embeddings.LayerNorm.weight": (24,),
    "embeddings.LayerNorm.bias": (24,),
    "encoder.layer.0.attention.self.query.weight": (24, 24),
    "encoder.layer.0.attention.self.query.bias": (24,),
    "encoder.layer.0.attention.self.key.weight": (24, 24),
    "encoder.layer.0.attention.self.key.bias": (24,),
    "encoder.layer.0.attention.self.value.weight": (24, 24),
    "encoder.layer.0.attention.self.value.bias": (24,),
    "encoder.layer.0.attention.output.dense.weight": (24, 24),
    "encoder.layer.0.attention.output.dense.bias": (24,),
    "encoder.layer.0.attention.output.LayerNorm.weight": (24,),
    "encoder.layer.0.attention.output.LayerNorm.bias": (24,),
    "pooler.dense.weight": (24, 24),
    "pooler.dense.bias": (24,),
}
_LAYERS = {
    (False, "geglu"): {
        "mlp.gated_layers.weight": (80, 24),
        "mlp.wo.weight": (24, 40),
        "mlp.wo.bias": (24,),
        "mlp.layernorm.weight": (24,),
        "mlp.layernorm.bias": (24,),
    },
    (False, "original"): {
        "intermediate.dense.weight": (40, 24),
        "intermediate.dense.bias": (40,),
        "output.dense.weight": (24, 40),
        "output.dense.bias": (24,),
        "output.LayerNorm.weight": (24,),
        "output.LayerNorm.bias": (24,),
    },
    (True, "geglu"): {
        "attention.self.layer_norm_q.weight": (24,),
        "attention.self.layer_norm_q.bias": (24,),
        "attention.self.layer_norm_k.weight": (24,),
        "attention.self.layer_norm_k.bias": (24,),
        "layer_norm_1.weight": (24,),
        "layer_norm_1.bias": (24,),
        "layer_norm_2.weight": (24,),
        "layer_norm_2.bias": (24,),
        "mlp.up_gated_layer.weight": (80, 24),
        "mlp.down_layer.weight": (24, 40),
        "mlp.down_layer.bias": (24,),
    },
}
_CLS = {
    "cls.predictions.bias": (53,),
    "cls.predictions.transform.dense.weight": (24, 24),
    "cls.predictions.transform.dense.bias": (24,),
    "cls.predictions.transform.LayerNorm.weight": (24,),
    "cls.predictions.transform.LayerNorm.bias": (24,),
}


class TestPublishedNames:
    @pytest.mark.parametrize("layout", list(_LAYERS), ids=str)
    def test_parameters_have_the_names_of_the_checkpoints(self, layout: tuple[bool, str], tmp_path: Path) -> None:
        code, kind = layout
        model = make(code=code, kind=kind, num_hidden_layers=1)
        layer = {f"encoder.layer.0.{name}": shape for name, shape in _LAYERS[layout].items()}
        names = {**_COMMON, **layer}
        assert {name: tuple(part.shape) for name, part in model.state_dict().items()} == names
        encoders.check_round_trip(model, tmp_path, set(names))

    def test_a_masked_language_model_stores_its_embeddings_once(self, tmp_path: Path) -> None:
        layer = {f"encoder.layer.0.{name}" for name in _LAYERS[False, "geglu"]}
        names = {f"bert.{name}" for name in {*_COMMON, *layer} if not name.startswith("pooler")}
        encoders.check_round_trip(make("ForMaskedLM", num_hidden_layers=1), tmp_path, {*names, *_CLS})

    @pytest.mark.parametrize("said", [True, False], ids=["config says nothing", "config says so"])
    def test_a_base_model_has_no_pooler_where_the_checkpoint_has_none(self, said: bool, tmp_path: Path) -> None:
        head = make("ForMaskedLM")
        head.config.add_pooling_layer = said
        head.save_pretrained(tmp_path)
        base, report = jina.JinaBertModel.from_pretrained(tmp_path, output_loading_info=True)
        assert base.pooler is None
        assert base.config.add_pooling_layer is False
        assert not report["missing_keys"]
        ids = torch.randint(1, 53, (2, 5))
        with torch.no_grad():
            assert torch.equal(base(ids)[0], head.bert(ids)[0])

    def test_a_head_that_reads_the_pooler_is_missing_it(self, tmp_path: Path) -> None:
        make("ForMaskedLM").save_pretrained(tmp_path)
        kind = jina.JinaBertForSequenceClassification
        _, report = kind.from_pretrained(tmp_path, output_loading_info=True)
        assert {"bert.pooler.dense.weight", "bert.pooler.dense.bias"} <= set(report["missing_keys"])

    @pytest.mark.parametrize("extra", ["bert.pooler.dense.weight", "bert.embeddings.position_ids"])
    def test_what_a_head_does_not_read_is_no_fault(self, extra: str, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        make("ForMaskedLM").save_pretrained(tmp_path)
        stored = load_file(tmp_path / "model.safetensors")
        save_file({**stored, extra: torch.zeros(24, 24)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        _, report = jina.JinaBertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report


PUBLISHED_CONFIG = {
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "attn_implementation": "torch",
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "model_type": "bert",
    "position_embedding_type": "alibi",
    **SIZES,
}
CODE_MAP = {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}


class TestPublishedConfig:
    @pytest.mark.parametrize(
        ("home", "config", "kind"),
        [
            (jina, PUBLISHED_CONFIG, "linbias_jina_bert"),
            (jina_code, {**PUBLISHED_CONFIG, "auto_map": CODE_MAP}, "linbias_jina_bert_code"),
        ],
    )
    def test_what_is_saved_is_ours_and_leads_to_no_code(
        self, home: Any, config: dict[str, Any], kind: str, tmp_path: Path
    ) -> None:
        found = home.PUBLISHED
        assert [each.PUBLISHED.name for each in (jina, jina_code) if each.PUBLISHED.claims(config)] == [found.name]
        found.classes["JinaBertForMaskedLM"](found.config(**config)).save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved["model_type"] == kind
        assert not {"auto_map", "attn_implementation"} & set(saved)
        assert [each.PUBLISHED.name for each in (jina, jina_code) if each.PUBLISHED.claims(saved)] == [found.name]
        assert not found.refusals(saved)
        assert saved["architectures"][0] in found.classes

    @pytest.mark.parametrize(
        ("config", "claimed"),
        [
            (PUBLISHED_CONFIG, True),
            ({"model_type": "bert", "architectures": ["JinaBertModel"]}, True),
            ({"model_type": "bert", "_name_or_path": "jinaai/jina-bert-implementation"}, True),
            ({"model_type": "bert", "architectures": ["BertModel"]}, False),
            ({"model_type": "bert", "auto_map": {"AutoModel": "bert_layers.BertModel"}}, False),
            ({"model_type": "xlm-roberta", "architectures": ["JinaBertModel"]}, False),
            ({}, False),
        ],
    )
    def test_only_its_own_configurations_are_claimed(self, config: dict[str, Any], claimed: bool) -> None:
        assert PUBLISHED.claims(config) is claimed

    @pytest.mark.parametrize(
        "wrong",
        [
            {"position_embedding_type": "absolute"},
            {"feed_forward_type": "swiglu"},
            {"emb_pooler": "cls"},
            {"alibi_scaling": 4},
            {"is_decoder": True},
            {"add_cross_attention": True},
            {"hidden_act": "unheard of"},
            {"num_attention_heads": 5},
        ],
        ids=lambda wrong: next(iter(wrong)),
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, wrong: dict[str, Any]) -> None:
        (reason,) = PUBLISHED.refusals({**PUBLISHED_CONFIG, **wrong})
        name, value = next(iter(wrong.items()))
        assert name in reason
        assert repr(value) in reason or str(value) in reason
        with pytest.raises(ValueError, match=name):
            jina.JinaBertModel(JinaBertConfig(**{**PUBLISHED_CONFIG, **wrong}))

    def test_a_published_config_without_alibi_is_not_taken_for_one_with_it(self) -> None:
        silent = {name: value for name, value in PUBLISHED_CONFIG.items() if name != "position_embedding_type"}
        assert "position_embedding_type='absolute'" in PUBLISHED.refusals(silent)[0]
