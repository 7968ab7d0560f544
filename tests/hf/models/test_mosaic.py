# SPDX-License-Identifier: Apache-2.0
"""The MosaicBERT line against its formulas, written out in numpy; its published names; and another library's code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.hf.models import encoders
from tests.hf.models.encoders import gelu, layer_norm, lengths_mask, linear, weights_of

pytest.importorskip("transformers", reason="transformers is missing: pip install 'linbias[hf]'")

from linbias.hf.models import mosaic  # noqa: E402
from linbias.hf.models.mosaic import PUBLISHED, MosaicBertConfig  # noqa: E402

SIZES = {
    "vocab_size": 53,
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 44,
    "type_vocab_size": 2,
}


def make(head: str = "Model", **options: Any) -> Any:
    return encoders.randomised(getattr(mosaic, f"MosaicBert{head}")(MosaicBertConfig(**{**SIZES, **options})))


def formula(weights: dict[str, np.ndarray], ids: np.ndarray, types: np.ndarray) -> np.ndarray:
    return encoders.mosaic(weights, ids, types, heads=SIZES["num_attention_heads"])


class TestFormula:
    def test_vectors_of_padded_texts_are_the_formulas(self) -> None:
        model = make().double()
        lengths = (13, 2, 9)
        mask, ids = lengths_mask(*lengths, side="right"), torch.randint(1, 53, (3, 13))
        types = torch.randint(0, 2, (3, 13))
        with torch.no_grad():
            out = model(ids, attention_mask=mask, token_type_ids=types)
        weights = weights_of(model)
        for row, length in enumerate(lengths):
            expected = formula(weights, ids[row, :length].numpy(), types[row, :length].numpy())
            encoders.assert_close(out.last_hidden_state[row, :length], expected)
            encoders.assert_close(out.pooler_output[row], np.tanh(linear(weights, "pooler.dense", expected[0])))
            assert not out.last_hidden_state[row, length:].any()

    def test_logits_over_the_vocabulary_are_the_formulas(self) -> None:
        model = make("ForMaskedLM", layer_norm_eps=1e-3).double()
        for layer in model.modules():
            if isinstance(layer, torch.nn.LayerNorm) and layer is not model.cls.predictions.transform.LayerNorm:
                layer.eps = 1e-12  # the head's own stays what it is, see MosaicBertPredictions
        ids = torch.randint(1, 53, (1, 11))
        with torch.no_grad():
            found = model(ids).logits[0]
        weights = weights_of(model)
        base = {name.removeprefix("bert."): part for name, part in weights.items()}
        hidden = formula(base, ids[0].numpy(), np.zeros(11, int))
        hidden = gelu(linear(weights, "cls.predictions.transform.dense", hidden))
        hidden = layer_norm(weights, "cls.predictions.transform.LayerNorm", hidden)
        words = weights["bert.embeddings.word_embeddings.weight"]
        encoders.assert_close(found, hidden @ words.T + weights["cls.predictions.decoder.bias"])

    def test_logits_of_tokens_are_the_formulas(self) -> None:
        model = make("ForTokenClassification", num_labels=5).double()
        ids = torch.randint(1, 53, (1, 9))
        with torch.no_grad():
            found = model(ids).logits[0]
        weights = weights_of(model)
        base = {name.removeprefix("bert."): part for name, part in weights.items()}
        encoders.assert_close(found, linear(weights, "classifier", formula(base, ids[0].numpy(), np.zeros(9, int))))


_NAMES = {
    "embeddings.word_embeddings.weight": (53, 30),
    "embeddings.token_type_embeddings.weight": (2, 30),
    "embeddings.LayerNorm.weight": (30,),
    "embeddings.LayerNorm.bias": (30,),
    "encoder.layer.0.attention.self.Wqkv.weight": (90, 30),
    "encoder.layer.0.attention.self.Wqkv.bias": (90,),
    "encoder.layer.0.attention.output.dense.weight": (30, 30),
    "encoder.layer.0.attention.output.dense.bias": (30,),
    "encoder.layer.0.attention.output.LayerNorm.weight": (30,),
    "encoder.layer.0.attention.output.LayerNorm.bias": (30,),
    "encoder.layer.0.mlp.gated_layers.weight": (88, 30),
    "encoder.layer.0.mlp.wo.weight": (30, 44),
    "encoder.layer.0.mlp.wo.bias": (30,),
    "encoder.layer.0.mlp.layernorm.weight": (30,),
    "encoder.layer.0.mlp.layernorm.bias": (30,),
    "pooler.dense.weight": (30, 30),
    "pooler.dense.bias": (30,),
}
_CLS = {
    "cls.predictions.decoder.bias": (53,),
    "cls.predictions.transform.dense.weight": (30, 30),
    "cls.predictions.transform.dense.bias": (30,),
    "cls.predictions.transform.LayerNorm.weight": (30,),
    "cls.predictions.transform.LayerNorm.bias": (30,),
}


class TestPublishedNames:
    def test_parameters_have_the_names_of_the_checkpoints(self, tmp_path: Path) -> None:
        model = make(num_hidden_layers=1)
        assert {name: tuple(part.shape) for name, part in model.state_dict().items()} == _NAMES
        encoders.check_round_trip(model, tmp_path, set(_NAMES))

    def test_a_masked_language_model_has_no_pooler(self, tmp_path: Path) -> None:
        names = {f"bert.{name}" for name in _NAMES if not name.startswith("pooler")}
        encoders.check_round_trip(make("ForMaskedLM", num_hidden_layers=1), tmp_path, {*names, *_CLS})

    @pytest.mark.parametrize(
        ("head", "pooled"), [("ForSequenceClassification", True), ("ForTokenClassification", False)]
    )
    def test_a_classifier_has_a_pooler_where_it_reads_one(self, head: str, pooled: bool, tmp_path: Path) -> None:
        names = {f"bert.{name}" for name in _NAMES if pooled or not name.startswith("pooler")}
        names |= {"classifier.weight", "classifier.bias"}
        encoders.check_round_trip(make(head, num_hidden_layers=1, num_labels=5), tmp_path, names)


PUBLISHED_CONFIG = {
    "alibi_starting_size": 512,
    "architectures": ["BertForMaskedLM"],
    "auto_map": {"AutoModelForMaskedLM": "bert_layers.BertForMaskedLM"},
    "model_type": "bert",
    "position_embedding_type": "absolute",
    "use_cache": True,
    **SIZES,
}


class TestPublishedConfig:
    def test_what_is_saved_is_ours_and_leads_to_no_code(self, tmp_path: Path) -> None:
        model = PUBLISHED.classes["BertForMaskedLM"](MosaicBertConfig(**PUBLISHED_CONFIG))
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved["model_type"] == "linbias_mosaic_bert"
        assert "auto_map" not in saved
        assert PUBLISHED.claims(saved)
        assert not PUBLISHED.refusals(saved)
        assert PUBLISHED.classes[saved["architectures"][0]] is type(model)

    @pytest.mark.parametrize(
        ("config", "claimed"),
        [
            (PUBLISHED_CONFIG, True),
            ({"model_type": "bert", "alibi_starting_size": 1024}, True),
            ({"model_type": "bert", "auto_map": {"AutoModel": "somebody/model--bert_layers.BertModel"}}, True),
            ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, False),
            ({"model_type": "bert", "architectures": ["JinaBertModel"]}, False),
            ({"model_type": "modernbert", "alibi_starting_size": 512}, False),
        ],
    )
    def test_only_its_own_configurations_are_claimed(self, config: dict[str, Any], claimed: bool) -> None:
        assert PUBLISHED.claims(config) is claimed

    @pytest.mark.parametrize(
        "wrong",
        [
            {"position_embedding_type": "relative_key"},
            {"normalization": "rmsnorm"},
            {"use_glu_mlp": False},
            {"is_decoder": True},
            {"num_attention_heads": 7},
        ],
        ids=lambda wrong: next(iter(wrong)),
    )
    def test_what_cannot_be_honoured_is_refused_by_name(self, wrong: dict[str, Any]) -> None:
        (reason,) = PUBLISHED.refusals({**PUBLISHED_CONFIG, **wrong})
        assert next(iter(wrong)) in reason
        with pytest.raises(ValueError, match=next(iter(wrong))):
            mosaic.MosaicBertModel(MosaicBertConfig(**{**PUBLISHED_CONFIG, **wrong}))


class TestMultimolecule:
    """multimolecule's DNABERT-2, which is published under the AGPL and so never built upon, with the same weights."""

    def test_its_dnabert_2_gives_the_same_vectors(self) -> None:
        other = pytest.importorskip("multimolecule", reason="multimolecule is missing: pip install multimolecule")
        shared = {name: value for name, value in SIZES.items() if name != "vocab_size"}
        config = other.DnaBert2Config(
            vocab_size=53, hidden_dropout=0.0, attention_dropout=0.0, pad_token_id=0, **shared
        )
        ours, theirs = make(), other.DnaBert2Model(config).eval()
        theirs.load_state_dict(_renamed(ours.state_dict()))
        ids, mask = torch.randint(6, 53, (3, 13)), lengths_mask(13, 2, 9, side="right")
        with torch.no_grad():
            found = ours.double()(ids, attention_mask=mask).last_hidden_state
            expected = theirs.double()(ids, attention_mask=mask).last_hidden_state
        # Its bias is made of slopes in float32 and its mask is finite.
        error = (found - expected)[mask.bool()].abs().max()
        assert error <= 2**-20 * expected.abs().max(), error


_ITS_NAMES = {
    "LayerNorm": "layer_norm",
    "layernorm": "layer_norm",
    "gated_layers": "up_proj",
    "mlp.wo": "mlp.down_proj",
}


def _renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, part in weights.items():
        thirds = zip(("query", "key", "value"), part.chunk(3), strict=True) if "Wqkv" in name else [("", part)]
        for kind, third in thirds:
            theirs = name.replace("Wqkv", kind)
            for old, new in _ITS_NAMES.items():
                theirs = theirs.replace(old, new)
            renamed[theirs] = third
    return renamed
