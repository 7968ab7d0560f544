# SPDX-License-Identifier: Apache-2.0
"""JinaBERT of `jina-bert-v2-qk-post-norm`: Jina embeddings v2 base-code.

LayerNorm on queries and on keys, over the full width; two more norms in each layer; an MLP of other names whose gate
comes second. See docs/models/jina.md.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..mlp import RowBlocks
from .encoder import Attention, BaseEncoder, EncoderModel, Layer
from .encoder_heads import MaskedLM, SequenceClassifier, TokenClassifier
from .jina import GATES, JinaBertConfig, JinaBertPredictions, JinaBertSelfAttention, is_jinas, norms_queries, refused
from .published import Published


class JinaBertCodeConfig(JinaBertConfig):
    """The published fields, which are those of `JinaBertConfig`."""

    model_type = "linbias_jina_bert_code"


def _claims(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == JinaBertCodeConfig.model_type or is_jinas(config, code=True)


class JinaBertCodeSelfAttention(JinaBertSelfAttention):
    """Three projections, and norms of two of them before they are split into heads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm_q, self.layer_norm_k = (nn.LayerNorm(width, eps=eps) for _ in range(2))

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b, H, n, D) each."""
        query, key = self.layer_norm_q(self.query(hidden)), self.layer_norm_k(self.key(hidden))
        return self.split(query), self.split(key), self.split(self.value(hidden))


class _UpGated(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up_gated_layer = nn.Linear(width, 2 * inner, bias=False)
        self.act = GATES[config.feed_forward_type]()
        self.down_layer = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor) -> Tensor:
        up, gate = self.up_gated_layer(hidden).chunk(2, -1)
        return self.down_layer(self.dropout(up * self.act(gate)))


class JinaBertCodeGatedMLP(RowBlocks, _UpGated):  # pyright: ignore[reportIncompatibleMethodOverride]
    """down(up x * act(gate x)): one product makes up, then gate. A long text goes through in blocks."""


class _Up(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.up_layer = nn.Linear(width, inner, bias=False)
        self.act = ACT2FN[config.hidden_act]
        self.down_layer = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_layer(self.dropout(self.act(self.up_layer(hidden))))


class JinaBertCodeMLP(RowBlocks, _Up):  # pyright: ignore[reportIncompatibleMethodOverride]
    """down(act(up x)). A long text goes through in blocks."""


class JinaBertCodeLayer(Layer):
    """norm(y + mlp(y)) for y = norm(x + attention(x)), where attention has added x and normed already."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention = Attention(config, JinaBertCodeSelfAttention)
        self.layer_norm_1, self.layer_norm_2 = (nn.LayerNorm(width, eps=eps) for _ in range(2))
        gated = config.feed_forward_type in GATES
        self.mlp = JinaBertCodeGatedMLP(config) if gated else JinaBertCodeMLP(config)

    def feed(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Both norms, and the MLP between them."""
        attended = self.layer_norm_1(before + hidden)
        return self.layer_norm_2(attended + self.mlp(attended))


class JinaBertCodePreTrainedModel(EncoderModel):
    """What base-code's models share."""

    config_class = JinaBertCodeConfig
    layer_class = JinaBertCodeLayer
    _no_split_modules = ["JinaBertCodeLayer"]

    refusals = staticmethod(refused)


class JinaBertCodeModel(JinaBertCodePreTrainedModel, BaseEncoder):
    """The encoder of Jina embeddings v2 base-code."""


class JinaBertCodeForMaskedLM(JinaBertCodePreTrainedModel, MaskedLM):
    """It with a head over the vocabulary."""

    base_class = JinaBertCodeModel
    predictions_class = JinaBertPredictions
    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


class JinaBertCodeForSequenceClassification(JinaBertCodePreTrainedModel, SequenceClassifier):
    """It with a head on a text's first token."""

    base_class = JinaBertCodeModel


class JinaBertCodeForTokenClassification(JinaBertCodePreTrainedModel, TokenClassifier):
    """It with a head on every token."""

    base_class = JinaBertCodeModel


_CLASSES = (
    JinaBertCodeModel,
    JinaBertCodeForMaskedLM,
    JinaBertCodeForSequenceClassification,
    JinaBertCodeForTokenClassification,
)

PUBLISHED = Published(
    name="JinaBERT code",
    claims=_claims,
    refusals=refused,
    holds=norms_queries,
    config=JinaBertCodeConfig,
    # Under JinaBERT's names, which the checkpoints have, and under our own, which are saved.
    classes={name: kind for kind in _CLASSES for name in (kind.__name__.replace("Code", ""), kind.__name__)},
)
