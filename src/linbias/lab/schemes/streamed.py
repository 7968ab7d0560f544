# SPDX-License-Identifier: Apache-2.0
"""A scheme as a cache with a window and sinks runs it, in one pass over the whole text."""

import torch
from torch import Tensor

from ... import alibi_attention, merge
from .alibi import Alibi
from .base import Positions, Sinusoidal
from .rotary import Rotary


class Streamed(Positions):
    """Queries see `window` keys, their own included, and the text's first `sinks`.

    With `cached`, a sink's distance is counted in what is kept: that of a query from sink 0 is at most
    window + sinks - 1. Else it is counted in the text. Keys in the window have the same distance either way.

    Reference: Xiao et al., https://arxiv.org/abs/2309.17453, section 3.2.
    """

    def __init__(self, base: Positions, window: int, sinks: int, *, cached: bool) -> None:
        """`base` must pass `streams`."""
        super().__init__()
        self.base, self.window, self.sinks, self.cached = base, window, sinks, cached

    def embed(self, hidden_BTC: Tensor) -> Tensor:
        """Return the base's embeddings."""
        return self.base.embed(hidden_BTC)

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        """Return causal attention to the window and the sinks."""
        length, sinks = query_BHTD.shape[-2], min(self.sinks, query_BHTD.shape[-2])
        places, window = torch.arange(length), (self.window - 1, 0)
        slopes = self._slopes(length, query_BHTD)
        query, key = self._turned(query_BHTD, places, length), self._turned(key_BHTD, places, length)
        if not self.cached:
            return alibi_attention(query, key, value_BHTD, slopes, causal=True, window=window, sinks=sinks)
        kept = places.clamp(max=self.window + sinks - 1)
        near = _part(query, key[:, :, sinks:], value_BHTD[:, :, sinks:], slopes, places, places[sinks:], window)
        moved = self._turned(query_BHTD, kept, length)
        far = _part(moved, key[:, :, :sinks], value_BHTD[:, :, :sinks], slopes, kept, places[:sinks], None)
        return merge(*near, *far)[0]

    def _slopes(self, length: int, query_BHTD: Tensor) -> Tensor:
        if isinstance(self.base, Alibi):
            return self.base.slopes_at(length, query_BHTD.device)
        return torch.zeros(query_BHTD.shape[1], device=query_BHTD.device)

    def _turned(self, x_BHTD: Tensor, places: Tensor, length: int) -> Tensor:
        return self.base.turned(x_BHTD, places, length) if isinstance(self.base, Rotary) else x_BHTD


def streams(base: Positions) -> str | None:
    """Return why a scheme cannot be `Streamed`, None if it can."""
    if isinstance(base, Alibi) and base.window is not None:
        return "it has a window of its own"
    if isinstance(base, Alibi | Rotary | Sinusoidal) or type(base) is Positions:
        return None
    return "only ALiBi, RoPE, sinusoidal and no positions run with a window and sinks"


def _part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    query_places: Tensor,
    key_places: Tensor,
    window: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    out, aux = alibi_attention(
        query,
        key,
        value,
        slopes,
        causal=True,
        window=window,
        query_positions=query_places.to(query.device),
        key_positions=key_places.to(query.device),
        return_aux=True,
    )
    return out, aux.lse
