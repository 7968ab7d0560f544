# SPDX-License-Identifier: Apache-2.0
"""What decoders of our own share: blocks, a base model on `linbias.hf.decoder.decode`, a language model around it.

A family says what its parts are called, how its layers make heads, and what its scales are. Caches, masks, packed
documents, gradient checkpointing and outputs are those of patched models, because the forward pass is the same.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions as Output

from ..decoder import CACHE, Attending, DecoderRules, FlatGeneration, decode
from ..documents import PACKING
from ..mask import check_cache

# What transformers' collators give beside boundaries; the boundaries say it already.
_LENGTHS = ("max_length_q", "max_length_k")


class Block(GradientCheckpointingLayer):
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x)))."""

    parts: ClassVar[tuple[str, str, str, str]] = ("ln_1", "attn", "ln_2", "mlp")
    """Norm, attention, norm and MLP, as the checkpoint spells them."""

    def __init__(self, parts: Iterable[nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        for name, part in zip(self.parts, parts, strict=True):
            self.add_module(name, part)
        self.dropout_p = dropout

    def forward(self, hidden: Tensor, *, attention_mask: Any, layer_past: Any = None, **_: Any) -> Any:
        """(B, T, width), and the softmax weights where the mask asks for them."""
        first, attention, second, mlp = (getattr(self, name) for name in self.parts)
        mixed, weights = attention(first(hidden), attention_mask=attention_mask, layer_past=layer_past)
        hidden = hidden + F.dropout(mixed, self.dropout_p, self.training)
        return hidden + F.dropout(mlp(second(hidden)), self.dropout_p, self.training), weights


class SelfAttention(Attending, nn.Module):
    """The attention of a layer; scale and dropout are numbers."""

    def __init__(self, layer: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer_idx, self._scale, self._dropout = layer, scale, dropout

    @property
    def score_scale(self) -> float:
        """Multiplies the dot product."""
        return self._scale

    @property
    def dropout_p(self) -> float:
        """The chance that a pair is dropped in training."""
        return self._dropout


def split_heads(mixed: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, (H + 2 G) * D), queries before keys before values, as (B, H, T, D) and twice (B, G, T, D)."""
    sizes = (heads, groups, groups)
    query, key, value = mixed.unflatten(2, (sum(sizes), -1)).transpose(1, 2).split(sizes, 1)
    return query, key, value


class DecoderModel(DecoderRules, PreTrainedModel):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The base model of a family."""

    linbias_fidelity = "exact"
    counts_tokens = False
    bias_argument = None
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _input_embed_layer = "wte"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        **options: Any,
    ) -> Any:
        """Hidden states, and what else is asked for.

        Args:
            input_ids: (B, T).
            attention_mask: None; (B, S) over cached and new tokens, 0 for padding and 1 or the number of a document
                for tokens; or four dimensions, True = visible.
            inputs_embeds: (B, T, width) instead of input_ids.
            cache: a transformers cache, or a `linbias.hf.cache.AlibiCache`; ``past_key_values`` is its older name.
            options: ``use_cache``, ``output_attentions``, ``output_hidden_states``, ``return_dict`` as everywhere in
                transformers; and ``position_ids`` that restart, ``cu_seq_lens_q``, ``cu_seq_lens_k`` or ``seq_idx``:
                several documents in a row, each by itself (``max_length_q`` and ``max_length_k`` beside them add
                nothing).

        Raises:
            TypeError, ValueError: arguments that do not fit, or that are none.
        """
        cache = _one_cache(cache, options)
        if cache is not None:
            # Before names: those that come with a paged cache are not what is wrong.
            check_cache(cache)
        _check_names(type(self).__name__, options)
        for name in _LENGTHS:
            options.pop(name, None)
        return decode(self, input_ids, attention_mask, inputs_embeds, cache, **options)


class CausalModel(FlatGeneration, PreTrainedModel, GenerationMixin):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The language model around a base model, which it keeps under `base_model_prefix`; its head is `lm_head`."""

    supports_gradient_checkpointing = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # transformers reads it off the class's name, which not every family chose for that.
        self.loss_type = "ForCausalLM"

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cache: Any = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> Any:
        """Logits (B, T, vocabulary), and the loss of `labels`, which are shifted here.

        Args:
            input_ids, attention_mask, inputs_embeds, cache: as the base model's.
            labels: (B, T), -100 where none.
            logits_to_keep: the last n tokens only, or the tokens at these places; 0: all.
            options: as the base model's, and ``num_items_in_batch`` for the loss.

        Raises:
            TypeError, ValueError: as the base model.
        """
        counted = {name: options.pop(name) for name in ("num_items_in_batch",) if name in options}
        asked = options.pop("return_dict", None)
        as_tuple = not (self.config.return_dict if asked is None else asked)
        found = self.base_model(input_ids, attention_mask, inputs_embeds, cache, return_dict=True, **options)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits_of(found.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_of(logits, labels, counted)
        shown: dict[str, Any] = {CACHE: getattr(found, CACHE)}
        shown |= {"hidden_states": found.hidden_states, "attentions": found.attentions}
        out = Output(loss=loss, logits=logits, **shown)
        return out.to_tuple() if as_tuple else out

    def logits_of(self, hidden: Tensor) -> Tensor:
        """(B, T, vocabulary), scaled as the family has it."""
        return self.lm_head(hidden)

    def loss_of(self, logits: Tensor, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Cross-entropy of the next token."""
        loss: Any = self.loss_function
        return loss(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)


def refuse(family: str, reasons: list[str]) -> None:
    """Raise what a configuration asks for and cannot have.

    Raises:
        ValueError: there are any.
    """
    if reasons:
        raise ValueError(f"cannot build this {family} model: " + "; ".join(reasons))


def _one_cache(cache: Any, more: dict[str, Any]) -> Any:
    older = more.pop("past_key_values", None)
    if cache is not None and older is not None:
        raise ValueError("cache and past_key_values are two names of one argument: pass one of them")
    return older if cache is None else cache


def _check_names(model: str, given: Mapping[str, Any]) -> None:
    known = (*PACKING, *_LENGTHS, "use_cache", "output_attentions", "output_hidden_states", "return_dict")
    strange = sorted(name for name, value in given.items() if name not in known and value is not None)
    if strange:
        raise TypeError(
            f"{model} takes no {', '.join(strange)}: what is not computed is not accepted; packed documents are told "
            f"by {', '.join(PACKING)}"
        )
