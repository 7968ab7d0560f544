# SPDX-License-Identifier: Apache-2.0
"""transformers' `DynamicCache`, appended to in place: `grow_in_place`.

A `DynamicLayer` joins all its keys with the new ones for every token, so that at 8,192 tokens most of a step is
copying. `GrowingLayer` keeps spare room behind them. It is a `DynamicLayer` in all else: the same attributes with the
same values, which every user of one can read, replace, and hold on to.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..checks import unwatched

# Room for an eighth more: by then copying has cost each token eight others, and pages not written to cost nothing.
_SHARE = 8
_LEAST_ROOM = 64


class _Grown(NamedTuple):
    """What a layer shows, and the memory it lies at the start of."""

    whole: Tensor
    """(B, G, capacity, D)."""
    shown: Tensor
    """(B, G, tokens, D)."""


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` that writes new tokens behind those it has, and moves them only where room runs out.

    Tokens once written are never written over, so what `keys` and `values` were before stays what it was: where
    somebody has replaced them (cropped, reordered, selected), the next token finds tensors that are not its own, and
    copies them.
    """

    _grown: ClassVar[tuple[_Grown, _Grown] | None] = None  # on the instance after the first `update`

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B, G, T, D); returns all keys and values, as views of the memory they grow in."""
        if not (_plain(self.keys, key_states) and _plain(self.values, value_states)):
            vars(self).pop("_grown", None)
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None and self.values is not None
        keys, values = self._grown or (None, None)
        grown = _append(keys, self.keys, key_states), _append(values, self.values, value_states)
        vars(self)["_grown"] = grown
        self.keys, self.values = grown[0].shown, grown[1].shown
        return self.keys, self.values

    def reset(self) -> None:
        """Forget all tokens, and give their memory back."""
        vars(self).pop("_grown", None)
        super().reset()


def grow_in_place(cache: Cache, layer: int) -> None:
    """Let layer number `layer` of the cache append in place from now on, if it is transformers' `DynamicLayer`.

    Not under autograd, which may still need what the memory held, nor in a trace or graph, which would keep the room.
    """
    if torch.is_grad_enabled() or not unwatched() or getattr(cache, "offloading", False) or layer >= len(cache.layers):
        return
    found = cache.layers[layer]
    if type(found) is DynamicLayer:
        found.__class__ = GrowingLayer


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


def _append(grown: _Grown | None, held: Tensor, new: Tensor) -> _Grown:
    """`held` and then `new`, in the memory `held` lies in if that is ours and has room."""
    before, after = held.shape[2], held.shape[2] + new.shape[2]
    usable = (
        grown is not None
        and grown.shown is held
        and after <= grown.whole.shape[2]
        # A tensor made in inference mode must not be written to outside of it.
        and grown.whole.is_inference() <= torch.is_inference_mode_enabled()
    )
    if usable:
        assert grown is not None
        whole = grown.whole
    else:
        capacity = after + max(after // _SHARE, _LEAST_ROOM)
        whole = held.new_empty((*held.shape[:2], capacity, held.shape[3]))
        whole[:, :, :before] = held
    whole[:, :, before:after] = new
    return _Grown(whole, whole[:, :, :after])
