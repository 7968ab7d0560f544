# SPDX-License-Identifier: Apache-2.0
"""What the published ALiBi encoders share: one bidirectional pass over the real tokens of a batch, and its heads.

Their own code adds a bias and a mask of size T x T. Here neither exists: a batch becomes tokens with places
(`read_batch`), texts of different lengths lie end to end without padding where that is cheaper, and what is as wide as
the MLP exists for some rows at a time. Parameters have the names that the checkpoints have.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling as Output

from ...semantics.slopes import alibi_slopes
from ..attention import attend_in_layer
from ..mask import AttentionMask
from ..mlp import RowBlocks
from .batch import Batch, read_batch
from .published import misfits


class EncoderConfig(PreTrainedConfig):
    """The fields that the published configurations share; what names an implementation is dropped."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    classifier_dropout: float | int | None = None
    tie_word_embeddings: bool = True
    add_pooling_layer: bool = True
    """False: the checkpoint has no `pooler`, as those of a masked language model have none."""

    def __post_init__(self, **kwargs: Any) -> None:
        # auto_map leads to code that would be fetched and run, attn_implementation to one of that code's ways.
        for name in ("auto_map", "attn_implementation", "use_cache"):
            kwargs.pop(name, None)
        super().__post_init__(**kwargs)


def refused(config: Mapping[str, Any]) -> list[str]:
    """What none of these encoders honours, whatever its family."""
    wrong = {
        "is_decoder": (False, "these encoders see both ways; load it with is_decoder=False"),
        "add_cross_attention": (False, "they attend to their own tokens alone"),
        "pruned_heads": ({}, "slopes belong to the heads a model was built with; load the model before it was pruned"),
        "embedding_size": (config.get("hidden_size"), "embeddings are as wide as the layers"),
    }
    found = [
        f"{name}={config[name]!r} cannot be honoured: {reason}"
        for name, (neutral, reason) in wrong.items()
        if config.get(name) not in (None, neutral)
    ]
    return found + misfits(config, "hidden_size", "num_attention_heads", "hidden_act")


class Embeddings(nn.Module):
    """LayerNorm(word + token type); no position."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, ids: Tensor | None, embeds: Tensor | None, types: Tensor | None) -> Tensor:
        """(b, n, width) of (b, n) ids or (b, n, width) embeddings; types None: 0."""
        words = self.word_embeddings(ids) if embeds is None else embeds
        kinds = self.token_type_embeddings.weight[0] if types is None else self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(words + kinds))


class SelfAttention(nn.Module):
    """softmax(q k / sqrt(d) - m |i - j|) v in each head; a family says how its projections become heads."""

    layer_idx = 0
    """There is no cache that would ask."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.score_scale = (config.hidden_size // self.num_heads) ** -0.5

    @property
    def dropout_p(self) -> float:
        """The chance that a pair is dropped in training."""
        return self.dropout.p

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, (b, H, n, D) each."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor | None]:
        """(b, n, width), and the weights (b, H, n, n) where the mask asks for them."""
        return attend_in_layer(self, *self.heads(hidden), mask, None)


class Projection(nn.Module):
    """LayerNorm(residual + dense(x)): what comes after attention, and after an MLP without a gate."""

    def __init__(self, config: Any, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """(b, n, width)."""
        return self.LayerNorm(self.dropout(self.dense(hidden)) + residual)


class Attention(nn.Module):
    """Attention and the projection after it."""

    def __init__(self, config: Any, kind: type[SelfAttention]) -> None:
        super().__init__()
        self.self = kind(config)
        self.output = Projection(config, config.hidden_size)

    def forward(self, hidden: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor | None]:
        """(b, n, width), and the weights or None."""
        context, weights = self.self(hidden, mask)
        return self.output(context, hidden), weights


class _Gated(nn.Module):
    def __init__(self, config: Any, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gated_layers = nn.Linear(width, 2 * inner, bias=False)
        self.act = activation()
        self.wo = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gated_layers(hidden).chunk(2, -1)
        return self.layernorm(self.wo(self.dropout(self.act(gate) * up)) + hidden)


class GatedMLP(RowBlocks, _Gated):  # pyright: ignore[reportIncompatibleMethodOverride]
    """norm(x + wo(act(gate x) * (up x))): one product makes gate, then up. A long text goes through in blocks."""


class Layer(GradientCheckpointingLayer):
    """Attention, then `feed`."""

    attention: Attention

    def feed(self, hidden: Tensor, before: Tensor) -> Tensor:
        """The rest of the layer: attention made `hidden` of `before`."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor | None]:
        """(b, n, width), and the weights or None."""
        attended, weights = self.attention(hidden, mask)
        return self.feed(attended, hidden), weights


class Encoder(nn.Module):
    """The layers."""

    def __init__(self, config: Any, kind: type[Layer]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(kind(config) for _ in range(config.num_hidden_layers))


class Pooler(nn.Module):
    """tanh(dense(a text's first token))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, first: Tensor) -> Tensor:
        """(B, width)."""
        return self.activation(self.dense(first))


class EncoderModel(PreTrainedModel):
    """The base model; a family names its configuration, layer and refusals.

    Raises:
        ValueError: a configuration with an option that cannot be honoured.
    """

    base_model_prefix = "bert"
    # Counting numbers, which older versions of transformers stored.
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids$"]
    supports_gradient_checkpointing = True
    # Attention is linbias' own, whatever transformers would choose.
    _supports_sdpa = False
    layer_class: ClassVar[type[Layer]]

    @staticmethod
    def refusals(config: Mapping[str, Any]) -> list[str]:
        """What of a configuration cannot be honoured."""
        raise NotImplementedError


class BaseEncoder(EncoderModel):
    """Token vectors: `last_hidden_state` (B, T, width), 0 at padding, and `pooler_output` (B, width)."""

    def __init__(self, config: Any, add_pooling_layer: bool | None = None) -> None:
        super().__init__(config)
        check_config(self, config)
        pooled = config.add_pooling_layer if add_pooling_layer is None else add_pooling_layer
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config, self.layer_class)
        self.pooler = Pooler(config) if pooled else None
        self.post_init()

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """A checkpoint without a pooler, as of a masked language model, makes a model without: never a random one."""
        super()._adjust_missing_and_unexpected_keys(loading_info)
        names = set() if self.pooler is None else {f"pooler.{name}" for name, _ in self.pooler.named_parameters()}
        if names and names <= loading_info.missing_keys:
            loading_info.missing_keys -= names
            self.pooler, self.config.add_pooling_layer = None, False

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the word embeddings."""
        assert isinstance(value, nn.Embedding)
        self.embeddings.word_embeddings = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
        **given: Any,
    ) -> Any:
        """One pass.

        Args:
            input_ids: (B, T) integers; or, in their place, `inputs_embeds` (B, T, width).
            attention_mask: (B, T), 1 = real, 0 = padding, on any side; None: all real. Distances count places.
            token_type_ids: (B, T); None: 0.
            return_dict: False: a tuple of what is not None.
            given: output_hidden_states, output_attentions (the weights are made whole, as they are asked for).

        Raises:
            ValueError: not exactly one of ids and embeddings; shapes that differ; a mask that is none.
            TypeError: an argument that an encoder with ALiBi has no use for.
        """
        with_states, with_weights = read_options(self.config, given)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        batch = read_batch(attention_mask, tokens, packed=not with_weights)
        if token_type_ids is not None and token_type_ids.shape != tokens.shape[:2]:
            raise ValueError(f"token_type_ids must have shape {batch.shape}, got {tuple(token_type_ids.shape)}")
        hidden = self.embeddings(*(batch.take(part) for part in (input_ids, inputs_embeds, token_type_ids)))
        mask = self._mask_of(batch, hidden, with_weights)
        states: list[Tensor] = []
        shown: list[Tensor] = []
        for layer in self.encoder.layer:
            states.append(batch.restore(hidden)) if with_states else None
            hidden, weights = layer(hidden, mask)
            shown.append(weights) if with_weights else None
        hidden = batch.restore(hidden)
        pooled = None if self.pooler is None else self.pooler(batch.first(hidden))
        output = Output(
            last_hidden_state=hidden,  # pyright: ignore[reportArgumentType]  (torch's own Tensor)
            pooler_output=pooled,
            hidden_states=(*states, hidden) if with_states else None,
            attentions=tuple(shown) if with_weights else None,
        )
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output if wanted else output.to_tuple()

    def _mask_of(self, batch: Batch, hidden: Tensor, with_weights: bool) -> AttentionMask:
        # Made in each pass: a buffer of slopes would be rounded by .half(), and left empty by the meta device.
        slopes = alibi_slopes(self.config.num_attention_heads, device="cpu")
        slopes = slopes.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        mask = AttentionMask(slopes.to(hidden.device, non_blocking=True), batch.queries, batch.keys, causal=False)
        mask.with_weights = with_weights
        return mask


def check_config(model: EncoderModel, config: Any) -> None:
    """Raise for what `refusals` finds."""
    if found := model.refusals(config.to_dict()):
        raise ValueError(f"{type(model).__name__} cannot be built from this configuration: {'; '.join(found)}")


def read_options(config: Any, given: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the hidden states and the weights are asked for; anything else raises, unless it says nothing."""
    states, weights = (
        getattr(config, name) if given.get(name) is None else given[name]
        for name in ("output_hidden_states", "output_attentions")
    )
    left = {name: part for name, part in given.items() if name not in ("output_hidden_states", "output_attentions")}
    if unused := sorted(name for name, part in left.items() if part is not None and part is not False):
        raise TypeError(
            f"{', '.join(unused)} cannot be honoured: an encoder with ALiBi counts places in the text it is given, "
            f"keeps no cache and attends to nothing else; leave them out"
        )
    return bool(states), bool(weights)
