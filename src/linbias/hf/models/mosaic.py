# SPDX-License-Identifier: Apache-2.0
"""The MosaicBERT line: MosaicBERT, DNABERT-2, DNABERT-S, mRNABERT, BiRNA-BERT; all of one file, `bert_layers.py`.

One projection makes queries, keys and values, and the MLP has a gate. See docs/models/mosaic.md.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .encoder import Attention, BaseEncoder, EncoderConfig, EncoderModel, GatedMLP, Layer, SelfAttention, refused
from .encoder_heads import MaskedLM, Predictions, SequenceClassifier, TokenClassifier
from .published import Published

# Options of other encoders that grew out of the same file, and what they mean where they say nothing.
_FORKS = {
    "normalization": "layernorm",
    "bert_layer": None,
    "use_glu_mlp": True,
    "use_monarch_mlp": False,
    "monarch_mixer_sequence_mixing": False,
    "use_positional_encodings": False,
    "rotary_emb_dim": None,
}


class MosaicBertConfig(EncoderConfig):
    """The published fields. Any length is computed, whatever `alibi_starting_size` says."""

    model_type = "linbias_mosaic_bert"

    alibi_starting_size: int = 512


def _claims(config: Mapping[str, Any]) -> bool:
    if config.get("model_type") == MosaicBertConfig.model_type:
        return True
    homes = (config.get("auto_map") or {}).values()
    named = "alibi_starting_size" in config or any("bert_layers." in str(home) for home in homes)
    return config.get("model_type") == "bert" and named


def _refusals(config: Mapping[str, Any]) -> list[str]:
    found, kind = refused(config), config.get("position_embedding_type", "absolute")
    # "absolute" is what all of them say, and what none of them reads.
    if kind not in ("absolute", "alibi", None):
        found.append(
            f"position_embedding_type={kind!r} cannot be honoured: the published code has ALiBi and nothing else"
        )
    found += [
        f"{name}={config[name]!r} cannot be honoured: it belongs to another encoder that grew out of bert_layers.py"
        for name, neutral in _FORKS.items()
        if name in config and config[name] not in (None, neutral)
    ]
    return found


class MosaicBertSelfAttention(SelfAttention):
    """All queries, then all keys, then all values, of one projection."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, H, n, D) each."""
        query, key, value = self.Wqkv(hidden).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return query, key, value


class MosaicBertLayer(Layer):
    """Attention and the gated MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = Attention(config, MosaicBertSelfAttention)
        self.mlp = GatedMLP(config)

    def feed(self, hidden: Tensor, before: Tensor) -> Tensor:
        """The MLP, which adds and norms by itself."""
        return self.mlp(hidden)


class MosaicBertPreTrainedModel(EncoderModel):
    """What the line's models share."""

    config_class = MosaicBertConfig
    layer_class = MosaicBertLayer
    _no_split_modules = ["MosaicBertLayer"]

    refusals = staticmethod(_refusals)


class MosaicBertModel(MosaicBertPreTrainedModel, BaseEncoder):
    """The encoder of MosaicBERT, DNABERT-2 and those after them."""


class MosaicBertPredictions(Predictions):
    """Its norm keeps its epsilon, whatever `layer_norm_eps` says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transform.LayerNorm.eps = 1e-12


class MosaicBertForMaskedLM(MosaicBertPreTrainedModel, MaskedLM):
    """MosaicBERT with a head over the vocabulary."""

    base_class = MosaicBertModel
    predictions_class = MosaicBertPredictions
    _tied_weights_keys = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}


class MosaicBertForSequenceClassification(MosaicBertPreTrainedModel, SequenceClassifier):
    """MosaicBERT with a head on a text's first token."""

    base_class = MosaicBertModel


class MosaicBertForTokenClassification(MosaicBertPreTrainedModel, TokenClassifier):
    """MosaicBERT with a head on every token."""

    base_class = MosaicBertModel


_CLASSES = (
    MosaicBertModel,
    MosaicBertForMaskedLM,
    MosaicBertForSequenceClassification,
    MosaicBertForTokenClassification,
)

PUBLISHED = Published(
    name="MosaicBERT",
    claims=_claims,
    refusals=_refusals,
    config=MosaicBertConfig,
    # Under BERT's names, which the checkpoints have, and under our own, which are saved.
    classes={name: kind for kind in _CLASSES for name in (kind.__name__.removeprefix("Mosaic"), kind.__name__)},
)
