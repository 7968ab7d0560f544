# SPDX-License-Identifier: Apache-2.0
"""How the texts of a batch lie in memory while an encoder works on them: `read_batch`.

Padding costs an encoder what a token costs. Where the mask can be read, the real tokens of all texts are laid end to
end, each text a segment: (B, T) becomes (1, N). Under a compiler it stays (B, T), and its padding is hidden.
"""

import torch
from torch import Tensor

from ...semantics.checks import unwatched
from ...semantics.tokens import Tokens
from ..mask import has_holes, numbers_of


class Batch:
    """B texts of T places, and where their real tokens are."""

    def __init__(self, shape: tuple[int, int], tokens: Tokens, real: Tensor | None, index: Tensor | None) -> None:
        self.shape = shape
        """(B, T)."""
        self.queries = tokens._replace(real=None)
        """Of the attention of every layer; so are `keys`."""
        self.keys = tokens
        self._real = real
        self._index = index

    def take(self, part: Tensor | None) -> Tensor | None:
        """(B, T, ...) as the layers see it, (b, n, ...)."""
        if part is None or self._index is None:
            return part
        return part.flatten(0, 1)[self._index][None]

    def restore(self, hidden: Tensor) -> Tensor:
        """(b, n, width) as (B, T, width), 0 at padding."""
        if self._index is None:
            return hidden if self._real is None else hidden.masked_fill(~self._real[..., None], 0.0)
        whole = hidden.new_zeros(self.shape[0] * self.shape[1], hidden.shape[2])
        return whole.index_copy(0, self._index, hidden[0]).unflatten(0, self.shape)

    def first(self, hidden: Tensor) -> Tensor:
        """(B, width): the first real token of each text of (B, T, width)."""
        if self._real is None or self.shape[1] == 0:
            return hidden[:, 0]
        return hidden[torch.arange(self.shape[0], device=hidden.device), self._real.int().argmax(1)]


def read_batch(mask: Tensor | None, tokens: Tensor, *, packed: bool) -> Batch:
    """The batch that a mask makes of ids (B, T) or embeddings (B, T, width).

    Args:
        mask: (B, T), as `numbers_of` reads it, without numbers above 1; None: every token is real.
        tokens: ids or embeddings.
        packed: it may lie end to end.

    Raises:
        ValueError: a mask of another shape, or with other values.
    """
    if tokens.dim() < 2:
        raise ValueError(f"input_ids must have shape (batch, tokens), got {tuple(tokens.shape)}")
    shape, device = (tokens.shape[0], tokens.shape[1]), tokens.device
    plain = Tokens(shape[1], 0, device)
    if mask is None:
        return Batch(shape, plain, None, None)
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask must have shape {shape}, one value a token, got {tuple(mask.shape)}: an encoder takes no "
            f"masks of pairs"
        )
    numbers = numbers_of(mask.to(device))
    real = numbers > 0 if numbers.dtype != torch.bool else numbers
    if not unwatched():
        return Batch(shape, plain._replace(real=real), real, None)
    if numbers.dtype != torch.bool and bool((numbers > 1).any()):
        raise ValueError(
            "attention_mask must hold 0 (padding) and 1 (real); give each text a row, which is packed here"
        )
    if bool(real.all()):
        return Batch(shape, plain, None, None)
    if not packed:
        return Batch(shape, plain._replace(real=real), real, None)
    index = real.flatten().nonzero().squeeze(1)
    if shape[0] == 1 and not has_holes(real):
        return Batch(shape, plain._replace(length=len(index)), real, index)
    # Places, not counts: across a hole a distance is what it was in the text.
    places, rows = (index % shape[1])[None], (index // shape[1])[None]
    return Batch(shape, Tokens(len(index), 0, device, places, rows), real, index)
