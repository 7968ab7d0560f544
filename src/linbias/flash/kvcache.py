# SPDX-License-Identifier: Apache-2.0
"""`CallersCache`: keys and values in the caller's own tensors, and numbers in tensors that say where in them.

Such numbers are checked as ints are, before anything is written, where reading them is free. Elsewhere one that is out
of range is left to the device, which stops at it: none counts from the end, as an index of torch's would.
"""

from typing import cast

import torch
from torch import Tensor

from ..semantics.checks import readable
from ..semantics.pages import gather_pages
from ..semantics.tokens import Tokens
from .arguments import check_heads, check_integers, check_layout


class CallersCache:
    """The tensors of `flash_attn_with_kvcache`, checked but for what is in them."""

    def __init__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seqlens: int | Tensor | None,
        batch_index: Tensor | None,
        leftpad: Tensor | None,
        table: Tensor | None,
    ) -> None:
        layout = "(batch, slots, heads, head dim), or (pages, page size, heads, head dim) with block_table"
        check_layout({"q": q}, "(batch, tokens, heads, head dim)", 4)
        check_layout({"k_cache": k_cache, "v_cache": v_cache}, layout, 4)
        check_heads(q, k_cache, v_cache, ("k_cache", "v_cache"), layout)
        self.batch, self.queries = q.shape[:2]
        self.key, self.value = k_cache, v_cache
        rows = {"cache_seqlens": seqlens, "cache_batch_idx": batch_index, "cache_leftpad": leftpad}
        for name, tensor in rows.items():
            number = name == "cache_seqlens" and isinstance(tensor, int) and not isinstance(tensor, bool)
            if tensor is not None and not number:
                check_integers(name, cast(Tensor, tensor), q, self.batch)
        self.leftpad = None if leftpad is None else leftpad.long()[:, None]
        self.table = None
        if table is not None:
            if batch_index is not None:
                raise ValueError("cache_batch_idx must be None with a block_table: order the rows of the table instead")
            self.table = check_integers("block_table", table, q, self.batch, None).long()
        elif batch_index is None and k_cache.shape[0] < self.batch:
            raise ValueError(f"k_cache must have a row for each of q's {self.batch}, got {k_cache.shape[0]}")
        self.index = None if batch_index is None else batch_index.long()
        self.columns: int = k_cache.shape[1] * (1 if self.table is None else self.table.shape[1])
        # Tokens in the cache: an int, (B, 1), or None for all slots.
        self.lengths = seqlens if seqlens is None or isinstance(seqlens, int) else seqlens.long()[:, None]

    def check_places(self, k: Tensor | None, v: Tensor | None) -> None:
        """Whether all places exist that will be read, and written to if there is a k, and are written to once."""
        tokens = 0
        if k is not None or v is not None:
            tokens = self._check_new(k, v)
        lengths = self.columns if self.lengths is None else self.lengths
        check_range("cache_seqlens", lengths, 0, self.columns, f"the cache has {self.columns} slots")
        if tokens:
            room = self.columns - tokens
            check_range("cache_seqlens", lengths, 0, room, f"of {self.columns} slots, {tokens} more do not fit")
        if self.index is not None:
            check_range("cache_batch_idx", self.index, 0, self.key.shape[0] - 1, "one row of the cache each")
        if self.leftpad is not None:
            check_range("cache_leftpad", self.leftpad, 0, lengths, "at most cache_seqlens")
        if self.table is not None:
            check_pages(self.table, self.key, lengths + tokens)
        if tokens and (self.table is not None or self.index is not None):
            rows, slots = torch.broadcast_tensors(*self._places(tokens))
            if readable(rows) and len((rows * self.key.shape[1] + slots).unique()) < rows.numel():
                name = "block_table" if self.index is None else "cache_batch_idx"
                raise ValueError(f"{name} must lead each new token to a slot of its own, got two for one slot")

    def _check_new(self, k: Tensor | None, v: Tensor | None) -> int:
        """How many new tokens there are."""
        if k is None or v is None or self.lengths is None:
            raise ValueError("k, v and cache_seqlens must be given together: what to write, and where")
        check_layout({"k": k, "v": v}, "(batch, tokens, heads, head dim)", 4)
        for name, tensor, kept in (("k", k, self.key), ("v", v, self.value)):
            wanted = (self.batch, k.shape[1], *kept.shape[2:])
            if tuple(tensor.shape) != wanted or tensor.dtype != kept.dtype or tensor.device != kept.device:
                raise ValueError(
                    f"{name} must be {kept.dtype} of shape {wanted} on {kept.device}, got {tensor.dtype} "
                    f"{tuple(tensor.shape)} on {tensor.device}"
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{name} must not require a gradient, which the cache would lose; use torch.no_grad()"
                )
        return k.shape[1]

    def _places(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Row (or page) and slot of each new token, broadcast (B, N)."""
        assert self.lengths is not None
        slots = self.lengths + torch.arange(tokens, device=self.key.device)[None]
        if self.table is None:
            numbers = torch.arange(self.batch, device=self.key.device) if self.index is None else self.index
            rows = _loud(numbers, self.key.shape[0])
            return rows[:, None], _loud(slots, self.columns)
        page = self.key.shape[1]
        pages = self.table.gather(1, (slots // page).expand(self.batch, tokens))
        return _loud(pages, self.key.shape[0]), slots % page

    def write(self, k: Tensor, v: Tensor) -> None:
        """New keys and values behind what is there."""
        assert self.lengths is not None
        places = self._places(k.shape[1])
        with torch.no_grad():
            self.key[places], self.value[places] = k, v
        self.lengths = self.lengths + k.shape[1]

    def read(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(B, S, G, .), S the slots that can be in use; or pages (P, page, G, .) and the table (B, n) of them."""
        slots = self._slots
        if self.table is not None:
            return self.key, self.value, self.table
        if self.index is not None and readable(self.index):
            return self.key, self.value, self.index[:, None]  # a row of the cache is a page
        rows = slice(self.batch) if self.index is None else _loud(self.index, self.key.shape[0])
        return self.key[rows, :slots], self.value[rows, :slots], None

    def tokens(self) -> tuple[tuple[Tokens, Tokens], Tensor | None, Tensor]:
        """Both sides, (B,) how many keys each sequence has, and (b, T), the rows of the queries from key 0 on."""
        device = self.key.device
        used = self._slots if self.lengths is None else self.lengths
        steps = torch.arange(-self.queries, 0, device=device)[None]
        lengths = used[:, 0] if isinstance(used, Tensor) else None
        sides = Tokens(self.queries, self._slots - self.queries, device), Tokens(self._slots, 0, device)
        if self.leftpad is None:
            return sides, lengths, used + steps
        columns = torch.arange(self._slots, device=device)[None]
        rows = used - self.leftpad + steps
        keys = sides[1]._replace(position=columns - self.leftpad, real=columns >= self.leftpad)
        return (sides[0]._replace(position=rows), keys), lengths, rows

    @property
    def _slots(self) -> int:
        """Slots that can be in use."""
        return self.lengths if isinstance(self.lengths, int) else self.columns


def check_range(name: str, given: int | Tensor, low: int, high: int | Tensor, reason: str) -> None:
    """Whether all of `given` are from `low` to `high`; tensors are read where that is free."""
    if all(readable(each) for each in (given, high) if isinstance(each, Tensor)):
        wrong = (given < low) | (given > high)
        if wrong if isinstance(wrong, bool) else bool(wrong.any()):
            told = [each.flatten().tolist() if isinstance(each, Tensor) else each for each in (given, high)]
            raise ValueError(f"{name} must be from {low} to {told[1]}, got {told[0]}: {reason}")


def check_pages(table: Tensor, pool: Tensor, used: int | Tensor) -> None:
    """Whether `table` (N, n) names pages of the pool for the first `used` (b, 1) tokens; what is behind is not read."""
    if readable(table) and (isinstance(used, int) or readable(used)):
        read = torch.arange(table.shape[1]) * pool.shape[1] < used
        check_range("block_table", torch.where(read, table, 0), 0, max(pool.shape[0] - 1, 0), "one page each")


def unpaged(k: Tensor, v: Tensor, table: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of pages (P, page, G, .), laid end to end: (total, G, .). Lengths are read on the host."""
    lengths, room = cu_seqlens.diff()[:, None], table.shape[1] * k.shape[1]
    if lengths.numel() and int(lengths.amax()) > room:
        raise ValueError(f"block_table has room for {room} tokens a sequence; cu_seqlens_k needs more")
    check_pages(table, k, lengths)
    real = torch.arange(room, device=table.device) < lengths
    packed = [gather_pages(pool.transpose(1, 2), table.long()).transpose(1, 2)[real] for pool in (k, v)]
    return packed[0], packed[1]


def _loud(index: Tensor, size: int) -> Tensor:
    """A negative number would count from the end; as one beyond the end it stops every device."""
    return torch.where(index < 0, size, index)
