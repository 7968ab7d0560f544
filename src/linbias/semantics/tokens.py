# SPDX-License-Identifier: Apache-2.0
"""The tokens of one side of a call: where each stands, which segment it is of, its rank, and whether it is real.

What is absent is None and costs nothing: positions that are not given are consecutive, and a call without a mask or
segments has no tensor for them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_count, check_tensor
from .problem import Operands


class Tokens(NamedTuple):
    """N tokens; `b` in a shape is B or 1. A rule that orders or ranks tokens reads them here and nowhere else.

    `position` both orders tokens (causal, window) and ranks them (the bias). A scheme that ranks otherwise, as by a
    decay summed along the text, would add a coordinate of its own beside it.
    """

    length: int
    """N."""
    first: int
    """Position of the first token where `position` is None: the others follow one by one."""
    device: torch.device
    position: Tensor | None = None
    """(b, N) int64; (b, N, C) in the accumulating dtype under a metric."""
    segment: Tensor | None = None
    """(b, N) int64; a query sees only keys of its own."""
    rank: Tensor | None = None
    """(b, N) int64, keys only: how many real ones of its segment come before it."""
    real: Tensor | None = None
    """(b, N) bool, keys only; False: it does not exist."""
    unbiased: Tensor | None = None
    """(b, N) bool; True: it neither gives nor receives bias."""
    counted: bool = False
    """`position` counts tokens, where it was not given, so that no difference of positions leaves int64."""

    @staticmethod
    def queries_of(operands: Operands) -> "Tokens":
        """The query side of a call."""
        queries, keys, device = operands.query.shape[2], operands.key.shape[2], operands.query.device
        return Tokens(
            queries,
            keys - queries,
            device,
            operands.query_positions,
            operands.query_segments,
            unbiased=operands.query_unbiased,
        )

    @staticmethod
    def keys_of(operands: Operands) -> "Tokens":
        """The key side of a call."""
        return Tokens(
            operands.key.shape[2],
            0,
            operands.key.device,
            operands.key_positions,
            operands.key_segments,
            operands.key_ranks,
            operands.key_mask,
            operands.key_unbiased,
        )

    @property
    def shared(self) -> bool:
        """Whether all batch items have the same tokens."""
        return all(field.shape[0] == 1 for field in self if isinstance(field, Tensor))

    @property
    def plain(self) -> bool:
        """Whether tokens differ in their place alone."""
        return not any(isinstance(field, Tensor) for field in self)

    def places(self) -> Tensor:
        """(b, N[, C]): the positions, written out where they are not given."""
        if self.position is not None:
            return self.position
        return torch.arange(self.first, self.first + self.length, device=self.device)[None]

    def part(self, span: slice | Tensor) -> "Tokens":
        """The tokens at `span`: a range, or numbers (n,)."""
        if isinstance(span, slice):
            position = None if self.position is None else self.position[:, span]
            part = self._replace(length=span.stop - span.start, first=self.first + span.start, position=position)
        else:
            part = self._placed(len(span), self.places()[:, span])
        return part._each(lambda tensor: tensor[:, span])

    def stretches(self, items: Tensor, starts: Tensor, length: int) -> "Tokens":
        """n stretches of `length` tokens, (n, length) each: of batch item items[n], from starts[n] on."""
        index = starts[:, None] + torch.arange(length, device=self.device)

        def chosen(tensor: Tensor) -> Tensor:
            return tensor[(items % tensor.shape[0])[:, None], index]

        position = index + self.first if self.position is None else chosen(self.position)
        return self._placed(length, position)._each(chosen)

    def _placed(self, length: int, position: Tensor) -> "Tokens":
        counted = self.counted or self.position is None
        return self._replace(length=length, first=0, position=position, counted=counted)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        """All but the positions changed alike."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return self._replace(
            segment=changed(self.segment),
            rank=changed(self.rank),
            real=changed(self.real),
            unbiased=changed(self.unbiased),
        )


def grid_positions(height: int, width: int, *, device: torch.device | str | None = None) -> Tensor:
    """(row, column) of each cell of a grid, row by row, for ``metric="euclidean"`` or ``"manhattan"``.

    Args:
        height, width: cells, >= 0.
        device: where the result lives.

    Returns:
        (height * width, 2) int64.

    >>> grid_positions(2, 3).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    """
    rows = torch.arange(check_count("height", height), device=device)
    columns = torch.arange(check_count("width", width), device=device)
    return torch.cartesian_prod(rows, columns).reshape(-1, 2)


def positions_from_mask(mask: Tensor) -> Tensor:
    """``max(cumsum(mask) - 1, 0)``: the position of each real token of a padded batch, wherever the padding is.

    Args:
        mask: (..., T), bool or integers of 0 and 1; 1 = real.

    Returns:
        (..., T) int64. A padded place repeats the position before it (0 at the start).

    >>> positions_from_mask(torch.tensor([0, 0, 1, 1, 1])).tolist()
    [0, 0, 0, 1, 2]
    """
    check_tensor("mask", mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"mask must be bool or integers with 1 = real, got {mask.dtype}")
    return (mask.to(torch.int64).cumsum(-1) - 1).clamp_min(0)


def unbiased_marks(unbiased: int, queries: int, keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """(1, T) and (1, S) bool marks of the tokens that neither receive nor give bias; None when there are none."""
    if unbiased == 0:
        return None, None
    query_index = torch.arange(queries, device=device) + (keys - queries)
    return (query_index < unbiased)[None], (torch.arange(keys, device=device) < unbiased)[None]


def key_ranks(keys: int, key_mask: Tensor | None, key_segments: Tensor | None, device: torch.device) -> Tensor:
    """(b, S) int64: how many real keys of the same segment come before each key, in storage order."""
    if key_mask is None:
        real = torch.ones((1, keys), dtype=torch.int64, device=device)
    else:
        real = key_mask.to(torch.int64)
    if key_segments is None:
        return real.cumsum(1) - real
    real, segments = torch.broadcast_tensors(real, key_segments)
    ordered_segments, order = torch.sort(segments, dim=1, stable=True)
    ordered_real = real.gather(1, order)
    before = ordered_real.cumsum(1) - ordered_real
    # The count at a segment's first key is what earlier segments left; counts never fall, so cummax carries it on.
    starts = torch.ones_like(ordered_segments, dtype=torch.bool)
    starts[:, 1:] = ordered_segments[:, 1:] != ordered_segments[:, :-1]
    carried = torch.where(starts, before, 0).cummax(1).values if keys else before
    return torch.empty_like(before).scatter(1, order, before - carried)
