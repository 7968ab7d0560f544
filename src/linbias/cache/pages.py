# SPDX-License-Identifier: Apache-2.0
"""A cache's keys and values in pages of one pool, so that sequences of any length share memory without loss."""

import torch
from torch import Tensor

from ..semantics.bounds import KeyBounds, key_bounds, upper_norms
from ..semantics.problem import accumulating_dtype
from .storage import Counts, Evicted, Kept, grown, real_norms, unfilled


class Pages:
    """A pool of pages of `page` slots, and for each sequence the list of its pages; its methods mean what `Slots`' do.

    A page that falls out of use is used again. `select` copies no key: it shares pages, and a shared page is copied
    when one of its owners writes to it. Page 0 belongs to nobody: tables are filled up with it and padding is written
    to it. Attention reads them through the table. The lists live on the host, and lengths that come as tensors are read
    there.
    """

    def __init__(self, key: Tensor, value: Tensor, page: int) -> None:
        batch, heads, _, dim = key.shape
        self.page = self.block = page
        # (G, P, page, .): a head reads its keys of a page, and as a rule those of the next, in one stretch.
        self.key = unfilled(key, heads, 1, page, dim)
        self.value = unfilled(value, heads, 1, page, value.shape[3])
        self.norms = unfilled(key, heads, 1, dtype=accumulating_dtype(key.dtype)).zero_()
        """(G, P)."""
        self.positions: Tensor | None = None
        """(1, P, page)."""
        self._lists: list[list[int]] = [[] for _ in range(batch)]
        self._filled = [0] * batch
        self._owners = [1]
        self._free: list[int] = []
        self._table = unfilled(key, batch, 0, dtype=torch.int64)

    @property
    def sizes(self) -> tuple[int, int]:
        """B and G."""
        return len(self._lists), self.key.shape[0]

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
            self.norms[:, torch.tensor(taken, device=self.norms.device)] = 0.0
        if copies:
            old, new = torch.tensor(copies, device=self.key.device).unbind(1)
            for pool in (self.key, self.value, self.norms, self.positions):
                if pool is not None:
                    pool[:, new] = pool[:, old]
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
            pages = self.key.shape[1]
            for name in ("key", "value", "norms", "positions"):
                pool: Tensor | None = getattr(self, name)
                setattr(self, name, None if pool is None else grown(pool, 1, 2 * pages, pages))
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
        """Through the table, as any other slots; a step's one token with fewer operations."""
        if key.shape[2] == 1:
            page, place = divmod(start, self.page)
            pages = self._table[:, page]
            self.key[:, :, place].index_copy_(1, pages, key[:, :, 0].transpose(0, 1))
            self.value[:, :, place].index_copy_(1, pages, value[:, :, 0].transpose(0, 1))
            self._raise_norms(pages, upper_norms(key)[:, :, 0].T)
            return
        slots = torch.arange(start, start + key.shape[2], device=key.device)[None]
        self.scatter(slots, None, key, value, None)

    def scatter(self, slots: Tensor, real: Tensor | None, key: Tensor, value: Tensor, positions: Tensor | None) -> None:
        """One slot a token and sequence; padding beyond a sequence's pages ends up in page 0."""
        batch, _, tokens, _ = key.shape
        slots = slots.expand(batch, tokens)
        pages, places = self._table.gather(1, slots // self.page), slots % self.page
        self.key[:, pages, places] = key.transpose(0, 1)
        self.value[:, pages, places] = value.transpose(0, 1)
        self._raise_norms(pages.reshape(-1), real_norms(key, real).transpose(0, 1).flatten(1))
        if self.positions is not None and positions is not None:
            self.positions[0, pages, places] = positions.expand(batch, tokens)

    def _raise_norms(self, pages: Tensor, norms: Tensor) -> None:
        """The bounds of pages (n,), by those (G, n) of keys that came to them."""
        self.norms.scatter_reduce_(1, pages.expand_as(norms), norms, "amax")

    def read(self, end: int, rows: int) -> Kept:
        """The pool, and the table of the first `end` slots."""
        bounds = KeyBounds(self.norms.T.unsqueeze(2), self.page)
        return Kept(self.key.transpose(0, 1), self.value.transpose(0, 1), bounds, self.table(end))

    def read_positions(self, end: int) -> Tensor | None:
        """A copy."""
        return None if self.positions is None else self.positions[0, self.table(end)].flatten(1)[:, :end]

    def number(self) -> None:
        """Start to store positions; so far the position was the slot."""
        self.positions = unfilled(self.key, 1, self.key.shape[1], self.page, dtype=torch.int64).zero_()
        inside = torch.arange(self.page, device=self.key.device)
        for pages in self._lists:
            for n, page in enumerate(pages):
                self.positions[0, page] = inside + n * self.page

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
            self.norms = key_bounds(self.key, self.page).norms[:, :, 0]
        self.positions = None if self.positions is None else self.positions.to(device)
        self._table = self._table.to(device)

    def clear(self) -> None:
        """All pages are free."""
        self.positions = None
        self.forget(0)
