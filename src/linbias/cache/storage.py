# SPDX-License-Identifier: Apache-2.0
"""Where a cache keeps its keys and values: `Slots`, one stretch of memory a sequence; see `pages` for the other way.

A storage gives every sequence slots numbered from 0 and knows nothing of text or masks; `layout.Layout` says which
token is in which slot. It keeps an upper bound of the key norms of each block, so that attention can skip a block
without reading it. A slot that no token was written to may hold anything.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..semantics.bounds import KeyBounds, append_norms, key_bounds
from ..semantics.problem import accumulating_dtype

Counts = int | Tensor
"""One number for all sequences, known on the host, or (b,) int64 on the device, b = B or 1."""


_LEAST_MEASURED = 512
"""For one query, bounds of fewer keys cost more than they save."""


class Kept(NamedTuple):
    """What a storage gives attention to read."""

    key: Tensor
    """(B, G, end, D) or, with a table, pages (P, G, page, D)."""
    value: Tensor
    bounds: KeyBounds | None
    """None where they do not pay."""
    table: Tensor | None = None
    """(B, n) int64: see `Operands.block_table`."""


class Evicted(NamedTuple):
    """What an eviction did."""

    lost: Counts
    """Slots that each sequence gave up, () or (b,)."""
    head: int
    """Slots before the gap."""
    end: int
    """Slots in use now, at most."""


def unfilled(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory taken outside inference mode, so that a cache filled inside it can be used outside."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def grown(old: Tensor, dim: int, size: int, used: int) -> Tensor:
    """A tensor of `size` along `dim` that starts with the first `used` of `old`."""
    new = unfilled(old, *old.shape[:dim], size, *old.shape[dim + 1 :])
    new.narrow(dim, 0, used).copy_(old.narrow(dim, 0, used))
    return new


def real_norms(key: Tensor, real: Tensor | None) -> Tensor:
    """(B, G, T) upper bounds of single keys; 0 for padding."""
    norms = key_bounds(key, 1).norms
    return norms if real is None else torch.where(real[:, None], norms, 0.0)


class Slots:
    """One stretch of slots a sequence: reading is a view, and writing to every sequence alike is a copy.

    B sequences, G heads, n slots: key (B, G, n, D), value (B, G, n, V), norms (B, G, ceil(n / block)). What
    `write` puts in is measured when its bounds are asked for.
    """

    def __init__(self, key: Tensor, value: Tensor, room: int, block: int, limit: int | None = None) -> None:
        """Take room for `room` slots a sequence; growing ahead of need stops at `limit`."""
        batch, heads, _, dim = key.shape
        self.sizes = batch, heads
        self.block, self.limit = block, limit
        self.key = unfilled(key, batch, heads, room, dim)
        self.value = unfilled(value, batch, heads, room, value.shape[3])
        self.norms = unfilled(key, batch, heads, -(-room // block), dtype=accumulating_dtype(key.dtype)).zero_()
        self.positions: Tensor | None = None
        """Positions of the tokens, where they are not their places in the text."""
        self._written = self._measured = 0
        """Slots that `write` filled, and those of them that `norms` account for; `scatter` leaves none unmeasured."""

    def reserve(self, end: int, tokens: int, real: Tensor | None) -> None:
        """Make room for `tokens` more, of which `real` (b, tokens) stay; no sequence holds more than `end` before.

        Grow by half at least, so that n appended tokens cost O(n) copies.
        """
        room = self.key.shape[2]
        if end + tokens <= room:
            return
        ahead = room + room // 2 if self.limit is None else min(room + room // 2, self.limit)
        room = max(end + tokens, ahead)
        self.key, self.value = grown(self.key, 2, room, end), grown(self.value, 2, room, end)
        self._bound(self.norms, room)
        if self.positions is not None:
            self.positions = grown(self.positions, 1, room, end)

    def _bound(self, norms: Tensor, room: int) -> None:
        """Keep `norms` with room for `room` slots; blocks to come are bounded by 0."""
        self.norms = unfilled(norms, *norms.shape[:2], -(-room // self.block)).zero_()
        self.norms[:, :, : norms.shape[2]] = norms

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Put (B, G, T, .) at slots start, start + 1, ... of every sequence."""
        tokens = key.shape[2]
        self.key.narrow(2, start, tokens).copy_(key)
        self.value.narrow(2, start, tokens).copy_(value)
        self._written = start + tokens

    def _measure(self) -> None:
        if self._measured < self._written:
            append_norms(self.norms, self._measured, self.key[:, :, self._measured : self._written], self.block)
            self._measured = self._written

    def scatter(self, slots: Tensor, real: Tensor | None, key: Tensor, value: Tensor, positions: Tensor | None) -> None:
        """Put (B, G, T, .) at `slots` (b, T); what is not `real` (b, T) may be written anywhere nobody reads."""
        self._measure()
        if slots.shape[0] == 1:
            self.key.index_copy_(2, slots[0], key)
            self.value.index_copy_(2, slots[0], value)
        else:
            rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
            self.key[rows, :, slots] = key.transpose(1, 2)
            self.value[rows, :, slots] = value.transpose(1, 2)
        norms = real_norms(key, real)
        self.norms.scatter_reduce_(2, (slots // self.block)[:, None].expand_as(norms), norms, "amax")
        if self.positions is not None and positions is not None:
            rows, places = slots.expand(key.shape[0], -1), positions.expand(key.shape[0], -1)
            self.positions.scatter_(1, rows, places)

    def read(self, end: int, rows: int) -> Kept:
        """Keys and values of the first `end` slots and their bounds, if they pay for `rows` queries, as views."""
        bounds = None
        if rows > 1 or end >= _LEAST_MEASURED or self._measured == self._written:
            self._measure()
            bounds = KeyBounds(self.norms.narrow(2, 0, -(-end // self.block)), self.block)
        return Kept(self.key.narrow(2, 0, end), self.value.narrow(2, 0, end), bounds)

    def read_positions(self, end: int) -> Tensor | None:
        """(B, end) positions, if they are stored."""
        return None if self.positions is None else self.positions[:, :end]

    def number(self) -> None:
        """Start to store positions; so far the position was the slot."""
        batch, _, room, _ = self.key.shape
        self.positions = unfilled(self.key, batch, room, dtype=torch.int64)
        self.positions.copy_(torch.arange(room, device=self.key.device))

    def evict(self, end: int, lengths: Counts, sinks: int, left: int, tokens: int) -> Evicted:
        """Before `tokens` come: drop some of what is neither among the first `sinks` nor the last `left` tokens.

        When the room is used up, and then all that may go: moving the rest costs less than a step's reading.
        """
        kept = sinks + left
        room = max(self.limit or 0, kept + tokens)
        if end <= kept or end + tokens <= room:
            return Evicted(0, sinks, end)
        slots = torch.arange(kept, device=self.key.device)
        lost = lengths - kept if isinstance(lengths, int) else (lengths - kept).clamp_min(0)
        gaps = lost[:, None] if isinstance(lost, Tensor) else lost
        self._pick(torch.where(slots < sinks, slots, slots + gaps).reshape(-1, kept), room)
        return Evicted(lost, sinks, kept)

    def _pick(self, slots: Tensor, room: int) -> None:
        """Move `slots` (b, n) to the front, and give back memory if `room` would do twice over."""
        kept = slots.shape[1]
        shrink = self.key.shape[2] > 2 * room
        for name in ("key", "value"):
            old: Tensor = getattr(self, name)
            index = slots[:, None, :, None].expand(*old.shape[:2], kept, old.shape[3])
            moved = old[:, :, slots[0]] if slots.shape[0] == 1 else old.gather(2, index)
            if shrink:
                setattr(self, name, grown(moved, 2, room, kept))
            else:
                old[:, :, :kept] = moved
        self._bound(key_bounds(self.key[:, :, :kept], self.block).norms, self.key.shape[2])
        self._measured = self._written = kept

    def forget(self, lengths: Counts) -> None:
        """Every sequence keeps its first `lengths`, () or (b,), slots.

        Blocks that are now empty bound nothing; one cut short keeps its bound, which is only loose.
        """
        self._measure()
        starts = torch.arange(self.norms.shape[2], device=self.norms.device) * self.block
        limit = lengths[:, None, None] if isinstance(lengths, Tensor) else lengths
        self.norms.masked_fill_(starts >= limit, 0.0)
        if isinstance(lengths, int):
            self._measured = self._written = min(self._written, lengths)

    def select(self, index: Tensor, end: int) -> None:
        """The sequences become those at `index`; the first `end` slots of each are all that is in use.

        In place where the count of sequences stays, so that addresses do too.
        """
        for name in ("key", "value"):
            old: Tensor = getattr(self, name)
            chosen = old[:, :, :end].index_select(0, index)
            if chosen.shape[0] == old.shape[0]:
                old[:, :, :end] = chosen
            else:
                setattr(self, name, grown(chosen, 2, old.shape[2], end))
        self.sizes = len(index), self.sizes[1]
        self.norms = self.norms.index_select(0, index)
        if self.positions is not None:
            self.positions = self.positions.index_select(0, index)

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Move and convert; bounds of keys that were rounded to another dtype are computed anew."""
        changed = dtype is not None and dtype != self.key.dtype
        self.key, self.value = self.key.to(device, dtype), self.value.to(device, dtype)
        if changed:
            self._measured = self._written
        self.norms = key_bounds(self.key, self.block).norms if changed else self.norms.to(device)
        self.positions = None if self.positions is None else self.positions.to(device)

    def clear(self) -> None:
        """Forget every token, keep the memory; bounds restart at 0."""
        self.norms.zero_()
        self._measured = self._written = 0
        self.positions = None
