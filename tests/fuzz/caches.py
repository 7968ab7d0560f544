# SPDX-License-Identifier: Apache-2.0
"""Random histories of a `KVCache` against its texts, kept as lists and recomputed from the start."""

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from linbias import alibi_slopes
from linbias.cache import KVCache
from linbias.testing import Inputs
from tests.caching import poison
from tests.fuzz.loop import Fuzzer, runners, running
from tests.fuzz.rounding import Room, assert_right, tolerance_of
from tests.judged import answers

STORAGES = {"growing": {}, "small blocks": {"block": 3}, "static": {"capacity": 64}, "pages": {"page_size": 4},
            "one a page": {"page_size": 1}, "large pages": {"page_size": 11}}  # fmt: skip
EVENTS = ("append",) * 6 + ("attend",) * 6 + ("crop", "drop", "reorder", "select", "fork", "back", "convert", "reset")


@dataclass(frozen=True, kw_only=True)
class History:
    """A cache and what happens to it; each event has a number from which the rest of it is drawn."""

    storage: str = "growing"
    window: tuple[int, int | None] | None = None
    sinks: int = 0
    distance: str = "text"
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    dtype: torch.dtype = torch.float32
    padded: bool = False
    placed: bool = False
    """Tokens come with positions of any order."""
    steepness: float = 1.0
    events: tuple[tuple[str, int], ...] = ()


def draw(given: random.Random) -> History:
    """Any cache, and up to 40 events."""
    pick = given.choice
    storage, window = pick(list(STORAGES)), pick((None, (5, 0), (0, 0), (9, None), (3, 2), (40, 0)))
    if storage == "static":
        window = None
    sinks = pick((0, 1, 3)) if window else 0
    return History(
        storage=storage, window=window, sinks=sinks, distance=pick(("text", "cache")) if window else "text",
        batch=pick((1, 2, 3)), kv_heads=pick((1, 2)), group=pick((1, 3)), steepness=pick((0.1, 1.0, 8.0)),
        dtype=pick((torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)),
        padded=pick((True, False)), placed=window is None and given.random() < 0.2,
        events=tuple((pick(EVENTS), given.randrange(10**6)) for _ in range(given.randint(4, 40))),
    )  # fmt: skip


@dataclass
class Text:
    """What one sequence should hold."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def cut(self, length: int) -> None:
        """Only the first tokens stay."""
        self.keys, self.values, self.places = self.keys[:length], self.values[:length], self.places[:length]

    def next(self) -> int:
        """Where a token stands that comes without a position."""
        return self.places[-1] + 1 if self.places else 0


class Pair:
    """A cache and its texts, to which the same things happen."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.cache = KVCache(**STORAGES[history.storage], window=history.window, sinks=history.sinks,
                             distance=history.distance)  # fmt: skip
        self.texts = [Text() for _ in range(history.batch)]
        self.dtype = history.dtype
        self.chunk: Tensor | None = torch.zeros(history.batch, 0, dtype=torch.bool)
        """(B, T): which tokens of the last append were real; None since something else happened."""

    def append(self, given: random.Random) -> None:
        """New tokens, with any padding, in any place."""
        tokens, batch = given.choice((1, 1, 1, 2, 3, 5, 12, 0)), len(self.texts)
        generator = torch.Generator().manual_seed(given.randrange(10**6))
        key, value = (
            torch.randn(batch, self.history.kv_heads, tokens, dim, generator=generator).to(self.dtype) for dim in (7, 5)
        )
        real = torch.ones(batch, tokens, dtype=torch.bool)
        if self.history.padded and given.random() < 0.5:
            real = torch.rand(batch, tokens, generator=generator) < given.choice((0.0, 0.4, 0.8))
            key, value = (each.masked_fill(~real[:, None, :, None], torch.nan) for each in (key, value))
        places = torch.randint(-9, 60, (batch, tokens), generator=generator) if self.history.placed else None
        longest = max(len(text.keys) for text in self.texts)
        masked = self.history.padded and (given.random() < 0.3 or not bool(real.all()))
        try:
            self.cache.append(key, value, mask=real if masked else None, positions=places)
        except IndexError:
            assert self.history.storage == "static" and longest + tokens > 64, "refused, though there is room"
            return
        assert self.history.storage != "static" or longest + tokens <= 64, "more than the capacity was taken"
        for n, text in enumerate(self.texts):
            for t in range(tokens):
                if real[n, t]:
                    text.places.append(text.next() if places is None else int(places[n, t]))
                    text.keys.append(key[n, :, t])
                    text.values.append(value[n, :, t])
        self.chunk = real

    def attend(self, given: random.Random) -> list[str]:
        """From the rows of the last append or from any number of last tokens, on every backend."""
        least = min(len(text.keys) for text in self.texts)
        whole = self.chunk is not None and given.random() < 0.6
        rows = self.chunk.shape[1] if whole and self.chunk is not None else min(given.choice((1, 1, 2, 7)), least)
        real = torch.ones(len(self.texts), rows, dtype=torch.bool)
        if self.chunk is not None and rows == self.chunk.shape[1]:
            real = self.chunk
        heads = self.history.kv_heads * self.history.group
        generator = torch.Generator().manual_seed(given.randrange(10**6))
        query = torch.randn(len(self.texts), heads, rows, 7, generator=generator).to(self.dtype)
        slopes = self.history.steepness * alibi_slopes(heads)
        options = self._options(given, slopes)
        query = query.masked_fill(~real[:, None, :, None], torch.nan)
        expected = [self._recomputed(n, query[n : n + 1, :, real[n]], slopes, options) for n in range(len(self.texts))]
        names: list[str] = []
        for runner in runners():
            with running(runner) as backend:
                try:
                    out, aux = self.cache.attend(query, slopes, backend=backend, return_aux=True, **options)
                except ValueError as refusal:
                    self._assert_due(refusal, rows)
                    names.append(f"{runner.name} refused")
                    continue
                assert not out.masked_fill(real[:, None, :, None], 0.0).any(), "padding gives something"
                for n, judge in enumerate(expected):
                    one, limit = slice(n, n + 1), real[n]
                    for inputs, exact, bounds, row in judge:
                        chosen = limit.nonzero()[row, 0]
                        found = {"out": out[one, :, chosen], "lse": aux.lse[one, :, chosen]}
                        assert_right(found, exact, inputs, bounds)
                        assert (aux.skipped[one] <= tolerance_of(inputs)).all(), "skipped beyond the tolerance"
                names.append(runner.name)
        return names

    def _assert_due(self, refusal: ValueError, rows: int) -> None:
        """Only what a window evicted may be refused, and never the rows of the last append."""
        assert self.history.window is not None and "evicted" in str(refusal), refusal
        assert self.chunk is None or rows > self.chunk.shape[1] or not self.chunk.all(), refusal

    def _options(self, given: random.Random, slopes: Tensor) -> dict[str, Any]:
        pick = given.choice
        options: dict[str, Any] = {"softcap": pick((None, None, 3.0)), "scale": pick((None, None, 0.7))}
        if given.random() < 0.2:
            options["tolerance"] = pick((0.0, 1e-3))
        if self.history.distance == "text":
            options |= {"unbiased": pick((0, 0, 2)), "causal": pick((True, True, False))}
            options["future_slopes"] = pick((None, None, 2 * slopes))
        if self.history.window is None:
            options |= {"window": pick((None, None, (4, 0), (9, 3))), "sinks": pick((0, 0, 2)), "prefix": pick((0, 3))}
        return options

    def _recomputed(self, n: int, query: Tensor, slopes: Tensor, options: dict[str, Any]) -> list[tuple]:
        """Calls of one sequence's text, with their answers and bounds and the rows they answer for."""
        text = self.texts[n]
        if not text.keys or not query.shape[2]:
            return []
        key, value = torch.stack(text.keys, 1)[None], torch.stack(text.values, 1)[None]
        places, rows = torch.tensor(text.places), query.shape[2]
        call = {"causal": True, "window": self.history.window, "sinks": self.history.sinks, **options}
        if self.history.distance == "text":
            at = {"query_positions": places[len(places) - rows :], "key_positions": places}
            return [_judge(query, key, value, slopes, call | at, slice(None))]
        return [
            _judge(query[:, :, [i]], *self._capped(key, value, len(places) - rows + i, call), [i], slopes=slopes)
            for i in range(rows)
        ]

    def _capped(self, key: Tensor, value: Tensor, here: int, call: dict[str, Any]) -> tuple:
        """What token `here` sees, a sink at min(p - r, sinks + left - r)."""
        assert self.history.window is not None
        left, sinks = self.history.window[0], self.history.sinks
        kept = [*range(min(sinks, here + 1)), *range(max(sinks, here - left), here + 1)]
        places = [here - min(here - r, sinks + left - r) if r < sinks else r for r in kept]
        at = {"query_positions": torch.tensor([here]), "key_positions": torch.tensor(places)}
        return key[:, :, kept], value[:, :, kept], call | at | {"window": None, "sinks": 0}

    def shorten(self, name: str, given: random.Random) -> None:
        """crop or drop, by one number or by one a sequence."""
        lengths = [len(text.keys) for text in self.texts]
        counts = [given.randint(0, length) for length in lengths]
        if given.random() < 0.6:  # not far, so that a window has it
            counts = [max(length - given.randint(0, 2), 0) for length in lengths]
        if given.random() < 0.5:
            counts = [min(counts)] * len(counts)
        argument = counts if name == "crop" else [length - count for length, count in zip(lengths, counts, strict=True)]
        same = len(set(argument)) == 1 and given.random() < 0.7
        try:
            getattr(self.cache, name)(argument[0] if same else torch.tensor(argument))
        except ValueError as refusal:
            assert self.history.window is not None and "evicted" in str(refusal), refusal
            return
        for text, count in zip(self.texts, counts, strict=True):
            text.cut(count)
        self.chunk = None

    def choose(self, name: str, given: random.Random) -> None:
        """reorder or select."""
        batch = len(self.texts)
        index = [given.randrange(batch) for _ in range(batch if name == "reorder" else given.randint(1, 4))]
        getattr(self.cache, name)(index if given.random() < 0.5 else torch.tensor(index))
        self.texts = [copy.deepcopy(self.texts[n]) for n in index]
        self.chunk = None if self.chunk is None else self.chunk[index]

    def convert(self, given: random.Random) -> None:
        """To another dtype."""
        self.dtype = given.choice((torch.float32, torch.float64, torch.bfloat16))
        self.cache.to(dtype=self.dtype)
        for text in self.texts:
            text.keys, text.values = ([each.to(self.dtype) for each in part] for part in (text.keys, text.values))

    def reset(self) -> None:
        """Nothing is left."""
        self.cache.reset()
        self.texts, self.chunk = [Text() for _ in self.texts], torch.zeros(len(self.texts), 0, dtype=torch.bool)


def _judge(query: Tensor, key: Tensor, value: Tensor, *more: Any, slopes: Tensor | None = None) -> tuple:
    given, options, rows = (slopes, *more) if slopes is not None else more
    numbers = {"causal": True, "metric": None, "unbiased": 0, "dropout_p": 0.0, "prefix": 0, **options}
    future = numbers.pop("future_slopes", None)
    none = torch.zeros(*query.shape[:3], value.shape[3], dtype=query.dtype)
    inputs = Inputs(query, key, value, given, future, none, none[..., 0].to(given.dtype), numbers)
    if numbers.get("tolerance") is None:
        numbers.pop("tolerance", None)
    room = Room.of(inputs)
    return inputs, answers(inputs), {"out": room.off_out, "lse": room.off_lse}, rows


def check(history: History) -> list[str]:
    """Raise where the cache and its texts differ."""
    names: list[str] = []
    with poison():
        pairs = [Pair(history)]
        pairs[0].append(random.Random(0))
        for name, number in history.events:
            given, pair = random.Random(number), pairs[-1]
            if name == "append":
                pair.append(given)
            elif name == "attend":
                names += pair.attend(given)
            elif name in ("crop", "drop"):
                pair.shorten(name, given)
            elif name in ("reorder", "select"):
                pair.choose(name, given)
            elif name == "fork":
                pairs.append(copy.deepcopy(pair))
            elif name == "back":
                pairs = pairs[-1:] + pairs[:-1]
            elif name == "convert":
                pair.convert(given)
            elif name == "reset":
                pair.reset()
            assert pair.cache.seen.tolist() == [len(text.keys) for text in pair.texts], "tokens were miscounted"
        for pair in pairs:
            names += pair.attend(random.Random(1))
    return names


FUZZER = Fuzzer(draw, check)
