# SPDX-License-Identifier: Apache-2.0
"""The forward pass that BLOOM, MPT and Falcon share, with a `Sight` where transformers builds a bias and a mask.

Everything around attention stays transformers' own: blocks, residuals, dropout, gradient checkpointing, outputs.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output
from transformers.utils import logging

from .cache import AlibiCache
from .sight import Sight, look

TESTED_VERSIONS = ("5.18", "5.24")
"""The oldest and newest transformers that the tests of this package were run with. A patch release of them is taken
where its sources are the known ones."""

# transformers 5.24 calls `cache` what was `past_key_values` before, in arguments and outputs.
CACHE = "cache" if "cache" in inspect.signature(Output).parameters else "past_key_values"

logger = logging.get_logger(__name__)


class StillTransformers:
    """What transformers asks the class of a model, answered as before the patch."""

    # Its heuristic reads a class's module for attention classes and would find this one free of them.
    _can_set_attn_implementation_cached_value: ClassVar[bool] = False

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: its checkpoints are saved and converted as transformers' own."""
        return False


class MaskStaysFlat(StillTransformers):
    """A language model whose `generate` hands 2-D masks to static caches too, not n x n ones."""

    def create_masks_for_generate(self, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask as it came: a `Sight` needs no more, and the family counts positions in it."""
        return attention_mask


class Decoder(StillTransformers):
    """What the family's patched base model mixes in.

    The family says how to embed, what its blocks are, and which slopes and positions hold; `decode` does the rest.
    """

    linbias_fidelity: str
    """On the instance while it is patched: "exact" or "checkpoint"."""

    counts_tokens: ClassVar[bool]
    """Positions count real tokens; False: they are places in storage."""

    def alibi_slopes(self) -> Tensor:
        """(H,) float32 or float64 on the CPU: what the family multiplies distances with."""
        raise NotImplementedError

    def own_bias(self, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias by the family's own code, of size linear in the keys, for (B, S) real tokens."""
        raise NotImplementedError

    def embed(self, inputs_embeds: Tensor) -> Tensor:
        """What the first block receives."""
        return inputs_embeds

    def layer_stack(self) -> Iterable[nn.Module]:
        """The layers in order."""
        raise NotImplementedError

    def last_norm(self, hidden: Tensor) -> Tensor:
        """After the last block."""
        raise NotImplementedError

    def block_arguments(self, sight: Sight) -> dict[str, Any]:
        """How this family's blocks take a sight: in place of the mask they hand through to attention."""
        return {"attention_mask": sight}


def decode(
    model: Any,
    input_ids: Tensor | None,
    cache: Any,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    *,
    position_ids: Tensor | None = None,
    **flags: bool | None,
) -> Any:
    """The forward pass of `model`, a `Decoder`; arguments and result as transformers has them."""
    use_cache, with_weights, with_hidden, return_dict = _resolve(model, **flags)
    if cache is not None:
        _check_cache_is_used(model, flags["use_cache"])
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass exactly one of input_ids and inputs_embeds")
    if inputs_embeds is None:
        inputs_embeds = model.get_input_embeddings()(input_ids)
    if use_cache and cache is None:
        cache = DynamicCache(config=model.config)
    hidden = model.embed(inputs_embeds)
    if with_weights and isinstance(cache, AlibiCache):
        raise ValueError(
            "output_attentions needs every key at hand, which an AlibiCache does not keep; use DynamicCache"
        )
    _check_mask_is_tensor(attention_mask)
    sight = see(model, attention_mask, cache, hidden, position_ids)._replace(with_weights=with_weights)
    arguments = model.block_arguments(sight)
    states: list[Tensor] = []
    shown: list[Tensor] = []
    for block in model.layer_stack():
        states.append(hidden) if with_hidden else None
        hidden, weights = block(
            hidden, layer_past=cache, use_cache=use_cache, output_attentions=with_weights, **arguments
        )
        shown.append(weights) if with_weights else None
    hidden = model.last_norm(hidden)
    all_states = (*states, hidden) if with_hidden else None
    all_weights = tuple(shown) if with_weights else None
    if not return_dict:
        return tuple(part for part in (hidden, cache, all_states, all_weights) if part is not None)
    return Output(last_hidden_state=hidden, hidden_states=all_states, attentions=all_weights, **{CACHE: cache})


def see(model: Any, attention_mask: Tensor | None, cache: Any, hidden: Tensor, position_ids: Tensor | None) -> Sight:
    """The sight of this pass by the rules of the model's family and fidelity."""
    # Not pinned, so the copy need not be waited for: no host-device sync (on the CPU there is no copy at all).
    slopes = model.alibi_slopes().to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    sight = Sight(slopes.to(hidden.device, non_blocking=True), getattr(model.config, "is_causal", True))
    exact = model.linbias_fidelity == "exact"
    if isinstance(cache, AlibiCache):
        if not exact:
            raise ValueError("an AlibiCache goes with fidelity='exact' only; patch with it, or use a DynamicCache")
        layers = sum(1 for _ in model.layer_stack())
        return cache.look(attention_mask, hidden, sight, counted=model.counts_tokens, layers=layers)
    sight = look(attention_mask, cache, hidden, sight, counted=model.counts_tokens, packed=position_ids)
    if exact:
        return sight
    if sight.key_mask is not None:
        real = sight.key_mask.to(torch.int64)
    else:
        keys = hidden.shape[1] if cache is None else cache.get_mask_sizes(hidden.shape[1], 0)[0]
        real = torch.ones((hidden.shape[0], keys), dtype=torch.int64, device=hidden.device)
    return sight._replace(own_bias=model.own_bias(real, hidden.dtype))


def _check_mask_is_tensor(mask: object) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask must be a tensor or None, got {type(mask).__name__}; pass torch.as_tensor(attention_mask)"
        )


def _check_cache_is_used(model: Any, use_cache: bool | None) -> None:
    """Raise where a cache was given and would not be filled once a token, as whoever gave it expects.

    `generate` with use_cache=False hands the whole text in again for every token, and each pass would be added to the
    cache; a block that recomputes its activations drops the cache. None is not an error: the cache is filled.
    """
    if use_cache is False:
        raise ValueError(
            f"use_cache=False and a cache contradict each other: generate would add the whole text to the cache for "
            f"every token. Pass use_cache=True (where nothing is passed, generate takes it from the configuration, "
            f"which has {model.config.use_cache}), or no cache"
        )
    if model.gradient_checkpointing and model.training:
        raise ValueError(
            "gradient checkpointing in training mode uses no cache, so what the cache holds would not be seen: call "
            "model.eval() or model.gradient_checkpointing_disable(), or pass no cache"
        )


def _resolve(
    model: Any,
    use_cache: bool | None,
    output_attentions: bool | None,
    output_hidden_states: bool | None,
    return_dict: bool | None,
) -> tuple[bool, bool, bool, bool]:
    """The flags, with the configuration's where none is given."""
    config = model.config

    def either(given: bool | None, default: bool) -> bool:
        return default if given is None else given

    cached = either(use_cache, config.use_cache)
    if model.gradient_checkpointing and model.training and cached:
        logger.warning_once("`use_cache=True` is incompatible with gradient checkpointing: set to False")
        cached = False
    return (
        cached,
        either(output_attentions, config.output_attentions),
        either(output_hidden_states, config.output_hidden_states),
        either(return_dict, config.return_dict),
    )


def takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward(self, input_ids, cache, ...)` under the name this version of transformers gives the cache.

    Where that is `cache`, the old name keeps working with transformers' own warning until transformers removes it.
    """
    if CACHE == "cache":
        from transformers.utils.deprecation import deprecate_kwarg

        return deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)
    return _renamed(forward)


def _renamed(forward: Callable[..., Any]) -> Callable[..., Any]:
    import functools

    signature = inspect.signature(forward)
    names = {"cache": "past_key_values"}
    parameters = [part.replace(name=names.get(part.name, part.name)) for part in signature.parameters.values()]

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        return forward(*args, **kwargs)

    renamed.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
    return renamed
