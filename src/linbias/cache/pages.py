# SPDX-License-Identifier: Apache-2.0
"""A cache's keys and values in pages of one pool, so that sequences of any length share memory without loss."""

import torch
from torch import Tensor

from ..prepare import AttentionOptions, check_inputs, resolve_options
from ..semantics.bounds import KeyBounds, key_bounds, reach, score_bound, upper_norms
from ..semantics.checks import readable, slope_rows
from ..semantics.problem import accumulating_dtype
from .storage import Counts, Evicted, grown, real_norms, unfilled


def gather_pages(pool: Tensor, table: Tensor) -> Tensor:
    """Pages (P, page, ...) by a table (B, n) of page numbers, side by side: (B, n * page, ...)."""
    return pool[table].flatten(1, 2)


class Pages:
    """A pool of pages of `page` slots, and for each sequence the list of its pages; its methods mean what `Slots`' do.

    A page that falls out of use is used again. `select` copies no key: it shares pages, and a shared page is copied
    when one of its owners writes to it. Page 0 belongs to nobody: tables are filled up with it and padding is written
    to it. Attention needs pages side by side, so `read` copies those it is asked for. The lists live on the host, and
    lengths that come as tensors are read there.
    """

    def __init__(self, key: Tensor, value: Tensor, page: int) -> None:
        batch, heads, _, dim = key.shape
        self.page = self.block = page
        self.key = unfilled(key, 1, page, heads, dim)
        self.value = unfilled(value, 1, page, heads, value.shape[3])
        self.norms = unfilled(key, 1, heads, dtype=accumulating_dtype(key.dtype)).zero_()
        self.positions: Tensor | None = None
        self._lists: list[list[int]] = [[] for _ in range(batch)]
        self._filled = [0] * batch
        self._owners = [1]
        self._free: list[int] = []
        self._table = unfilled(key, batch, 0, dtype=torch.int64)

    @property
    def sizes(self) -> tuple[int, int]:
        """B and G."""
        return len(self._lists), self.key.shape[2]

    def table(self, end: int) -> Tensor:
        """(B, ceil(end / page)) int64: the page of each stretch of slots; 0 beyond a sequence's last."""
        return self._table[:, : -(-end // self.page)]

    def reserve(self, end: int, tokens: int, real: Tensor | None) -> None:
        """Give each sequence the pages its new tokens need, and a page of its own where it will write."""
        batch = len(self._lists)
        counts: list[int] = [tokens] * batch if real is None else real.sum(1).expand(batch).tolist()
        copies: list[tuple[int, int]] = []
        taken: list[int] = []
        for n, pages in enumerate(self._lists):
            last, inside = divmod(self._filled[n], self.page)
            if inside and tokens and self._owners[pages[last]] > 1:
                copies.append((pages[last], self._take()))
                self._drop(pages[last:])
                pages[last:] = [copies[-1][1]]
            self._filled[n] += counts[n]
            while len(pages) * self.page < self._filled[n]:
                pages.append(self._take())
                taken.append(pages[-1])
        if taken:
            self.norms[torch.tensor(taken, device=self.norms.device)] = 0.0
        if copies:
            old, new = torch.tensor(copies, device=self.key.device).unbind(1)
            for pool in (self.key, self.value, self.norms, self.positions):
                if pool is not None:
                    pool[new] = pool[old]
        # Padding is written behind the tokens, so the table is as wide as the longest sequence with all its padding.
        width = -(-(end + tokens) // self.page)
        if taken or copies or width > self._table.shape[1]:
            self._write_table(max(width, self._table.shape[1]))

    def _write_table(self, width: int) -> None:
        # Built on the host and moved once: it changes with a page, not with a token.
        rows = [pages + [0] * (width - len(pages)) for pages in self._lists]
        table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)
        self._table = table.to(self.key.device)

    def _take(self) -> int:
        if not self._free:
            pages = self.key.shape[0]
            for name in ("key", "value", "norms", "positions"):
                pool: Tensor | None = getattr(self, name)
                setattr(self, name, None if pool is None else grown(pool, 0, 2 * pages, pages))
            self._owners += [0] * pages
            self._free = list(range(2 * pages - 1, pages - 1, -1))
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _drop(self, pages: list[int]) -> None:
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Through the table, as any other slots."""
        slots = torch.arange(start, start + key.shape[2], device=key.device)[None]
        self.scatter(slots, None, key, value, None)

    def scatter(self, slots: Tensor, real: Tensor | None, key: Tensor, value: Tensor, positions: Tensor | None) -> None:
        """One slot a token and sequence; padding beyond a sequence's pages ends up in page 0."""
        batch, _, tokens, _ = key.shape
        slots = slots.expand(batch, tokens)
        pages, places = self._table.gather(1, slots // self.page), slots % self.page
        self.key[pages, places] = key.transpose(1, 2)
        self.value[pages, places] = value.transpose(1, 2)
        norms = real_norms(key, real).transpose(1, 2).flatten(0, 1)
        self.norms.scatter_reduce_(0, pages.reshape(-1, 1).expand_as(norms), norms, "amax")
        if self.positions is not None and positions is not None:
            self.positions[pages, places] = positions.expand(batch, tokens)

    def read(self, end: int, skip: int, rows: int) -> tuple[Tensor, Tensor, KeyBounds]:
        """Copies, without the pages 1 to `skip` of each sequence."""
        table = self.table(end)
        table = torch.cat([table[:, :1], table[:, 1 + skip :]], dim=1) if skip else table
        slots = end - skip * self.page
        key, value = (gather_pages(pool, table)[:, :slots].transpose(1, 2) for pool in (self.key, self.value))
        return key, value, KeyBounds(self.norms[table].transpose(1, 2).contiguous(), self.page)

    def newest(self, end: int, tokens: int) -> Tensor:
        """(B, G, tokens, D): the keys before slot `end`."""
        slots = torch.arange(end - tokens, end, device=self.key.device)
        return self.key[self._table[:, slots // self.page], slots % self.page].transpose(1, 2)

    def slots(self, end: int, skip: int = 0) -> Tensor:
        """Of the pages read."""
        slots = torch.arange(end, device=self.key.device)[None]
        return torch.cat([slots[:, : self.page], slots[:, (1 + skip) * self.page :]], dim=1) if skip else slots

    def read_positions(self, end: int) -> Tensor | None:
        """A copy."""
        return None if self.positions is None else gather_pages(self.positions, self.table(end))[:, :end]

    def number(self) -> None:
        """Start to store positions; so far the position was the slot."""
        self.positions = unfilled(self.key, *self.key.shape[:2], dtype=torch.int64).zero_()
        inside = torch.arange(self.page, device=self.key.device)
        for pages in self._lists:
            for n, page in enumerate(pages):
                self.positions[page] = inside + n * self.page

    def evict(self, end: int, lengths: Counts, sinks: int, left: int, tokens: int) -> Evicted:
        """Whole pages, so that more than was asked for may stay."""
        head = -(-sinks // self.page)
        lost: list[int] = []
        for n, pages in enumerate(self._lists):
            count = max((self._filled[n] - head * self.page - left) // self.page, 0)
            self._drop(pages[head : head + count])
            del pages[head : head + count]
            self._filled[n] -= count * self.page
            lost.append(count * self.page)
        if any(lost):
            self._write_table(self._table.shape[1])
        gone = (
            max(lost, default=0)
            if isinstance(lengths, int)
            else torch.tensor(lost, dtype=torch.int64, device=self.key.device)
        )
        return Evicted(gone, head * self.page, max(self._filled, default=0))

    def forget(self, lengths: Counts) -> None:
        """Pages beyond the new lengths are free."""
        batch = len(self._lists)
        limits: list[int] = [lengths] * batch if isinstance(lengths, int) else lengths.expand(batch).tolist()
        for n, pages in enumerate(self._lists):
            self._filled[n] = min(self._filled[n], limits[n])
            kept = -(-self._filled[n] // self.page)
            self._drop(pages[kept:])
            del pages[kept:]
        self._write_table(self._table.shape[1])

    def select(self, index: Tensor, end: int) -> None:
        """Share the pages."""
        chosen: list[int] = index.tolist()
        old = self._lists
        self._lists, self._filled = [list(old[n]) for n in chosen], [self._filled[n] for n in chosen]
        for pages in self._lists:
            for page in pages:
                self._owners[page] += 1
        for pages in old:
            self._drop(pages)
        self._write_table(self._table.shape[1])

    def to(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Bounds of keys that were rounded to another dtype are computed anew."""
        changed = dtype is not None and dtype != self.key.dtype
        self.key, self.value = self.key.to(device, dtype), self.value.to(device, dtype)
        self.norms = self.norms.to(device)
        if changed:
            self.norms = key_bounds(self.key.transpose(1, 2), self.page).norms[:, :, 0]
        self.positions = None if self.positions is None else self.positions.to(device)
        self._table = self._table.to(device)

    def clear(self) -> None:
        """All pages are free."""
        self.positions = None
        self.forget(0)


_FEW_ROWS = 16
"""A longer chunk looks at so many keys that reading all of them costs little beside."""
_PLAIN = frozenset({"causal", "scale", "softcap", "tolerance", "future_slopes"})
"""Options that leave every row its own key, on whose weight the reach is built."""


def unseen_pages(pages: Pages, end: int, query: Tensor, slopes: Tensor, options: AttentionOptions) -> tuple[int, float]:
    """How many pages after the first none of the T newest tokens can see, and what they cost of the tolerance.

    With rho the largest key norm of those pages, no score before the bias exceeds |scale| |q| rho, and each row weighs
    at least what its own key does, at distance 0. So half the tolerance pays for all keys beyond `linbias.reach` of the
    difference. The first page is always read: that is where attention sinks are. Only for plain decoding on the CPU,
    where the answer costs no wait; everything else reads every page.

    Args:
        pages, end: the storage and the slots in use, one length for all sequences, slot = position.
        query: (B, H, T, D).
        slopes, options: as for `linbias.alibi_attention`.
    """
    rows = query.shape[2]
    plain = options.keys() <= _PLAIN and 0 < rows <= min(_FEW_ROWS, end)
    plain = plain and end > 2 * pages.page  # the first and the newest page are always read
    if not plain or not readable(query) or torch.is_autocast_enabled("cpu"):
        return 0, 0.0
    own = pages.newest(end, rows)
    check_inputs(query, own, own)
    numbers = resolve_options(options, query.shape[3], query.dtype)
    slope = slope_rows("slopes", slopes, query.shape[0], query.shape[1], torch.float64, query).detach()
    group, wide = query.shape[1] // own.shape[1], query.detach().double()
    largest = pages.norms[pages.table(end)[:, 1:]].amax(1).double().repeat_interleave(group, 1)[:, :, None]
    score = numbers.scale * (wide * own.double().repeat_interleave(group, 1)).sum(-1)
    if numbers.softcap is not None:
        score = numbers.softcap * torch.tanh(score / numbers.softcap)
    excess = score_bound(numbers.scale, numbers.softcap, upper_norms(wide), largest) - score
    # A NaN content gives a NaN reach, and then nothing is left out.
    far = reach(slope[:, :, None], tolerance=numbers.tolerance / 2, content=excess)
    first = (torch.arange(end - rows, end, device=far.device) - far).amin()
    return (max(int(first) // pages.page - 1, 0) if first.isfinite() else 0), numbers.tolerance / 2
