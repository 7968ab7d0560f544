# SPDX-License-Identifier: Apache-2.0
"""What a layer is told instead of an n x n bias and mask: `Sight`, made once per forward pass by `look`.

A model calls its layers with whatever masks and caches transformers allows; here they become the arguments of
`linbias.alibi_attention`. Nothing of size T x S is made unless the caller already passed one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..semantics.checks import readable

# Additive masks hide with finfo.min, -inf or -10000; anything between that and 0 is a bias, not a mask.
_HIDDEN = -1e4


class Sight(NamedTuple):
    """One forward pass as its layers see it.

    A NamedTuple, because hooks that move a layer's inputs to its device (accelerate's, for a model spread over
    several) look into tuples and would pass any other object by.
    """

    slopes: Tensor
    """(H,), float32, or float64 in a float64 model."""
    causal: bool
    """False under a 4-D mask, which says all there is to say, and where the configuration has `is_causal=False`."""
    key_mask: Tensor | None = None
    """(B, S) bool."""
    attn_mask: Tensor | None = None
    """bool, broadcastable to (B, H, T, S)."""
    query_positions: Tensor | None = None
    """(T,) or (B, T) int64; None: the queries end where the keys end."""
    key_positions: Tensor | None = None
    """(S,) or (B, S) int64; given exactly when query_positions is."""
    segments: Tensor | None = None
    """(B, T) int64: which of several sequences packed into one row a token belongs to."""
    own_bias: Tensor | None = None
    """The family's own bias of linear size, where fidelity is "checkpoint"."""
    with_weights: bool = False
    """Return the softmax too."""

    def options(self) -> dict[str, Any]:
        """As keyword arguments of `linbias.alibi_attention`."""
        return {
            "causal": self.causal,
            "key_mask": self.key_mask,
            "attn_mask": self.attn_mask,
            "query_positions": self.query_positions,
            "key_positions": self.key_positions,
            "query_segments": self.segments,
            "key_segments": self.segments,
        }


def look(
    mask: Tensor | None, cache: Any, hidden: Tensor, sight: Sight, *, counted: bool, packed: Tensor | None = None
) -> Sight:
    """The sight of a forward pass over `hidden` (B, T, width), after what `cache` holds.

    Args:
        mask: None; (B, S) with 1 = real, over cached and new tokens; or (B or 1, H or 1, T, S), bool with True =
            visible or floats of 0 and at most -10000, which replaces the causal rule.
        cache: a transformers cache, or None.
        hidden: the embedded new tokens.
        sight: the slopes, and whether tokens see only earlier ones where no 4-D mask decides.
        counted: positions count the real tokens (BLOOM, Falcon), rather than the places in storage (MPT). They
            differ only where a mask has holes.
        packed: Falcon's position_ids (B, T), which tell packed sequences apart (see `segments_of`); and that positions
            are counted under a 4-D mask on a static cache, too.

    Raises:
        TypeError, ValueError: a mask or cache that does not fit.
    """
    batch, queries = hidden.shape[:2]
    past, keys = _lengths(cache, queries)
    aligned = not isinstance(past, Tensor) and keys == past + queries
    if not aligned:
        # A static cache: its unfilled slots stand later than every query, so that the causal rule hides them.
        places = torch.arange(keys, device=hidden.device)
        sight = sight._replace(key_positions=places, query_positions=_places(past, queries, hidden))
    if mask is None:
        return sight._replace(segments=segments_of(packed, batch) if cache is None else None)
    mask = mask.to(hidden.device)
    if mask.dim() == 4:
        sight = sight._replace(causal=False, attn_mask=pair_mask(mask, queries, keys))
        if aligned or not counted or packed is None:
            return sight
        # What generate makes of a (B, S) mask where the language model around this one is not patched: the last query
        # sees every real token.
        assert sight.attn_mask is not None
        key_mask = sight.attn_mask.any(1).any(1).expand(batch, -1)
    else:
        key_mask = token_mask(mask, batch, keys, keys if aligned else None)
        if readable(key_mask) and aligned:
            if bool(key_mask.all()):
                return sight
            counted = counted and has_holes(key_mask)
    if counted:
        # Not clamped at 0: padding before a text stands before its first token, and so sees nothing.
        positions = key_mask.to(torch.int64).cumsum(-1) - 1
        queried = positions.index_select(1, _places(past, queries, hidden))
        sight = sight._replace(key_positions=positions, query_positions=queried)
    return sight._replace(key_mask=key_mask)


def segments_of(position_ids: Tensor | None, batch: int) -> Tensor | None:
    """(B, T): the number of the packed sequence a token belongs to; a new one starts where positions do not go on.

    None where every row is one sequence, if that can be told without waiting for a device.
    """
    if position_ids is None:
        return None
    segments = (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
    if readable(segments) and not bool(segments.any()):
        return None
    return segments.expand(batch, -1)


def _lengths(cache: Any, queries: int) -> tuple[int | Tensor, int]:
    """Tokens before the first query (a tensor for a static cache), and keys of the coming attention."""
    if cache is None:
        return 0, queries
    if not hasattr(cache, "get_mask_sizes") or not hasattr(cache, "layers"):
        raise TypeError(f"the cache must be a transformers Cache made of layers, got {type(cache).__name__}")
    if any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        raise ValueError(
            "sliding-window cache layers of transformers drop keys without saying where the others stand; "
            "for a window use linbias.hf.cache.AlibiCache(window=..., sinks=...)"
        )
    return cache.get_seq_length(), cache.get_mask_sizes(queries, 0)[0]


def _places(past: int | Tensor, queries: int, like: Tensor) -> Tensor:
    """(T,): where the new tokens are stored."""
    start = past.to(like.device) if isinstance(past, Tensor) else past
    return torch.arange(queries, device=like.device) + start


def has_holes(key_mask: Tensor) -> bool:
    """Whether a row has two runs of real tokens; with one, counting tokens and counting places agree on distances."""
    starts = (key_mask[:, 1:] & ~key_mask[:, :-1]).sum(1) + key_mask[:, :1].sum(1)
    return bool((starts > 1).any())


def token_mask(mask: Tensor, batch: int, keys: int, exactly: int | None) -> Tensor:
    """A 2-D mask as (B, S) bool; what a static cache has beyond it (`exactly` None) is not real."""
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] > keys or exactly not in (None, mask.shape[1]):
        raise ValueError(
            f"attention_mask must have shape ({batch}, {keys}), over cached and new tokens, or four dimensions, "
            f"got {tuple(mask.shape)}"
        )
    return torch.nn.functional.pad(mask.to(torch.bool), (0, keys - mask.shape[1]))


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
        raise ValueError(
            "a floating 4-D attention_mask must hold 0 (visible) and values of at most -10000 (hidden): anything "
            "between is a bias, which a mask cannot carry; pass booleans with True = visible"
        )
    return visible
