# SPDX-License-Identifier: Apache-2.0
"""transformers' `DynamicCache`, appended to in place and measured: `grow_in_place`.

A `DynamicLayer` joins all its keys with the new ones for every token, so that at 8,192 tokens most of a step is
copying. `GrowingLayer` keeps spare room behind them, and beside them the bounds by which a head leaves far keys unread.
It is a `DynamicLayer` in all else: the same attributes with the same values, which every user of one can read, replace,
and hold on to.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..cache.storage import grown
from ..semantics.bounds import KeyBounds, append_norms, key_bounds
from ..semantics.checks import unwatched

# Room for an eighth more: by then copying has cost each token eight others, and pages not written to cost nothing.
_SHARE = 8
_LEAST_ROOM = 64
# Bounds of fewer keys cost more than what they save.
_LEAST_MEASURED = 512
_BLOCK = 64


class _Grown(NamedTuple):
    """What a layer shows, and the memory it lies at the start of."""

    whole: Tensor
    """(B, G, capacity, D)."""
    shown: Tensor
    """(B, G, tokens, D)."""
    tokens: int
    layer: int
    """The id of the layer that may write to `whole`: its attributes may have been copied into another's."""
    norms: Tensor | None = None
    """(B, G, ceil(capacity / 64)): bounds of the keys shown, once they were asked for."""
    version: int = 0
    """torch's count of writes to `whole` when `norms` was right."""

    def is_held(self, held: Tensor | None, layer: "GrowingLayer") -> bool:
        """Whether `layer` holds what it showed, and nobody has given that other memory (``keys.data = ...``)."""
        whole = self.whole
        return (
            held is not None
            and held is self.shown
            and self.layer == id(layer)
            and held.data_ptr() == whole.data_ptr()
            and held.shape == (*whole.shape[:2], self.tokens, whole.shape[3])
            and held.stride() == whole.stride()
        )


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` that writes new tokens behind those it has, and moves them only where room runs out.

    Tokens once written are never written over, so what `keys` and `values` were before stays what it was: where
    somebody has replaced them (cropped, reordered, selected), the next token finds tensors that are not its own, and
    copies them. What somebody writes into them is noticed too, except through ``.data`` or numpy: torch does not count
    that.
    """

    _grown: ClassVar[tuple[_Grown, _Grown] | None] = None  # on the instance after the first `update`

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B, G, T, D); returns all keys and values, as views of the memory they grow in."""
        if not (_plain(self.keys, key_states) and _plain(self.values, value_states)):
            self._let_go()
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        # Let go before anything is copied: what somebody has replaced must not lie beside its copies.
        keys, values = self._let_go()
        both = _append(self, keys, self.keys, key_states), _append(self, values, self.values, value_states)
        vars(self)["_grown"] = both
        self.keys, self.values = both[0].shown, both[1].shown
        return self.keys, self.values

    def bounds(self) -> KeyBounds | None:
        """Bounds of `keys`, kept up from token to token; None where they would not pay or nobody vouches for them."""
        if self._grown is None or not self._grown[0].is_held(self.keys, self):
            return None
        keys, values = self._grown
        tokens = keys.shown.shape[2]
        if tokens < _LEAST_MEASURED:
            return None
        if keys.norms is None or keys.version != keys.whole._version:
            norms = _with_room(key_bounds(keys.shown, _BLOCK).norms, keys.whole)
            keys = keys._replace(norms=norms, version=keys.whole._version)
            vars(self)["_grown"] = keys, values
        assert keys.norms is not None
        return KeyBounds(keys.norms[:, :, : -(-tokens // _BLOCK)], _BLOCK)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take over: not the memory, which only one layer may write to."""
        return {name: part for name, part in vars(self).items() if name != "_grown"}

    def reset(self) -> None:
        """Forget all tokens, and give their memory back."""
        self._let_go()
        super().reset()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Sequence n becomes the one at beam_idx[n]; gives the memory back, as the next two do."""
        self._let_go()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence, `repeats` times."""
        self._let_go()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at `indices`."""
        self._let_go()
        super().batch_select_indices(indices)

    def _let_go(self) -> tuple[_Grown | None, _Grown | None]:
        """The memory of keys and of values, as far as they still lie in it; the layer keeps hold of neither."""
        keys, values = vars(self).pop("_grown", None) or (None, None)
        return (
            keys if keys is not None and keys.is_held(self.keys, self) else None,
            values if values is not None and values.is_held(self.values, self) else None,
        )


def grow_in_place(cache: Cache, layer: int) -> None:
    """Let layer number `layer` of the cache append in place from now on, if it is transformers' `DynamicLayer`.

    Not under autograd, which may still need what the memory held, nor in a trace or graph, which would keep the room.
    """
    if torch.is_grad_enabled() or not unwatched() or getattr(cache, "offloading", False) or layer >= len(cache.layers):
        return
    found = cache.layers[layer]
    if type(found) is DynamicLayer:
        found.__class__ = GrowingLayer


def bounds_of(cache: Cache, layer: int, key: Tensor) -> KeyBounds | None:
    """Bounds of `key`, which the cache has just returned for layer number `layer`, if that keeps some.

    A cache of somebody's own may return other keys than those of the layer.
    """
    found = cache.layers[layer] if layer < len(cache.layers) else None
    return found.bounds() if isinstance(found, GrowingLayer) and found.keys is key else None


def _plain(held: Tensor | None, new: Tensor) -> bool:
    """Whether `new` can be written behind `held` with the result that torch.cat would have."""
    return (
        held is not None
        and held.dim() == new.dim() == 4
        and held.shape[:2] == new.shape[:2]
        and (held.shape[3], held.dtype, held.device) == (new.shape[3], new.dtype, new.device)
        and not torch.is_grad_enabled()
        and unwatched()
    )


def _append(layer: GrowingLayer, old: _Grown | None, held: Tensor, new: Tensor) -> _Grown:
    """`held` and then `new`, in the memory `held` lies in if that has room; None: it is not ours."""
    before, after = held.shape[2], held.shape[2] + new.shape[2]
    whole = None if old is None else old.whole
    # Bounds are of no use once somebody else has written to the keys.
    norms = None if old is None or old.version != old.whole._version else old.norms
    if whole is None or after > whole.shape[2]:
        whole = grown(held, 2, after + max(after // _SHARE, _LEAST_ROOM), before)
        norms = None if norms is None else _with_room(norms, whole)
    whole[:, :, before:after] = new
    if norms is not None:
        append_norms(norms, before, new, _BLOCK)
    return _Grown(whole, whole[:, :, :after], after, id(layer), norms, whole._version)


def _with_room(norms: Tensor, whole: Tensor) -> Tensor:
    """A copy of `norms` with room for all of `whole`; blocks to come are bounded by 0."""
    known = norms.shape[2]
    roomy = grown(norms, 2, -(-whole.shape[2] // _BLOCK), known)
    roomy[:, :, known:] = 0.0
    return roomy
