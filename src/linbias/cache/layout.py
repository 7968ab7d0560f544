# SPDX-License-Identifier: Apache-2.0
"""`Layout`: which token of which sequence is in which slot of a cache, and what that makes of a call to `attend`."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..prepare import OPTION_KEYS
from ..semantics.checks import check_count, check_tensor, readable
from ..semantics.tokens import Tokens
from .pages import Pages
from .storage import Counts, Slots

Storage = Slots | Pages

_OWNED = {
    "key_mask": "give padding to append(mask=...)",
    "key_positions": "give positions to append(positions=...)",
    "query_positions": "give positions to append(positions=...)",
    "query_segments": "each of its sequences sees only itself",
    "key_segments": "each of its sequences sees only itself",
    "key_bounds": "it keeps its own",
    "metric": "its positions are places in a text; call alibi_attention for coordinates",
}
_WINDOWED = {
    "window": "the window was fixed with the cache, which evicts by it",
    "sinks": "the sinks were fixed with the cache, which evicts by them",
    "prefix": "the prefix may have been evicted",
}
_OPTIONS = OPTION_KEYS - {"causal"}


def column(counts: Counts) -> Counts:
    """Counts that broadcast against (b, n)."""
    return counts[:, None] if isinstance(counts, Tensor) else counts


class Layout:
    """The tokens of each sequence fill its slots from 0, in order, padding left out.

    As long as all sequences are alike their length is an int, and nothing is computed on the device.
    """

    def __init__(self, capacity: int | None = None, device: torch.device | None = None) -> None:
        self.static = capacity is not None
        """`end` is the capacity, and lengths live on the device."""
        self.lengths: Counts = torch.zeros(1, dtype=torch.int64, device=device) if self.static else 0
        """Slots in use."""
        self.evicted: Counts = 0
        """Tokens dropped between the slots before `head` and those after."""
        self.head = 0
        self.end = capacity or 0
        """No sequence uses a slot from here on."""
        self.chunk: tuple[Tensor, Tensor] | None = None
        """After padded tokens: their slots, and which of them are real, (b, T)."""

    @property
    def seen(self) -> Counts:
        """Tokens of each sequence, evicted ones included."""
        return self.lengths + self.evicted

    @property
    def aligned(self) -> bool:
        """Whether slots are positions and the last query belongs to the last slot, for every sequence."""
        return isinstance(self.lengths, int) and self.evicted_none and self.chunk is None

    @property
    def evicted_none(self) -> bool:
        """Whether nothing was evicted for certain."""
        return isinstance(self.evicted, int) and self.evicted == 0

    def fits(self, tokens: int) -> bool:
        """Whether no sequence has had more than `tokens`, as far as the host knows."""
        return isinstance(self.seen, int) and self.seen <= tokens

    def new_slots(self, tokens: int, real: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor, Counts]:
        """For T new tokens: their slots (b, T), how many new ones of their sequence come before, and the count to add.

        Real tokens come first and padding behind them, where the next tokens will overwrite it.
        """
        order = torch.arange(tokens, device=device)[None]
        if real is None:
            return column(self.lengths) + order, order, tokens
        order, count = real.cumsum(1) - 1, real.sum(1)
        behind = count[:, None] + (~real).cumsum(1) - 1
        return column(self.lengths) + torch.where(real, order, behind), order, count

    def make_room(self, storage: Storage, tokens: int, real: Tensor | None, left: int | None, sinks: int) -> None:
        """Before `tokens` come, of which `real` (b, T) stay: evict what no window shows, and grow."""
        if not self.static:
            if left is not None:
                # What the newest token sees stays as well: a sequence may get nothing but padding, or be cropped to it.
                # So does what each of T - 1 query rows before it sees.
                kept = left + (1 if real is None else max(tokens - 1, 1))
                lost, self.head, self.end = storage.evict(self.end, self.lengths, sinks, kept, tokens)
                self.lengths, self.evicted = self.lengths - lost, self.evicted + lost
            storage.reserve(self.end, tokens, real)
        elif isinstance(self.lengths, Tensor) and readable(self.lengths):
            # Elsewhere reading the lengths would wait for the device; there the write itself fails.
            used = max(self.lengths.tolist(), default=0)
            if used + tokens > self.end:
                raise IndexError(
                    f"the cache has capacity={self.end} and holds {used} tokens, so {tokens} more, padding "
                    f"included, do not fit; crop it, or leave capacity out to let it grow"
                )

    def write(
        self, storage: Storage, key: Tensor, value: Tensor, real: Tensor | None, positions: Tensor | None
    ) -> None:
        """Put (B, G, T, .) behind what is there; room was made."""
        tokens = key.shape[2]
        if positions is not None and storage.positions is None:
            storage.number()
        if real is None and storage.positions is None and isinstance(self.lengths, int):
            storage.write(self.lengths, key, value)
            self.lengths, self.chunk = self.lengths + tokens, None
        else:
            slots, order, count = self.new_slots(tokens, real, key.device)
            if positions is None and storage.positions is not None:
                positions = token_positions(storage, self, self.last(key.device)) + 1 + order
            storage.scatter(slots, real, key, value, positions)
            self.lengths, self.chunk = self.lengths + count, None if real is None else (slots, real)
        if not self.static:
            self.end += tokens

    def last(self, device: torch.device) -> Tensor:
        """(b, 1): the slot of each sequence's newest token; -1 where there is none."""
        return torch.as_tensor(self.lengths, device=device).reshape(-1, 1) - 1

    def queries(self, count: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """(b, T): the slots of the T query rows, and which of them are real."""
        if self.chunk is not None and self.chunk[0].shape[1] == count:
            return self.chunk
        return self.last(device) + torch.arange(1 - count, 1, device=device), None

    def slots(self, device: torch.device) -> Tensor:
        """(1, end): all slots in use."""
        return torch.arange(self.end, device=device)[None]

    def index(self, slots: Tensor) -> Tensor:
        """(b, n): the number in its text of the token at each slot."""
        return slots if self.evicted_none else torch.where(slots < self.head, slots, slots + column(self.evicted))

    def real(self, slots: Tensor) -> Tensor | None:
        """(b, n) bool: the slots that hold a token; None if all of them do."""
        return slots < column(self.lengths) if isinstance(self.lengths, Tensor) else None

    def check_kept(self, rows: Counts, left: int | None, asked: str) -> None:
        """Raise where what the windows of the newest `rows` tokens, () or (b,), show was evicted. Reads the lengths."""
        if left is None or self.evicted_none:
            return
        gap = self.head + self.evicted
        # Token number seen - rows is the first asked about, and its window starts `left` before.
        blind = (gap > self.seen - rows - left) & (rows > 0) & (self.evicted > 0)
        if blind if isinstance(blind, bool) else bool(blind.any()):
            last = int(torch.where(torch.as_tensor(blind), torch.as_tensor(gap), 0).amax()) - 1
            raise ValueError(
                f"{asked}: tokens {self.head} to {last} were evicted already, and the window of {left} tokens back "
                f"shows some of them; a cache with a window can be asked for, and cropped into, the last append"
            )

    def check_rows(self, count: int, left: int | None) -> None:
        """Raise where one of the T query rows sees what was evicted; ragged lengths on a device are not read."""
        if left is None or self.evicted_none:
            return
        rows: Counts = count
        if self.chunk is not None and self.chunk[1].shape[1] == count:
            rows = self.chunk[1].sum(1)
        counts = [each for each in (rows, self.seen) if isinstance(each, Tensor)]
        if all(readable(each) for each in counts):
            self.check_kept(rows, left, f"cannot attend from the last {count} tokens")

    def crop(self, seen: Counts, left: int | None) -> None:
        """Keep the first `seen` tokens of each sequence's text."""
        self.check_kept(self.seen - seen + 1, left, f"cannot crop to {seen}")
        if isinstance(seen, int) and isinstance(self.lengths, int) and isinstance(self.evicted, int):
            self.lengths = self.end = max(min(self.lengths, seen - self.evicted), 0)
        else:
            wanted = seen - self.evicted
            device = next(each.device for each in (self.lengths, wanted) if isinstance(each, Tensor))
            both = [torch.as_tensor(each, device=device) for each in (self.lengths, wanted)]
            self.lengths = torch.minimum(*torch.broadcast_tensors(*both)).clamp_min(0)
            if not self.static and isinstance(seen, int):
                self.end = min(self.end, seen)
        self.chunk = None

    def select(self, index: Tensor) -> None:
        """The sequences become those at `index`."""
        self.lengths, self.evicted = (_pick(counts, index) for counts in (self.lengths, self.evicted))
        if self.chunk is not None:
            slots, real = torch.broadcast_tensors(*self.chunk)
            self.chunk = slots, real
            if slots.shape[0] > 1:
                self.chunk = slots[index], real[index]

    def to(self, device: torch.device) -> None:
        """Move what is on the device."""
        self.lengths, self.evicted = (
            counts.to(device) if isinstance(counts, Tensor) else counts for counts in (self.lengths, self.evicted)
        )
        self.chunk = None if self.chunk is None else (self.chunk[0].to(device), self.chunk[1].to(device))


def _pick(counts: Counts, index: Tensor) -> Counts:
    return counts[index] if isinstance(counts, Tensor) and counts.shape[0] > 1 else counts


def check_options(options: Iterable[str], *, windowed: bool) -> None:
    """Refuse by name what `KVCache.attend` does not take."""
    for name in options:
        reason = _OWNED.get(name) or (_WINDOWED.get(name) if windowed else None)
        if reason is not None:
            raise TypeError(f"attend takes no {name}, which is the cache's: {reason}")
        if name not in _OPTIONS:
            raise TypeError(f"attend has no option {name!r}; it takes those of alibi_attention")


def check_tokens(key: Tensor, value: Tensor, storage: Storage | None) -> None:
    """Whether these can be the tokens of a cache, and are of the same kind as those in it."""
    for name, tensor in (("key", key), ("value", value)):
        if check_tensor(name, tensor).dim() != 4 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be floating with shape (batch, heads, tokens, head dim), "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
        kept = tensor if storage is None else storage.key if name == "key" else storage.value
        wanted = (*(key.shape[:2] if storage is None else storage.sizes), key.shape[2], kept.shape[3])
        like = key if storage is None else kept
        if tensor.shape != wanted or tensor.dtype != like.dtype or tensor.device != like.device:
            raise ValueError(
                f"{name} must be {like.dtype} of shape {wanted} on {like.device}, as the cache is, got {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}; start a new cache, or convert it with .to()"
            )


def check_counts(name: str, counts: int | Tensor, storage: Storage) -> Counts:
    """One int >= 0, or (B,) of them as int64; tensors are read where that is free."""
    if not isinstance(counts, Tensor):
        return check_count(name, counts)
    check_tensor(name, counts, storage.key)
    batch = storage.sizes[0]
    if counts.is_floating_point() or counts.dtype == torch.bool or tuple(counts.shape) != (batch,):
        raise ValueError(
            f"{name} must be an int or integers of shape ({batch},), one a sequence, "
            f"got {counts.dtype} {tuple(counts.shape)}"
        )
    if readable(counts) and bool((counts < 0).any()):
        raise ValueError(f"{name} must be at least 0 for each sequence, got {counts.tolist()}")
    return counts.long()


def check_drop(counts: Counts, layout: Layout) -> None:
    """Whether every sequence has as many tokens; tensors are read where that is free."""
    if all(readable(each) for each in (counts, layout.seen) if isinstance(each, Tensor)):
        given, there = torch.as_tensor(counts), torch.as_tensor(layout.seen)
        if bool((given > there).any()):
            raise ValueError(
                f"count must be at most the tokens that a sequence has had, got {given.tolist()} of {there.tolist()}; "
                f"crop(0) leaves none"
            )


def check_index(name: str, index: Tensor | Sequence[int], storage: Storage) -> Tensor:
    """(n,) numbers of sequences, as int64 on the storage's device."""
    batch, rule = storage.sizes[0], f"{name} must be integers of shape (n,)"
    try:
        numbers = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{rule}, got {index!r}") from None
    if numbers.dim() != 1 or (numbers.numel() and (numbers.is_floating_point() or numbers.dtype == torch.bool)):
        raise TypeError(f"{rule}, got {numbers.dtype} {tuple(numbers.shape)}")
    if readable(numbers) and numbers.numel():
        low, high = (int(end) for end in numbers.aminmax())
        if low < 0 or high >= batch:
            wrong = low if low < 0 else high
            raise ValueError(
                f"{name} must hold numbers from 0 to {batch - 1}, one of the {batch} sequences, got {wrong}"
            )
    return numbers.to(storage.key.device, torch.int64)


def token_positions(storage: Storage, layout: Layout, slots: Tensor) -> Tensor:
    """(b, n): the position of the token at each slot; before a sequence's first slot they count on backwards."""
    stored = storage.read_positions(layout.end)
    if stored is None or layout.end == 0:
        return layout.index(slots)
    slots = slots.expand(stored.shape[0], -1)
    return torch.where(slots < 0, slots, stored.gather(1, slots.clamp_min(0)))


def placed(
    storage: Storage, layout: Layout, queries: int, unbiased: int, *, spelled: bool
) -> tuple[tuple[Tokens, Tokens], Tensor | None]:
    """Both sides of a call from the T newest tokens to all that is kept, and (b, 1, T, 1), which rows are real.

    Args:
        storage, layout: what is where.
        queries: T.
        unbiased: how many first tokens of each sequence have no bias.
        spelled: write positions out also where they are the slots.
    """
    device = storage.key.device
    rows, real = layout.queries(queries, device)
    counted = not spelled and layout.evicted_none and storage.positions is None and real is None

    def side(slots: Tensor, first: int) -> Tokens:
        marks = layout.index(slots) < unbiased if unbiased else None
        positions = None if counted else token_positions(storage, layout, slots)
        return Tokens(slots.shape[1], first, device, positions, unbiased=marks)

    tokens = side(rows, layout.end - queries), side(layout.slots(device), 0)
    return tokens, None if real is None else real[:, None, :, None]
