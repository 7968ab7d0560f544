# SPDX-License-Identifier: Apache-2.0
"""Where a cache keeps its keys and values: `Storage`, and `Slots`, which keeps each sequence in one stretch.

A storage gives every sequence slots numbered from 0 and knows nothing of text or masks; `cache.KVCache` decides which
token goes to which slot. It keeps an upper bound of the key norms of each block, raised as keys come in, so that
attention can skip a block without reading it. A slot that no token was written to may hold anything.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..semantics.bounds import KeyBounds, append_norms, key_bounds
from ..semantics.checks import check_tensor
from ..semantics.problem import accumulating_dtype

Counts = int | Tensor
"""One number for all sequences, known on the host, or (b,) int64 on the device, b = B or 1."""


class Storage(Protocol):
    """What `KVCache` asks of a storage. B sequences, G heads, n slots."""

    key: Tensor
    value: Tensor
    block: int
    """Keys that share one bound of their norm."""
    positions: Tensor | None
    """Positions of the tokens, where they are not their places in the text."""

    @property
    def sizes(self) -> tuple[int, int]:
        """B and G."""
        ...

    def reserve(self, end: int, tokens: int, real: Tensor | None) -> None:
        """Make room for `tokens` more, of which `real` (b, tokens) stay; no sequence holds more than `end` before."""
        ...

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Put (B, G, T, .) at slots start, start + 1, ... of every sequence."""
        ...

    def scatter(self, slots: Tensor, real: Tensor | None, key: Tensor, value: Tensor, positions: Tensor | None) -> None:
        """Put (B, G, T, .) at `slots` (b, T); what is not `real` (b, T) may be written anywhere nobody reads."""
        ...

    def read(self, end: int, skip: int = 0) -> tuple[Tensor, Tensor, KeyBounds]:
        """Keys and values (B, G, end, .) and their bounds; of pages, without the `skip` after the first."""
        ...

    def slots(self, end: int, skip: int = 0) -> Tensor:
        """(1, n): the slots that `read` gives."""
        ...

    def evict(self, end: int, lengths: Counts, sinks: int, left: int, tokens: int) -> "Evicted":
        """Before `tokens` come: drop some of what is neither among the first `sinks` nor the last `left` tokens."""
        ...

    def read_positions(self, end: int) -> Tensor | None:
        """(B, end) positions, if they are stored."""
        ...

    def forget(self, lengths: Counts) -> None:
        """Every sequence keeps its first `lengths`, () or (b,), slots."""
        ...

    def select(self, index: Tensor, end: int) -> None:
        """The sequences become those at `index`; the first `end` slots of each are all that is in use."""
        ...

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Move and convert."""
        ...

    def clear(self) -> None:
        """Forget every token, keep the memory."""
        ...


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


def check_tokens(key: Tensor, value: Tensor) -> None:
    """Whether these can be the tokens of a cache."""
    for name, tensor in (("key", key), ("value", value)):
        if check_tensor(name, tensor).dim() != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be floating with shape (batch, heads, tokens, head dim), "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )


def check_fit(storage: Storage, key: Tensor, value: Tensor) -> None:
    """Whether these are tokens of the same kind as those in the cache."""
    for name, tensor, kept in (("key", key, storage.key), ("value", value, storage.value)):
        wanted = (*storage.sizes, key.shape[2], kept.shape[3])
        if tensor.shape != wanted or tensor.dtype != kept.dtype or tensor.device != kept.device:
            raise ValueError(
                f"{name} must be {kept.dtype} of shape {wanted} on {kept.device}, as the cache is, got {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}; start a new cache, or convert it with .to()"
            )


class Slots:
    """One stretch of slots a sequence: reading is a view, and writing to every sequence alike is a copy."""

    def __init__(self, key: Tensor, value: Tensor, room: int, block: int, limit: int | None = None) -> None:
        """Take room for `room` slots a sequence; growing ahead of need stops at `limit`."""
        batch, heads, _, dim = key.shape
        self.block = block
        self.limit = limit
        self.key = unfilled(key, batch, heads, room, dim)
        self.value = unfilled(value, batch, heads, room, value.shape[3])
        self.norms = unfilled(key, batch, heads, -(-room // block), dtype=accumulating_dtype(key.dtype)).zero_()
        self.positions: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """B and G."""
        return self.key.shape[0], self.key.shape[1]

    def reserve(self, end: int, tokens: int, real: Tensor | None) -> None:
        """Grow by half at least, so that n appended tokens cost O(n) copies."""
        room = self.key.shape[2]
        if end + tokens <= room:
            return
        ahead = room + room // 2 if self.limit is None else min(room + room // 2, self.limit)
        self._resize(max(end + tokens, ahead), end)

    def _resize(self, room: int, used: int) -> None:
        self.key, self.value = grown(self.key, 2, room, used), grown(self.value, 2, room, used)
        norms = unfilled(self.norms, *self.norms.shape[:2], -(-room // self.block)).zero_()
        norms[:, :, : self.norms.shape[2]] = self.norms
        self.norms = norms
        if self.positions is not None:
            self.positions = grown(self.positions, 1, room, used)

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Copy in place, bounds too."""
        tokens = key.shape[2]
        self.key[:, :, start : start + tokens] = key
        self.value[:, :, start : start + tokens] = value
        append_norms(self.norms, start, key, self.block)

    def scatter(self, slots: Tensor, real: Tensor | None, key: Tensor, value: Tensor, positions: Tensor | None) -> None:
        """One slot a token and sequence."""
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

    def read(self, end: int, skip: int = 0) -> tuple[Tensor, Tensor, KeyBounds]:
        """Views."""
        bounds = KeyBounds(self.norms[:, :, : -(-end // self.block)], self.block)
        return self.key[:, :, :end], self.value[:, :, :end], bounds

    def slots(self, end: int, skip: int = 0) -> Tensor:
        """All of them."""
        return torch.arange(end, device=self.key.device)[None]

    def read_positions(self, end: int) -> Tensor | None:
        """A view."""
        return None if self.positions is None else self.positions[:, :end]

    def number(self) -> None:
        """Start to store positions; so far the position was the slot."""
        batch, _, room, _ = self.key.shape
        self.positions = unfilled(self.key, batch, room, dtype=torch.int64)
        self.positions.copy_(torch.arange(room, device=self.key.device))

    def evict(self, end: int, lengths: Counts, sinks: int, left: int, tokens: int) -> Evicted:
        """When the room is used up, and then all that may go: moving the rest costs less than a step's reading."""
        kept = sinks + left
        room = max(self.limit or 0, kept + tokens)
        if end <= kept or end + tokens <= room:
            return Evicted(0, sinks, end)
        slots = torch.arange(kept, device=self.key.device)
        if isinstance(lengths, int):
            lost = lengths - kept
            moved = torch.where(slots < sinks, slots, slots + lost)[None]
        else:
            lost = (lengths - kept).clamp_min(0)
            moved = torch.where(slots < sinks, slots, slots + lost[:, None])
        self._pick(moved, room)
        return Evicted(lost, sinks, kept)

    def _pick(self, slots: Tensor, room: int) -> None:
        """Move `slots` (b, n) to the front, and give back memory if `room` would do twice over."""
        kept = slots.shape[1]
        shrink = self.key.shape[2] > 2 * room
        for name in ("key", "value"):
            old: Tensor = getattr(self, name)
            moved = old[:, :, slots[0]] if slots.shape[0] == 1 else _gather(old, slots)
            if shrink:
                setattr(self, name, grown(moved, 2, room, kept))
            else:
                old[:, :, :kept] = moved
        self.norms = unfilled(self.norms, *self.norms.shape[:2], -(-self.key.shape[2] // self.block)).zero_()
        fresh = key_bounds(self.key[:, :, :kept], self.block).norms
        self.norms[:, :, : fresh.shape[2]] = fresh

    def forget(self, lengths: Counts) -> None:
        """Blocks that are now empty bound nothing; one cut short keeps its bound, which is only loose."""
        starts = torch.arange(self.norms.shape[2], device=self.norms.device) * self.block
        limit = lengths[:, None, None] if isinstance(lengths, Tensor) else lengths
        self.norms.masked_fill_(starts >= limit, 0.0)

    def select(self, index: Tensor, end: int) -> None:
        """In place where the count of sequences stays, so that addresses do too."""
        for name in ("key", "value"):
            old: Tensor = getattr(self, name)
            chosen = old[:, :, :end].index_select(0, index)
            if chosen.shape[0] == old.shape[0]:
                old[:, :, :end] = chosen
            else:
                setattr(self, name, grown(chosen, 2, old.shape[2], end))
        self.norms = self.norms.index_select(0, index)
        if self.positions is not None:
            self.positions = self.positions.index_select(0, index)

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Bounds of keys that were rounded to another dtype are computed anew."""
        changed = dtype is not None and dtype != self.key.dtype
        self.key, self.value = self.key.to(device, dtype), self.value.to(device, dtype)
        self.norms = key_bounds(self.key, self.block).norms if changed else self.norms.to(device)
        self.positions = None if self.positions is None else self.positions.to(device)

    def clear(self) -> None:
        """Bounds restart at 0."""
        self.norms.zero_()
        self.positions = None


def real_norms(key: Tensor, real: Tensor | None) -> Tensor:
    """(B, G, T) upper bounds of single keys; 0 for padding."""
    norms = key_bounds(key, 1).norms
    return norms if real is None else torch.where(real[:, None], norms, 0.0)


def _gather(tensor: Tensor, slots: Tensor) -> Tensor:
    """(B, G, S, D) at (B, n): (B, G, n, D)."""
    index = slots[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)
