# SPDX-License-Identifier: Apache-2.0
"""JinaBERT: Jina embeddings v2 and their rerankers, in both layouts of their published code.

`jina-bert-implementation` (v2 small, base, de, es, zh, and reranker-v1) has a gated MLP with a norm of its own;
`jina-bert-v2-qk-post-norm` (v2 base-code) norms queries and keys over the full width, and norms twice after attention.
See docs/models/jina.md.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..mlp import RowBlocks
from .encoder import (
    Attention,
    BaseEncoder,
    EncoderConfig,
    EncoderModel,
    GatedMLP,
    Layer,
    Projection,
    SelfAttention,
    refused,
)
from .encoder_heads import MaskedLM, Predictions, SequenceClassifier, TokenClassifier
from .published import Published

_GATES = {"geglu": nn.GELU, "reglu": nn.ReLU}
_QK_POST_NORM = "qk-post-norm"


class JinaBertConfig(EncoderConfig):
    """The published fields, and which of the two layouts the weights have."""

    model_type = "linbias_jina_bert"

    position_embedding_type: str = "alibi"
    feed_forward_type: str = "original"
    """"geglu" or "reglu"; "original": an MLP without a gate, as in BERT."""
    emb_pooler: str | None = None
    """How texts become vectors: "mean", or None; the base model does not read it."""
    qk_post_norm: bool | None = None
    """The layout of base-code; None: read from where `auto_map` or `_name_or_path` lead."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.qk_post_norm is None:
            self.qk_post_norm = any(_QK_POST_NORM in home for home in _homes(kwargs))
        super().__post_init__(**kwargs)


def _homes(config: Mapping[str, Any]) -> list[str]:
    """Where a published configuration says that its code and weights come from."""
    return [str(home) for home in (*(config.get("auto_map") or {}).values(), config.get("_name_or_path") or "")]


def _claims(config: Mapping[str, Any]) -> bool:
    if config.get("model_type") == JinaBertConfig.model_type:
        return True
    names = (*_homes(config), *(config.get("architectures") or ()))
    return config.get("model_type") == "bert" and any("JinaBert" in name or "jina-bert" in name for name in names)


def _refusals(config: Mapping[str, Any]) -> list[str]:
    found, kind = refused(config), config.get("position_embedding_type", "absolute")
    if kind != "alibi":
        found.append(
            f"position_embedding_type={kind!r} cannot be honoured: without ALiBi these are BERT's own weights, which "
            f"transformers.BertModel computes with; only 'alibi' is known here"
        )
    kind = config.get("feed_forward_type", "original")
    if kind not in (*_GATES, "original"):
        found.append(f"feed_forward_type={kind!r} is not known: {', '.join(_GATES)} and original are")
    if config.get("emb_pooler") not in (None, "mean"):
        found.append(f"emb_pooler={config['emb_pooler']!r} is not known: mean, or none, is")
    if config.get("alibi_scaling", 1) not in (None, 1):
        found.append(
            f"alibi_scaling={config['alibi_scaling']!r} cannot be honoured: the published code has no such field"
        )
    return found


class JinaBertSelfAttention(SelfAttention):
    """Three projections; under `qk_post_norm` a LayerNorm over the width of queries and of keys."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.normed = config.qk_post_norm
        if self.normed:
            self.layer_norm_q, self.layer_norm_k = (nn.LayerNorm(width, eps=config.layer_norm_eps) for _ in range(2))

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, H, n, D) each."""
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        if self.normed:
            query, key = self.layer_norm_q(query), self.layer_norm_k(key)
        parts = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in (query, key, value))
        query, key, value = parts
        return query, key, value


class _UpGated(nn.Module):
    """down(up x * act(gate x)): up comes first here, and the layer adds and norms."""

    def __init__(self, config: Any, activation: type[nn.Module]) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up_gated_layer = nn.Linear(width, 2 * inner, bias=False)
        self.act = activation()
        self.down_layer = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor) -> Tensor:
        up, gate = self.up_gated_layer(hidden).chunk(2, -1)
        return self.down_layer(self.dropout(up * self.act(gate)))


class _Up(nn.Module):
    """down(act(up x))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up_layer = nn.Linear(width, inner, bias=False)
        self.act = ACT2FN[config.hidden_act]
        self.down_layer = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_layer(self.dropout(self.act(self.up_layer(hidden))))


class JinaBertUpGatedMLP(RowBlocks, _UpGated):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The gated MLP of base-code, a long text in blocks."""


class JinaBertMLP(RowBlocks, _Up):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The other MLP of base-code, a long text in blocks."""


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
    """A layer of either layout."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = Attention(config, JinaBertSelfAttention)
        self.twice = config.qk_post_norm
        gate = _GATES.get(config.feed_forward_type)
        self.gated = gate is not None
        if self.twice:
            width, eps = config.hidden_size, config.layer_norm_eps
            self.layer_norm_1, self.layer_norm_2 = (nn.LayerNorm(width, eps=eps) for _ in range(2))
            self.mlp = JinaBertMLP(config) if gate is None else JinaBertUpGatedMLP(config, gate)
        elif gate is not None:
            self.mlp = GatedMLP(config, gate)
        else:
            self.intermediate = JinaBertIntermediate(config)
            self.output = Projection(config, config.intermediate_size)

    def forward(self, hidden: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        """(b, n, width), and the weights or None."""
        attended, weights = self.attention(hidden, mask)
        if self.twice:
            # `attended` holds hidden already, and is normed.
            attended = self.layer_norm_1(hidden + attended)
        return self.feed(attended), weights

    def feed(self, hidden: Tensor) -> Tensor:
        """The MLP, and what it adds to."""
        if self.twice:
            return self.layer_norm_2(hidden + self.mlp(hidden))
        return self.mlp(hidden) if self.gated else self.output(self.intermediate(hidden), hidden)


class JinaBertPreTrainedModel(EncoderModel):
    """What JinaBERT's models share."""

    config_class = JinaBertConfig
    layer_class = JinaBertLayer
    _no_split_modules = ["JinaBertLayer"]

    refusals = staticmethod(_refusals)


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
    refusals=_refusals,
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
