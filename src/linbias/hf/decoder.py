# SPDX-License-Identifier: Apache-2.0
"""The forward pass that all decoders here share, with an `AttentionMask` where transformers builds bias and mask.

Everything around attention stays the model's own: blocks, residuals, dropout, gradient checkpointing, outputs.
"""

import functools
import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output
from transformers.utils import logging

from .attention import attend_in_layer
from .cache import AlibiCache
from .documents import PACKING, number_documents
from .mask import AttentionMask, cache_lengths, read_mask

TESTED_VERSIONS = ("5.18", "5.24")
"""The oldest and newest transformers that the tests of this package were run with."""

# transformers 5.24 calls `cache` what was `past_key_values` before, in arguments and outputs.
CACHE = "cache" if "cache" in inspect.signature(Output).parameters else "past_key_values"
# Since the same version, blocks under gradient checkpointing keep the cache where no gradient is recorded.
_KEPT_WITHOUT_GRADIENT = CACHE == "cache"

logger = logging.get_logger(__name__)


class Patched:
    """What patched classes mix in: a model of theirs built anew, as from_pretrained does, is transformers' own."""

    # transformers' heuristic reads a class's module for attention classes and would find this one free of them.
    _can_set_attn_implementation_cached_value: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Patched it would hold unpatched parts, and be half of each.
        kinds = type(self).__mro__
        self.__class__ = next(kind for kind in kinds if not kind.__module__.startswith("linbias."))

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: its checkpoints are saved and converted as transformers' own."""
        return False


class FlatGeneration:
    """A language model whose `generate` hands 2-D masks to static caches too, not n x n ones."""

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask as it came: no more is needed, and the family counts positions in it."""
        return attention_mask


class FlatMasks(Patched, FlatGeneration):
    """`FlatGeneration` of a patched model."""


class Attending:
    """The forward of every attention layer; the family says how its projections become heads and back."""

    uses_alibi = True

    def forward(
        self: Any,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        *,
        attention_mask: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """All that the original does; `attention_mask` is an `AttentionMask`."""
        cache = kwargs.get(CACHE) if layer_past is None else layer_past
        query, key, value = self.heads(hidden_states)
        context, weights = attend_in_layer(self, query, key, value, attention_mask, cache)
        return self.project(context, residual), weights

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, H, T, D), key and value (B, G, T, D)."""
        raise NotImplementedError

    def project(self, context: Tensor, residual: Any) -> Tensor:
        """What (B, T, H * D) becomes in the layer."""
        raise NotImplementedError

    def eager_formula(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """transformers' own, its rounding included, for t query rows: (B, H, t, D), weights (B, H, t, S)."""
        raise NotImplementedError

    @property
    def score_scale(self: Any) -> float:
        """Multiplies the dot product."""
        return self.inv_norm_factor

    @property
    def dropout_p(self: Any) -> float:
        """The chance that a pair is dropped in training."""
        return self.attention_dropout.p


class Attention(Patched, Attending):
    """`Attending` of a patched layer."""


class DecoderRules:
    """What the base model of a family mixes in.

    The family says what its parts are called, and which slopes and positions hold; `decode` does the rest.
    """

    linbias_fidelity: str
    """ "exact" or "checkpoint"; on the instance while it is patched."""

    counts_tokens: ClassVar[bool] = True
    """Positions count real tokens; False: they are places in storage."""
    blocks_name: ClassVar[str] = "h"
    """The layers."""
    norm_name: ClassVar[str] = "ln_f"
    """What comes after them."""
    bias_argument: ClassVar[str | None] = "alibi"
    """What its blocks require for the bias, and here get None for; None: nothing."""

    def alibi_slopes(self) -> Tensor:
        """(H,) float32 or float64 on the CPU: what the family multiplies distances with."""
        raise NotImplementedError

    def slopes_of_pass(self, mask: Tensor | None, cache: Any, tokens: int) -> Tensor:
        """(H,) or (B, H): `alibi_slopes`, unless they depend on how long the text is by now.

        Args:
            mask: as `read_mask` takes it.
            cache: a transformers cache, or None.
            tokens: T, of the new ones.
        """
        return self.alibi_slopes()

    def eager_bias(self, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias by the family's own code, of size linear in the keys, for (B, S) real tokens."""
        raise NotImplementedError

    def embed(self, inputs_embeds: Tensor) -> Tensor:
        """What the first block receives."""
        return inputs_embeds

    def finish(self, hidden: Tensor) -> Tensor:
        """What becomes of the last block's output."""
        return getattr(self, self.norm_name)(hidden)


class Decoder(Patched, DecoderRules):
    """`DecoderRules` of a patched model."""


def forward_of(original: type[nn.Module]) -> Any:
    """`decode` with the signature of the original decoder, and the name its version of transformers gives the cache."""
    names = list(inspect.signature(original.forward).parameters)[1:]

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        named["cache"] = named.pop(CACHE, None)
        return decode(self, **named)

    if CACHE == "cache":
        # The old name keeps working with transformers' own warning until transformers removes it.
        from transformers.utils.deprecation import deprecate_kwarg

        return deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)
    return forward


def decode(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    cache: Any = None,
    **given: Any,
) -> Any:
    """A forward pass: `given` are the original's other arguments."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass exactly one of input_ids and inputs_embeds")
    if inputs_embeds is None:
        inputs_embeds = model.get_input_embeddings()(input_ids)
    assert inputs_embeds is not None
    _check_mask_is_tensor(attention_mask)
    with_weights, with_hidden, return_dict = (
        getattr(model.config, name) if given.get(name) is None else given[name]
        for name in ("output_attentions", "output_hidden_states", "return_dict")
    )
    batch, tokens = inputs_embeds.shape[:2]
    attention_mask, several = number_documents(attention_mask, (batch, tokens), given, cache)
    use_cache = _uses_cache(model, cache, given.get("use_cache"), several=several)
    if use_cache and cache is None:
        cache = DynamicCache(config=model.config)
    hidden = model.embed(inputs_embeds)
    counted_in_pairs = given.get("position_ids") is not None
    mask = _mask_of(model, attention_mask, cache, hidden, with_weights, counted_in_pairs=counted_in_pairs)
    options = {"use_cache": use_cache, "output_attentions": with_weights}
    options |= {} if model.bias_argument is None else {model.bias_argument: None}
    states: list[Tensor] = []
    shown: list[Tensor] = []
    for block in getattr(model, model.blocks_name):
        states.append(hidden) if with_hidden else None
        hidden, weights = block(hidden, layer_past=cache, attention_mask=mask, **options)
        shown.append(weights) if with_weights else None
    hidden = model.finish(hidden)
    all_states = (*states, hidden) if with_hidden else None
    all_weights = tuple(shown) if with_weights else None
    if not return_dict:
        return tuple(part for part in (hidden, cache, all_states, all_weights) if part is not None)
    return Output(last_hidden_state=hidden, hidden_states=all_states, attentions=all_weights, **{CACHE: cache})


def _mask_of(
    model: Any, mask: Tensor | None, cache: Any, hidden: Tensor, with_weights: bool, *, counted_in_pairs: bool
) -> AttentionMask:
    """What this pass means by the rules of the model's family and fidelity."""
    # Not pinned, so the copy need not be waited for: no host-device sync (on the CPU there is no copy at all).
    slopes = model.slopes_of_pass(mask, cache, hidden.shape[1])
    slopes = slopes.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    slopes = slopes.to(hidden.device, non_blocking=True)
    rules = {"causal": getattr(model.config, "is_causal", True), "counted": model.counts_tokens}
    exact = model.linbias_fidelity == "exact"
    if isinstance(cache, AlibiCache):
        if not exact:
            raise ValueError("an AlibiCache goes with fidelity='exact' only; patch with it, or use a DynamicCache")
        if with_weights:
            raise ValueError(
                "output_attentions needs every key at hand, which an AlibiCache does not keep; use DynamicCache"
            )
        return cache.read_mask(mask, hidden, slopes, layers=len(getattr(model, model.blocks_name)), **rules)
    found = read_mask(mask, cache, hidden, slopes, counted_in_pairs=counted_in_pairs, **rules)
    found.with_weights = with_weights
    if not exact:
        real = found.keys.real
        if real is None:
            keys = cache_lengths(cache, hidden.shape[1])[1]
            real = torch.ones((hidden.shape[0], keys), dtype=torch.bool, device=hidden.device)
        found.eager_bias = model.eager_bias(real.to(torch.int64), hidden.dtype)
    return found


def _check_mask_is_tensor(mask: object) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask must be a tensor or None, got {type(mask).__name__}; pass torch.as_tensor(attention_mask)"
        )


def _uses_cache(model: Any, cache: Any, asked: bool | None, *, several: bool) -> bool:
    """Whether this pass fills a cache: its own, or the one given.

    Raises:
        ValueError: a cache was given and would not be filled once a token, as whoever gave it expects. `generate` with
            use_cache=False hands the whole text in again for every token, and each pass would be added to the cache; a
            block that recomputes its activations drops the cache. `asked` None is no error: the cache is filled.
    """
    dropped = model.gradient_checkpointing and model.training
    dropped = dropped and (torch.is_grad_enabled() or not _KEPT_WITHOUT_GRADIENT)
    if cache is not None:
        if asked is False:
            raise ValueError(
                f"use_cache=False and a cache contradict each other: generate would add the whole text to the cache "
                f"for every token. Pass use_cache=True (where nothing is passed, generate takes it from the "
                f"configuration, which has {model.config.use_cache}), or no cache"
            )
        if dropped:
            raise ValueError(
                "gradient checkpointing in training mode uses no cache, so what the cache holds would not be seen: "
                "call model.eval() or model.gradient_checkpointing_disable(), or pass no cache"
            )
    if several and asked:
        raise ValueError("a cache keeps one text a row, and several documents are packed here: pass use_cache=False")
    cached = (model.config.use_cache if asked is None else asked) and not several
    if dropped and cached:
        logger.warning_once("`use_cache=True` is incompatible with gradient checkpointing: set to False")
    return cached and not dropped


def before_head(head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook of models around a patched decoder: what their forward would not hand on becomes its mask."""
    if len(args) < 2 and not any(kwargs.get(name) is not None for name in PACKING):  # noqa: PLR2004
        return None
    named = dict(zip(inspect.signature(head.forward).parameters, args, strict=False)) | kwargs
    tokens = named.get("input_ids") if named.get("inputs_embeds") is None else named["inputs_embeds"]
    if tokens is None or not isinstance(getattr(head, "base_model", None), Decoder):
        return None
    batch, count = tokens.shape[:2]
    mask, _ = number_documents(named.get("attention_mask"), (batch, count), named, named.get(CACHE))
    if mask is named.get("attention_mask"):
        return None
    return (), {name: part for name, part in named.items() if name not in PACKING} | {"attention_mask": mask}
