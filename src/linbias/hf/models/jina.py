# SPDX-License-Identifier: Apache-2.0
"""JinaBERT of `jina-bert-implementation`: Jina embeddings v2 (small, base, de, es, zh) and reranker-v1.

BERT's layer after ALiBi, with a gated MLP. base-code has another layout: see `jina_code`, and docs/models/jina.md.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .encoder import Attention, BaseEncoder, EncoderConfig, EncoderModel, GatedMLP, Layer, Projection, SelfAttention
from .encoder import refused as refused_of_all
from .encoder_heads import MaskedLM, Predictions, SequenceClassifier, TokenClassifier
from .published import Published

GATES: dict[str, type[nn.Module]] = {"geglu": nn.GELU, "reglu": nn.ReLU}
"""Activation by `feed_forward_type`."""
QK_POST_NORM = "qk-post-norm"
IMPLEMENTATION = "jina-bert-implementation"
"""In the names of the repositories that the configurations of base-code, and of the others, lead to."""


class JinaBertConfig(EncoderConfig):
    """The published fields."""

    model_type = "linbias_jina_bert"

    position_embedding_type: str = "alibi"
    feed_forward_type: str = "original"
    """"geglu" or "reglu"; "original": an MLP without a gate, as in BERT."""
    emb_pooler: str | None = None
    """How texts become vectors: "mean", or None; the base model does not read it."""


def is_jinas(config: Mapping[str, Any], *, code: bool) -> bool:
    """Whether a published configuration may be of base-code's layout, or of the other.

    The repository of the code tells them apart. Where it is not named, because the code lies in the folder or was left
    out, both may be meant, and the names of the tensors decide.
    """
    homes = [*(config.get("auto_map") or {}).values(), config.get("_name_or_path") or ""]
    names = [str(name) for name in (*homes, *(config.get("architectures") or ()))]
    if config.get("model_type") != "bert" or not any("JinaBert" in name or "jina-bert" in name for name in names):
        return False
    said = [mark == QK_POST_NORM for mark in (QK_POST_NORM, IMPLEMENTATION) if any(mark in name for name in names)]
    return not said or code in said


def norms_queries(names: frozenset[str]) -> bool:
    """Whether tensors are those of base-code's layout."""
    return any(".layer_norm_q." in name for name in names)


def refused(config: Mapping[str, Any]) -> list[str]:
    """What neither layout honours."""
    found, kind = refused_of_all(config), config.get("position_embedding_type", "absolute")
    if kind != "alibi":
        found.append(
            f"position_embedding_type={kind!r} cannot be honoured: without ALiBi this is BERT with positions, and only "
            f"'alibi' is known here"
        )
    kind = config.get("feed_forward_type", "original")
    if kind not in (*GATES, "original"):
        found.append(f"feed_forward_type={kind!r} is not known: {', '.join(GATES)} and original are")
    if config.get("emb_pooler") not in (None, "mean"):
        found.append(f"emb_pooler={config['emb_pooler']!r} is not known: mean, or none, is")
    if config.get("alibi_scaling", 1) not in (None, 1):
        found.append(f"alibi_scaling={config['alibi_scaling']!r} cannot be honoured: no published code has it")
    return found


def _claims(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == JinaBertConfig.model_type or is_jinas(config, code=False)


class JinaBertSelfAttention(SelfAttention):
    """Three projections."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, H, n, D) each."""
        return self.split(self.query(hidden)), self.split(self.key(hidden)), self.split(self.value(hidden))

    def split(self, part: Tensor) -> Tensor:
        """(b, n, width) as (b, H, n, D)."""
        return part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class JinaBertIntermediate(nn.Module):
    """act(dense(x))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """(b, n, inner)."""
        return self.intermediate_act_fn(self.dense(hidden))


class JinaBertLayer(Layer):
    """Attention, and an MLP with a gate or without."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = Attention(config, JinaBertSelfAttention)
        self.gated = config.feed_forward_type in GATES
        if self.gated:
            self.mlp = GatedMLP(config, GATES[config.feed_forward_type])
        else:
            self.intermediate = JinaBertIntermediate(config)
            self.output = Projection(config, config.intermediate_size)

    def feed(self, hidden: Tensor, before: Tensor) -> Tensor:
        """The MLP, which adds and norms by itself."""
        return self.mlp(hidden) if self.gated else self.output(self.intermediate(hidden), hidden)


class JinaBertPreTrainedModel(EncoderModel):
    """What JinaBERT's models share."""

    config_class = JinaBertConfig
    layer_class = JinaBertLayer
    _no_split_modules = ["JinaBertLayer"]

    refusals = staticmethod(refused)


class JinaBertModel(JinaBertPreTrainedModel, BaseEncoder):
    """The encoder of Jina embeddings v2."""


class JinaBertPredictions(Predictions):
    """Its bias is a parameter of its own, and the last layer's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))


class JinaBertForMaskedLM(JinaBertPreTrainedModel, MaskedLM):
    """JinaBERT with a head over the vocabulary."""

    base_class = JinaBertModel
    predictions_class = JinaBertPredictions
    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


class JinaBertForSequenceClassification(JinaBertPreTrainedModel, SequenceClassifier):
    """JinaBERT with a head on a text's first token: rerankers."""

    base_class = JinaBertModel


class JinaBertForTokenClassification(JinaBertPreTrainedModel, TokenClassifier):
    """JinaBERT with a head on every token."""

    base_class = JinaBertModel


PUBLISHED = Published(
    name="JinaBERT",
    claims=_claims,
    refusals=refused,
    holds=lambda names: not norms_queries(names),
    config=JinaBertConfig,
    classes={
        kind.__name__: kind
        for kind in (
            JinaBertModel,
            JinaBertForMaskedLM,
            JinaBertForSequenceClassification,
            JinaBertForTokenClassification,
        )
    },
)
