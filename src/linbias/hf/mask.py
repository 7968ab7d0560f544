# SPDX-License-Identifier: Apache-2.0
"""What a layer is told instead of an n x n bias and mask: an `AttentionMask`, made once a forward pass by `read_mask`.

A model calls its layers with whatever masks and caches transformers allows; here they become tokens with positions,
segments and padding, as `linbias.prepare.resolve` takes them. Nothing of size T x S is made unless the caller already
passed one.
"""

from typing import Any

import torch
from torch import Tensor

from ..semantics.checks import readable
from ..semantics.tokens import Tokens

# Additive masks hide with finfo.min, -inf or -10000; anything between that and 0 is a bias, not a mask.
_HIDDEN = -1e4
_NO_BIAS = (
    "must hold 0 (visible) and values of at most -10000 (hidden): anything between is a bias, which a mask cannot carry"
)


class AttentionMask:
    """One forward pass as its layers see it.

    Neither a tuple nor a dict nor a dataclass, on purpose: mixed precision casts whatever tensors it finds in those
    among a module's inputs (FSDP, DeepSpeed), and slopes and positions must keep their digits. Hooks that move inputs
    to another device (accelerate's) call `to`.
    """

    def __init__(
        self, slopes: Tensor, queries: Tokens, keys: Tokens, *, causal: bool, attn_mask: Tensor | None = None
    ) -> None:
        self.slopes = slopes
        """(H,) or (B, H), float32, or float64 in a float64 model."""
        self.queries = queries
        """Of the new tokens."""
        self.keys = keys
        """Of cached and new tokens; under an `AlibiCache`, which knows the cached ones, of the new."""
        self.causal = causal
        """False under a 4-D mask, which says all there is to say, and where the configuration has `is_causal=False`."""
        self.attn_mask = attn_mask
        """bool, (B or 1, H or 1, T, S)."""
        self.eager_bias: Tensor | None = None
        """The family's own bias of linear size, where fidelity is "checkpoint"."""
        self.with_weights = False
        """Return the softmax too."""

    def to(self, device: Any, **_: Any) -> "AttentionMask":
        """The same for layers on another device."""
        device = torch.device(device)
        if device == self.slopes.device:
            return self

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        sides = [Tokens(*map(moved, side))._replace(device=device) for side in (self.queries, self.keys)]
        other = AttentionMask(moved(self.slopes), *sides, causal=self.causal, attn_mask=moved(self.attn_mask))
        other.eager_bias, other.with_weights = moved(self.eager_bias), self.with_weights
        return other


def read_mask(
    mask: Tensor | None,
    cache: Any,
    hidden: Tensor,
    slopes: Tensor,
    *,
    causal: bool,
    counted: bool,
    counted_in_pairs: bool = False,
) -> AttentionMask:
    """How the layers of a pass over `hidden` (B, T, width) attend, after what `cache` holds.

    Args:
        mask: None; (B, S), see `numbers_of`, over cached and new tokens; or (B or 1, H or 1, T, S), bool with True =
            visible or floats of 0 and at most -10000, which replaces the causal rule.
        cache: a transformers cache, or None.
        hidden: the embedded new tokens.
        slopes: (H,) or (B, H).
        causal: tokens see only earlier ones, where no 4-D mask decides.
        counted: positions count the real tokens (BLOOM, Falcon), rather than the places in storage (MPT). They
            differ only where a mask has holes.
        counted_in_pairs: so they do under a 4-D mask on a static cache.

    Raises:
        ValueError: a mask that does not fit.
    """
    batch, queries = hidden.shape[:2]
    past, keys = cache_lengths(cache, queries)
    rows, columns = Tokens(queries, keys - queries, hidden.device), Tokens(keys, 0, hidden.device)
    aligned = not isinstance(past, Tensor) and keys == past + queries
    places = torch.arange(queries, device=hidden.device) + (past.to(hidden.device) if torch.is_tensor(past) else past)
    if not aligned:
        # A static cache: its unfilled slots stand later than every query, so that the causal rule hides them.
        rows, columns = rows._replace(position=places[None]), columns._replace(position=columns.places())
    real, documents, pairs = None, None, None
    if mask is not None and mask.dim() == 4:
        causal, pairs = False, pair_mask(mask.to(hidden.device), queries, keys)
        if counted_in_pairs and counted and not aligned:
            # What generate makes of a (B, S) mask where the language model around this one is not patched: the last
            # query sees every real token.
            real = pairs.any(1).any(1).expand(batch, -1)
    elif mask is not None:
        real, documents = token_mask(mask.to(hidden.device), batch, keys, keys if aligned else None)
        if readable(real) and aligned:
            counted = counted and has_holes(real)
            real = None if bool(real.all()) else real
    if real is not None and counted:
        # Not clamped at 0: padding before a text stands before its first token, and so sees nothing.
        positions = real.to(torch.int64).cumsum(-1) - 1
        rows = rows._replace(position=positions.index_select(1, places))
        columns = columns._replace(position=positions)
    if documents is not None:
        rows = rows._replace(segment=documents.index_select(1, places))
        columns = columns._replace(segment=documents)
    return AttentionMask(slopes, rows, columns._replace(real=real), causal=causal, attn_mask=pairs)


def cache_lengths(cache: Any, queries: int) -> tuple[int | Tensor, int]:
    """Tokens before the first query (a tensor for a static cache), and keys of the coming attention."""
    return (0, queries) if cache is None else (cache.get_seq_length(), cache.get_mask_sizes(queries, 0)[0])


def check_cache(cache: Any) -> None:
    """Raise for a cache that patched layers cannot attend over."""
    if not hasattr(cache, "get_mask_sizes") or not hasattr(cache, "layers"):
        raise TypeError(
            f"the cache must be a transformers Cache made of layers, got {type(cache).__name__}: the paged cache of "
            f"generate_batch (continuous batching) is not supported; call generate, with a DynamicCache, a StaticCache "
            f"or a linbias.hf.cache.AlibiCache"
        )
    if any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        raise ValueError(
            "sliding-window cache layers of transformers drop keys without saying where the others stand; "
            "for a window use linbias.hf.cache.AlibiCache(window=..., sinks=...)"
        )


def has_holes(key_mask: Tensor) -> bool:
    """Whether a row has two runs of real tokens; with one, counting tokens and counting places agree on distances."""
    starts = (key_mask[:, 1:] & ~key_mask[:, :-1]).sum(1) + key_mask[:, :1].sum(1)
    return bool((starts > 1).any())


def token_mask(mask: Tensor, batch: int, keys: int, exactly: int | None) -> tuple[Tensor, Tensor | None]:
    """A 2-D mask as (B, S) bool, and the numbers of its documents (B, S) unless they are known to be one.

    What a static cache has beyond the mask (`exactly` None) is not real.
    """
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] > keys or exactly not in (None, mask.shape[1]):
        raise ValueError(
            f"attention_mask must have shape ({batch}, {keys}), over cached and new tokens, or four dimensions, "
            f"got {tuple(mask.shape)}"
        )
    numbers = torch.nn.functional.pad(numbers_of(mask), (0, keys - mask.shape[1]))
    if numbers.dtype == torch.bool:
        return numbers, None
    several = not readable(numbers) or bool((numbers > 1).any())
    return numbers > 0, numbers if several else None


def numbers_of(mask: Tensor) -> Tensor:
    """A 2-D mask as bool, or as int64: 0 is padding, and each number above a document of its own.

    Floats are read as such numbers, or, where none is above 0, as a 4-D mask is: 0 visible, -10000 and less hidden.

    Raises:
        ValueError: values that are neither, if they can be read without waiting for a device.
    """
    if mask.dtype == torch.bool:
        return mask
    known, additive = readable(mask), None
    if mask.is_floating_point():
        additive = ~(mask > 0).any()
        if known and bool(additive) and bool(mask.numel()):
            if bool(((mask != 0) & ~(mask <= _HIDDEN)).any()):
                raise ValueError(f"a floating attention_mask without positive values {_NO_BIAS}")
            if not bool(mask.any()):
                raise ValueError(
                    "a floating attention_mask of nothing but 0 may mean all visible (additive) or all padding: pass "
                    "booleans with True = real"
                )
        elif known and bool((mask != mask.round()).any()):
            raise ValueError("an attention_mask of two dimensions must hold 0 (padding) and 1 (real), got fractions")
        mask = torch.where(additive, mask == 0, mask)
    numbers = mask.to(torch.int64)
    if known and bool((numbers < 0).any()):
        raise ValueError("an attention_mask of two dimensions must hold 0 (padding) and 1 (real), got values below 0")
    if known and bool(((numbers > 0) & (numbers < numbers.cummax(-1).values)).any()):
        raise ValueError(
            "an attention_mask that numbers packed documents must number them in their order, from 1 on, 0 for padding"
        )
    return numbers


def pair_mask(mask: Tensor, queries: int, keys: int) -> Tensor:
    """A 4-D mask as bool, True = visible."""
    if mask.shape[2] != queries or mask.shape[3] != keys:
        raise ValueError(
            f"a 4-D attention_mask must have shape (batch or 1, heads or 1, {queries}, {keys}), got {tuple(mask.shape)}"
        )
    if not mask.is_floating_point():
        return mask.to(torch.bool)
    visible = mask == 0
    if readable(mask) and bool((~visible & ~(mask <= _HIDDEN)).any()):
        raise ValueError(f"a floating 4-D attention_mask {_NO_BIAS}; pass booleans with True = visible")
    return visible
