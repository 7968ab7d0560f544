# SPDX-License-Identifier: Apache-2.0
"""`KVCache`: the keys and values of past tokens, kept so that a step reads no more of them than its heads can see."""

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor

from ..attention import Aux, output, run
from ..prepare import AttentionOptions, SharedOptions, autocast, check_inputs, prepare, resolve
from ..semantics.checks import (
    check_count,
    check_tensor,
    check_tolerance,
    check_window,
    position_rows,
    slope_rows,
    token_rows,
)
from ..semantics.problem import default_tolerance
from .gaps import tail_behind
from .layout import (
    Layout,
    Storage,
    check_counts,
    check_drop,
    check_index,
    check_options,
    check_tokens,
    placed,
    token_positions,
)
from .pages import Pages
from .report import CacheReport, content_of, newest_pairs
from .storage import Counts, Slots
from .streaming import stream


class KVCache:
    """Keys and values of the tokens so far, one layer's worth, for a batch of sequences.

    ``append(key, value)`` takes in new tokens and ``attend(query, slopes)`` attends from them to all that is kept, as
    one `alibi_attention` over the whole text would::

        cache = KVCache()
        for q, k, v in ((q0, k0, v0), (q1, k1, v1)):   # a prompt, then a token
            cache.append(k, v)
            out = cache.attend(q, slopes)

    Tokens are written in place into memory that grows by half when it is full. Sequences may differ in length: padding
    (``append(..., mask=...)``) is not kept, so each sequence occupies its own first ``lengths`` slots. Beside the keys
    stands an upper bound of the key norms of each block, so that a step skips unread what no head can see. Tokens see
    what is there when they attend: of two at one position, appended one by one, only the later sees the other.

    With a window, tokens that neither the newest nor a later one can see are evicted, and their memory is used again.
    What "distance" then means is the user's choice. ``distance="text"``, the default, is the distance in the text: what
    a model trained with these slopes saw, and exactly `alibi_attention` with the same window and sinks over the whole
    text; the farther behind the sinks are left, the less they weigh, as ``exp(-slope * distance)``.
    ``distance="cache"`` counts only what is kept, StreamingLLM's form: a sink is never further away than it was when
    the window first filled up, ``min(p - r, sinks + left - r)``, so its weight stays. Choose it if the model relies on
    its sinks.

    Args:
        window: (left, right) as for `alibi_attention`. Tokens further back than ``left`` are evicted.
        sinks: how many first tokens of each sequence are kept and stay visible all the same.
        distance: "text" or "cache"; see above.
        capacity: tokens a sequence, all allocated at once: nothing is ever moved, lengths live on the device and shapes
            never change, so a compiled ``attend`` is compiled once. More tokens raise IndexError. None: grow.
        page_size: keep keys in pages of this many tokens, shared by all sequences (see ``block_table``). None: each
            sequence has one stretch of memory.
        block: keys that share one bound of their norm; with pages, a page is a block.

    Raises:
        ValueError: sinks or ``distance="cache"`` without a window, a capacity with a window or pages, sizes below 1.

    Reference:
        Xiao et al., "Efficient streaming language models with attention sinks", https://arxiv.org/abs/2309.17453,
        section 3.2; Kwon et al., "Efficient memory management for large language model serving with PagedAttention",
        https://arxiv.org/abs/2309.06180.

    >>> cache = KVCache()
    >>> cache.append(torch.zeros(1, 1, 3, 2), torch.eye(4)[None, None, :3])
    >>> cache.append(torch.zeros(1, 1, 1, 2), torch.eye(4)[None, None, 3:])
    >>> out = cache.attend(torch.zeros(1, 1, 1, 2), torch.tensor([0.5]))
    >>> [round(weight, 4) for weight in out[0, 0, 0].tolist()]
    [0.1015, 0.1674, 0.276, 0.4551]
    """

    def __init__(
        self,
        *,
        window: tuple[int | None, int | None] | None = None,
        sinks: int = 0,
        distance: Literal["text", "cache"] = "text",
        capacity: int | None = None,
        page_size: int | None = None,
        block: int = 64,
    ) -> None:
        self._left, right = check_window(window)
        self._window = None if window is None else (self._left, right)
        self._sinks = check_count("sinks", sinks)
        if distance not in ("text", "cache"):
            raise ValueError(f"distance must be 'text' or 'cache', got {distance!r}")
        if self._left is None and (sinks or distance == "cache"):
            raise ValueError("sinks and distance='cache' need window=(left, ...): without it nothing is evicted")
        for name, size in (("capacity", capacity), ("page_size", page_size), ("block", block)):
            if size is not None and check_count(name, size) < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if capacity is not None and (window is not None or page_size is not None):
            raise ValueError("capacity goes with neither window nor page_size: a static cache moves nothing")
        self._streams = distance == "cache" and sinks > 0
        self._capacity, self._page_size, self._block = capacity, page_size, block
        self._storage: Storage | None = None
        self._layout = Layout()

    def append(
        self, key: Tensor, value: Tensor, *, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Take in T new tokens of every sequence.

        Args:
            key: (B, G, T, D), floating. The first call fixes B, G, D, dtype and device.
            value: (B, G, T, V), the key's dtype.
            mask: (T,) or (B, T) bool, False = padding, on either side or within. Padding is not kept, and its query
                rows give 0 in `attend`.
            positions: (T,) or (B, T) integers, in any order; default: one after the token before. Not with a window,
                which evicts by counting tokens.

        Raises:
            TypeError, ValueError: shapes, dtypes or devices that do not fit the cache.
            RuntimeError: key or value require a gradient: a cache overwrites its memory, which no backward could undo.
            IndexError: more tokens than ``capacity``.
        """
        check_tokens(key, value, self._storage)
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError(
                "key and value must not require a gradient: the cache writes over its memory. Append under "
                "torch.no_grad() or .detach() them; to train, give all keys to alibi_attention"
            )
        batch, _, tokens, _ = key.shape
        real = None if mask is None else token_rows("mask", mask, batch, tokens, (torch.bool,), key)
        if positions is not None:
            if self._window is not None:
                raise ValueError("positions cannot be given to a cache with a window, which evicts by counting tokens")
            check_tensor("positions", positions, key)
            positions = position_rows("positions", positions, batch, tokens, None, key.dtype)
        if self._storage is None:
            self._storage, self._layout = self._open(key, value), Layout(self._capacity, key.device)
        self._layout.make_room(self._storage, tokens, real, self._left, self._sinks)
        self._layout.write(self._storage, key, value, real, positions)

    def _open(self, key: Tensor, value: Tensor) -> Storage:
        if self._page_size is not None:
            return Pages(key, value, self._page_size)
        if self._capacity is not None:
            return Slots(key, value, self._capacity, self._block)
        tokens = key.shape[2]
        ahead = tokens + max(self._block, tokens // 8)
        if self._left is None:
            return Slots(key, value, ahead, self._block)
        # A step reads the whole window, so moving it once in an eighth of its length is cheap, and so is the memory.
        limit = self._sinks + self._left + 1 + max(self._block, self._left // 8)
        return Slots(key, value, max(tokens, min(ahead, limit)), self._block, limit)

    def _opened(self) -> Storage:
        if self._storage is None:
            raise RuntimeError("the cache is empty: append(key, value) first")
        return self._storage

    def attend(
        self,
        query: Tensor,
        slopes: Tensor,
        *,
        causal: bool = True,
        backend: str = "auto",
        return_aux: bool = False,
        **options: Unpack[SharedOptions],
    ) -> Tensor | tuple[Tensor, Aux]:
        """`alibi_attention` of the newest tokens to everything kept.

        Args:
            query: (B, H, T, D), the last T tokens of each sequence. After padded tokens, and with as many rows, it is
                those tokens, and padding gives 0.
            slopes: (H,), (1, H) or (B, H).
            causal: True by default, unlike elsewhere, because what a cache holds is the past.
            backend, return_aux: as for `alibi_attention`.
            options: scale, softcap, tolerance, dropout_p, future_slopes, unbiased, attn_mask, and where the cache has
                no window also window, sinks, prefix. ``attn_mask`` covers (B, H, T, S), with S and its order those of
                ``positions``. ``unbiased`` counts the tokens of each sequence.

        Returns:
            (B, H, T, V), as `alibi_attention`; a gradient flows to the query and the slopes, until the next append.

        Raises:
            TypeError: an option that belongs to the cache, naming what to do instead, or that does not exist.
            RuntimeError: nothing was appended yet.
            ValueError: more rows than a window has left what they see: as a rule, those of the last append can be asked
                for. On a device other than the CPU, where the lengths of sequences that differ are not read, such rows
                are undefined. Else, and BackendUnavailable, as `alibi_attention`.
        """
        storage, layout = self._opened(), self._layout
        if check_tensor("query", query).dim() != 4:
            raise ValueError(f"query must have shape (batch, heads, tokens, head dim), got {tuple(query.shape)}")
        given: AttentionOptions = {"causal": causal, **options}
        check_options(options, windowed=self._window is not None)
        if self._window is not None:
            layout.check_rows(query.shape[2], self._left)
            given.update(window=self._window, sinks=self._sinks)
        key, value, bounds, table = storage.read(layout.end, query.shape[2])
        streams = self._streams and not layout.fits(self._sinks + (self._left or 0) + 1)
        if layout.aligned and storage.positions is None and table is None and not streams:
            if bounds is not None:
                given["key_bounds"] = bounds
            problem, operands = prepare(query, key, value, slopes, given)
        else:
            inputs = autocast(query, key, value)
            parts = inputs[1:] if table is None else (each[:1].expand(len(table), -1, -1, -1) for each in inputs[1:])
            check_inputs(inputs[0], *parts)
            unbiased = check_count("unbiased", given.get("unbiased", 0))
            tokens, real = placed(storage, layout, query.shape[2], unbiased, spelled=streams)
            lengths = layout.lengths if isinstance(layout.lengths, Tensor) else None
            if real is not None:
                given["attn_mask"] = real if (mask := given.get("attn_mask")) is None else real & mask
            # Rounding may lengthen a key beyond the bound that was kept of it.
            bounds = bounds if inputs[1].dtype == key.dtype else None
            problem, operands = resolve(inputs, slopes, given, tokens, bounds=bounds, lengths=lengths, table=table)
        if not (streams or return_aux):
            return output(problem, operands, backend)
        result = stream(operands, problem.options, backend) if streams else run(problem, operands, backend)
        return (result.out, Aux.of(result)) if return_aux else result.out

    def crop(self, length: int | Tensor) -> None:
        """Keep the first `length` tokens of each sequence's text, e.g. those a draft got right.

        Args:
            length: one number, or (B,) integers, one a sequence; what a sequence does not have is not added.

        Raises:
            ValueError: a negative number, or one so far back that what its window shows was evicted.
        """
        storage = self._opened()
        self._layout.crop(check_counts("length", length, storage), self._left)
        storage.forget(self._layout.lengths)

    def drop(self, count: int | Tensor) -> None:
        """Take the last `count` tokens of each sequence away.

        Args:
            count: one number, or (B,) integers, one a sequence.

        Raises:
            ValueError: a negative number, more than a sequence has had (numbers on a device other than the CPU are not
                compared, and take away what there is), or so many that what the new last token's window shows was
                evicted.
        """
        storage = self._opened()
        counts = check_counts("count", count, storage)
        check_drop(counts, self._layout)
        self._layout.crop(self._layout.seen - counts, self._left)
        storage.forget(self._layout.lengths)

    def remove(self, start: int, stop: int) -> None:
        """Take tokens `start` to `stop` - 1 of each sequence's text away and close the gap: later ones move up to it.

        Exact for one layer of attention, which knows distances alone; keys of deeper layers remember what was removed.

        Raises:
            ValueError: not ``0 <= start <= stop <=`` the longest sequence, or a cache with a window, which evicts.
        """
        storage = self._opened()
        if self._window is not None:
            raise ValueError("remove needs a cache without a window, which says itself what to keep; see crop and drop")
        tail = tail_behind(storage, self._layout, start, stop)
        self.crop(start)
        self.append(**tail)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence n becomes a copy of the one at ``index[n]``, as beam search needs after each step.

        Args:
            index: (B,) integers, repeats allowed.

        Raises:
            TypeError, ValueError: not integers, or not B of them; `select` changes their number.
        """
        chosen = check_index("index", index, self._opened())
        if len(chosen) != (batch := self._opened().sizes[0]):
            raise ValueError(f"reorder needs {batch} numbers, one a sequence, got {len(chosen)}; see select")
        self.select(chosen)

    def select(self, index: Tensor | Sequence[int]) -> None:
        """Keep, repeat or leave out sequences: the batch becomes the sequences at `index`.

        With pages no key is copied: repeated sequences share pages until they differ.

        Args:
            index: (n,) integers in 0..B-1, repeats allowed.

        Raises:
            TypeError: not integers in one dimension.
            ValueError: a number that no sequence has, where reading it is free: in a list, or on the CPU.
        """
        storage = self._opened()
        chosen = check_index("index", index, storage)
        with torch.inference_mode(False), torch.no_grad():  # what inference mode makes could not be written to outside
            storage.select(chosen, self._layout.end)
            self._layout.select(chosen)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "KVCache":
        """Move the cache, or convert its keys and values to another floating dtype; returns itself."""
        storage = self._opened()
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):  # pyright: ignore
            raise TypeError(f"dtype must be a floating torch.dtype, or None to keep {storage.key.dtype}, got {dtype!r}")
        with torch.inference_mode(False), torch.no_grad():
            storage.to(None if device is None else torch.device(device), dtype)
        self._layout.to(storage.key.device)
        return self

    def reset(self) -> None:
        """Forget every token and keep the memory."""
        if self._storage is not None:
            self._storage.clear()
            self._layout = Layout(self._capacity, self._storage.key.device)

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: tokens kept of each sequence."""
        return self._counts(self._layout.lengths)

    @property
    def seen(self) -> Tensor:
        """(B,) int64: tokens of each sequence so far, evicted ones included."""
        return self._counts(self._layout.seen)

    def _counts(self, counts: Counts) -> Tensor:
        storage = self._opened()
        return torch.as_tensor(counts, device=storage.key.device).expand(storage.sizes[0])

    @property
    def positions(self) -> Tensor:
        """(B, S) int64: the position in its text of each key that `attend` looks at; -1 where there is none."""
        storage, layout = self._opened(), self._layout
        slots = layout.slots(storage.key.device)
        places, real = token_positions(storage, layout, slots), layout.real(slots)
        places = places if real is None else torch.where(real, places, -1)
        return places.expand(storage.sizes[0], -1)

    def report(
        self,
        slopes: Tensor,
        *,
        query: Tensor | None = None,
        scale: float | None = None,
        tolerance: float | None = None,
    ) -> CacheReport:
        """How many of the kept keys each head can still see; print it, or take the numbers from it.

        Without a query it tells what the slopes alone hide: keys beyond `linbias.reach` of heads whose scores are all
        equal. With one, the reach also allows for the largest score that the norms of queries and keys permit.

        Args:
            slopes: (H,), (1, H) or (B, H).
            query: (B, H, T, D), e.g. those of the newest tokens; None: content is left out.
            scale: of the scores, default 1 / sqrt(D).
            tolerance: share of the softmax weight that counts as unseen; default that of `alibi_attention`.
        """
        storage = self._opened()
        tolerance = check_tolerance(tolerance, default_tolerance(storage.key.dtype))
        rows = slope_rows("slopes", slopes, storage.sizes[0], None, torch.float64, storage.key).detach()
        content = 0.0 if query is None else content_of(storage, self._layout, query, scale)
        pairs = newest_pairs(storage, self._layout, self._left, self._sinks, capped=self._streams)
        return CacheReport.of(pairs, self.lengths, rows, content, self._sinks or 1, tolerance)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held for keys and values."""
        return 0 if self._storage is None else self._storage.key.nbytes + self._storage.value.nbytes

    @property
    def block_table(self) -> Tensor:
        """(B, n) int32: the page of each stretch of slots, 0 where a sequence has none; see ``key_pages``."""
        return self._pages().table(self._layout.end).int()

    @property
    def key_pages(self) -> Tensor:
        """(pages, page_size, G, D): the pool that `block_table` points into, with flash-attn's dimensions."""
        return self._pages().key.permute(1, 2, 0, 3)

    def _pages(self) -> Pages:
        storage = self._opened()
        if not isinstance(storage, Pages):
            raise ValueError("this cache has no pages; make it with KVCache(page_size=...)")
        return storage

    @property
    def value_pages(self) -> Tensor:
        """(pages, page_size, G, V)."""
        return self._pages().value.permute(1, 2, 0, 3)
