# SPDX-License-Identifier: Apache-2.0
"""The table of problems that every backend must solve.

Sizes are odd and all different, so that no mixed-up dimension goes unseen; each option comes alone, in the
combinations that interact, and in random company; some lengths span many tiles of a kernel, so that skipping happens.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, replace
from itertools import product
from typing import Any

import torch

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "dtype")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table. Words say how an input is drawn; `make_inputs` knows them."""

    batch: int = 2
    heads: int = 3
    kv_heads: int | None = None
    """None: as many as heads."""
    queries: int = 19
    keys: int = 23
    head_dim: int = 16
    value_dim: int | None = None
    """None: head_dim."""
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    sinks: int = 0
    prefix: int = 0
    padding: str | None = None
    """key_mask: "left", "right", "holes", "shared" (one row for all items), "nothing" (the first item has no key)."""
    mask: str | None = None
    """attn_mask: "keys", "pairs", "heads", "items" or "full", after what it tells apart."""
    segments: str | None = None
    """"packed" (in order, of different lengths) or "mixed" (any numbers in any order)."""
    positions: str | None = None
    """"shifted", "keys" (key_positions alone), "jumps", "repeats", "unsorted", "items" (a row an item), "far" (2^40
    on), "away" (queries 10,000 beyond the last key);
    "grid" and "points" are coordinates."""
    metric: str | None = None
    slopes: str = "press"
    """"press", "zero", "inf", "negative", "mixed" (all of these), "double" (float64), "row" (1, H), "items" (B, H)."""
    future: str | None = None
    """future_slopes, by the same words; "steeper" is twice press."""
    unbiased: int = 0
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    tolerance: float | None = None
    bounds: int = 0
    """Block of key_bounds; 0: none."""
    spread: float = 1.0
    """Standard deviation of query and key."""
    layout: str = "plain"
    """Strides: "plain", "tokens" (as (B, T, H, D)), "columns" (last dimension strided), "sliced", "expanded" (0)."""
    poison: bool = False
    """NaN and inf wherever nothing may look: keys no query sees, and queries and gradients of rows that see nothing."""
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        """As "B2-H3-T5-S7-D16-causal-bf16"; only what is not the default is named."""
        parts = [f"B{self.batch}", f"H{self.heads}", f"T{self.queries}", f"S{self.keys}", f"D{self.head_dim}"]
        if self.kv_heads is not None:
            parts.insert(2, f"G{self.kv_heads}")
        if self.value_dim is not None:
            parts.append(f"V{self.value_dim}")
        parts += [_word(option.name, getattr(self, option.name)) for option in _named(self)]
        return "-".join([*parts, _SHORT[self.dtype]])

    @property
    def seed(self) -> int:
        """Of the inputs: the same for every run of this case, another for every other case."""
        return zlib.crc32(str(self).encode())


def _named(case: Case) -> Iterator[Field[Any]]:
    return (each for each in fields(case) if each.name not in _SIZES and getattr(case, each.name) != each.default)


def _word(name: str, value: object) -> str:
    if value is True:
        return name
    if isinstance(value, tuple):
        return name + "_".join("" if side is None else str(side) for side in value)  # pyright: ignore
    return f"{name}={value}" if isinstance(value, (str, float)) else f"{name}{value}"


def _shapes() -> Iterator[Case]:
    """Heads, groups, T against S, head dims and dtypes; enough numbers in each that the plain error is no luck."""
    shapes = (  # batch, heads, kv_heads, queries, keys, head_dim, value_dim
        (11, 1, None, 1, 1, 7, None),
        (2, 3, None, 5, 7, 16, None),
        (2, 6, 2, 25, 27, 1, 5),
        (3, 8, 1, 1, 13, 64, None),
        (2, 8, 2, 13, 6, 80, 48),
        (1, 3, None, 17, 33, 128, None),
        (2, 1, None, 6, 11, 256, 40),
        (1, 3, 1, 70, 67, 64, 80),
    )
    names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim")
    for shape, dtype, causal in product(shapes, _SHORT, (True, False)):
        sizes: dict[str, Any] = dict(zip(names, shape, strict=True))
        yield Case(**sizes, dtype=dtype, causal=causal)


def _empty() -> Iterator[Case]:
    """No queries, no keys, no items."""
    empty: tuple[dict[str, Any], ...] = ({"queries": 0}, {"keys": 0}, {"batch": 0}, {"queries": 0, "keys": 0})
    for sizes in empty:
        yield Case(**sizes)
        yield Case(**sizes, kv_heads=1, causal=True, slopes="items", unbiased=1, dtype=torch.bfloat16)


def _visibility() -> Iterator[Case]:
    """Each way to hide a key, alone and with those it interacts with."""
    for window in ((0, 0), (2, 0), (3, 4), (None, 2), (5, None), (None, None), (0, None), (99, 99)):
        yield Case(window=window)
        yield Case(window=window, causal=True, sinks=2)
    for queries in (5, 29):  # the ends stay aligned when T differs from S on either side
        yield Case(queries=queries, causal=True, window=(4, 0), poison=True)
        yield Case(queries=queries, causal=True, prefix=3, sinks=1, window=(4, 1))
    yield Case(causal=True, prefix=7)
    yield Case(causal=True, prefix=99)
    yield Case(prefix=7, window=(3, 3))
    yield Case(sinks=99, window=(1, 1))
    yield Case(sinks=2)  # without a window nothing is left to escape
    yield Case(prefix=2)
    for padding in ("left", "right", "holes", "shared", "nothing"):
        yield Case(padding=padding, poison=True)
        yield Case(padding=padding, causal=True, poison=True, kv_heads=1)
        yield Case(padding=padding, causal=True, window=(4, 0), sinks=2, prefix=3, poison=True)
    for mask in ("keys", "pairs", "heads", "items", "full"):
        yield Case(mask=mask)
        yield Case(mask=mask, causal=True, window=(6, 0), padding="left", heads=6, kv_heads=3)
    for segments in ("packed", "mixed"):
        yield Case(segments=segments)
        yield Case(segments=segments, causal=True, poison=True)
        yield Case(segments=segments, causal=True, window=(3, 0), sinks=1, prefix=2, padding="holes", poison=True)
        yield Case(segments=segments, mask="full", padding="right", unbiased=2)


def _positions() -> Iterator[Case]:
    """Positions of every kind, one-dimensional and not."""
    for positions in ("shifted", "keys", "jumps", "repeats", "unsorted", "items", "far"):
        yield Case(positions=positions)
        yield Case(positions=positions, causal=True, queries=11, future="steeper")
        yield Case(positions=positions, causal=True, window=(5, 0), sinks=2, poison=True)
        yield Case(positions=positions, window=(4, 3), future="items", unbiased=2, dtype=torch.float64)
    yield Case(positions="away", queries=67, keys=71, heads=6, kv_heads=2, dtype=torch.float64)
    yield Case(positions="unsorted", causal=True, prefix=4, segments="mixed", padding="holes", poison=True)
    for metric, positions in product(("euclidean", "manhattan"), ("grid", "points")):
        yield Case(positions=positions, metric=metric)
        yield Case(positions=positions, metric=metric, slopes="mixed", unbiased=1, padding="left", poison=True)
        yield Case(positions=positions, metric=metric, segments="packed", mask="pairs", dtype=torch.bfloat16)


def _slopes() -> Iterator[Case]:
    """Slopes of every shape and kind, on either side, and tokens without bias."""
    for slopes in ("zero", "inf", "negative", "mixed", "double", "row", "items"):
        yield Case(slopes=slopes)
        yield Case(slopes=slopes, causal=True, heads=6, kv_heads=2)
    for slopes, future in (
        ("press", "steeper"),
        ("press", "zero"),
        ("press", "inf"),
        ("inf", "press"),
        ("zero", "inf"),
        ("items", "row"),
        ("row", "items"),
        ("mixed", "negative"),
        ("double", "double"),
        ("negative", "mixed"),
    ):
        yield Case(slopes=slopes, future=future)
        yield Case(slopes=slopes, future=future, unbiased=2, poison=True, positions="repeats")
    yield Case(slopes="press", future="steeper", causal=True)  # no key is later, so its gradient is 0
    for unbiased in (1, 3, 99):
        yield Case(unbiased=unbiased)
        yield Case(unbiased=unbiased, causal=True, queries=7, slopes="mixed")
    yield Case(unbiased=2, queries=29, slopes="inf", poison=True)


def _content() -> Iterator[Case]:
    """What happens to the score before the bias, and to the weights after."""
    yield Case(scale=0.0)
    yield Case(scale=-0.3, causal=True)
    yield Case(scale=1.0, slopes="mixed", softcap=5.0)
    yield Case(softcap=2.0, causal=True)
    yield Case(softcap=30.0, spread=4.0, window=(6, 6), dtype=torch.float64)
    yield Case(spread=6.0, causal=True)  # one key wins whole rows
    yield Case(spread=1e-4, causal=True)
    for dtype in _SHORT:
        yield Case(dropout_p=0.3, causal=True, heads=6, kv_heads=2, dtype=dtype)
    yield Case(dropout_p=0.5, segments="mixed", padding="holes", softcap=3.0, future="steeper", poison=True)
    yield Case(dropout_p=0.1, positions="grid", metric="euclidean")
    yield Case(tolerance=0.0, causal=True)
    yield Case(tolerance=0.01, causal=True, heads=6, kv_heads=3)


def _layouts() -> Iterator[Case]:
    """Strides that are not those of a fresh tensor."""
    for layout in ("tokens", "columns", "sliced", "expanded"):
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(layout=layout, dtype=dtype, kv_heads=1, causal=True)
            yield Case(layout=layout, dtype=dtype, head_dim=7, value_dim=9, window=(6, 2), padding="left")


def _long() -> Iterator[Case]:
    """Many tiles a side, so that whole tiles are invisible or too far to matter."""
    long = Case(batch=1, heads=3, kv_heads=1, queries=321, keys=321)
    for dtype in _SHORT:
        yield replace(long, causal=True, dtype=dtype)
        yield replace(long, dtype=dtype, slopes="items")
    yield replace(long, queries=193, causal=True, prefix=40, window=(70, 0), sinks=3)
    yield replace(long, queries=193, keys=130, causal=True, padding="right", poison=True)
    yield replace(long, batch=2, causal=True, segments="packed", padding="left", poison=True)
    yield replace(long, batch=2, future="steeper", slopes="mixed", unbiased=2, mask="items")
    yield replace(long, positions="unsorted", causal=True, window=(90, 0))
    yield replace(long, positions="grid", metric="euclidean")
    yield replace(long, positions="points", metric="manhattan", slopes="double")
    yield replace(long, causal=True, dropout_p=0.2, softcap=10.0)
    yield replace(long, causal=True, slopes="steeper", spread=2.5)
    yield replace(long, causal=True, bounds=64)
    yield replace(long, window=(50, 20), bounds=32, dtype=torch.bfloat16)
    yield replace(long, causal=True, tolerance=0.05, slopes="steeper")
    yield replace(long, keys=517, causal=True, slopes="row")
    yield replace(long, causal=True, slopes="negative", softcap=5.0)  # a cap bounds the score, not a rewarded distance
    yield replace(long, slopes="negative", future="steeper", softcap=5.0, dtype=torch.float64)
    yield replace(long, heads=5, queries=7, keys=403, causal=True, slopes="mixed", dtype=torch.float64)
    yield replace(long, batch=2, causal=True, segments="mixed", padding="holes", poison=True)
    yield replace(long, batch=2, queries=3, keys=1027, head_dim=64, causal=True, padding="left", bounds=64)
    # More pairs than one piece of work holds, so that a row's softmax is merged.
    yield replace(long, heads=1, queries=131, keys=4103, head_dim=8, causal=True, softcap=20.0)
    yield replace(long, heads=6, queries=1, keys=1027, head_dim=64, causal=True, dtype=torch.bfloat16)
    yield Case(batch=1, heads=1, queries=517, keys=517, head_dim=64, causal=True, tolerance=0.0)


def _random(count: int) -> Iterator[Case]:
    """Random company: every option with every other, sooner or later."""
    draw = random.Random(0)
    for _ in range(count):
        metric = draw.choice((None, None, None, "euclidean", "manhattan"))
        ordered = metric is None
        heads, kv_heads = draw.choice(((3, None), (6, 2), (8, 1), (1, None)))
        queries, keys = draw.choice(((11, 17), (21, 14), (1, 19), (73, 71)))
        positions = (None, "keys", "jumps", "repeats", "unsorted", "items") if ordered else ("grid", "points")
        chosen = draw.choice(positions)
        yield Case(
            heads=heads,
            kv_heads=kv_heads,
            queries=min(queries, keys) if chosen == "keys" else queries,
            keys=keys,
            head_dim=draw.choice((5, 16, 24)),
            causal=ordered and draw.random() < 0.5,
            window=draw.choice((None, (4, 0), (7, 5), (None, 3))) if ordered else None,
            sinks=draw.choice((0, 0, 2)) if ordered else 0,
            prefix=draw.choice((0, 0, 3)) if ordered else 0,
            padding=draw.choice((None, "left", "right", "holes", "shared", "nothing")),
            mask=draw.choice((None, None, "keys", "pairs", "heads", "items", "full")),
            segments=draw.choice((None, None, "packed", "mixed")),
            positions=chosen,
            metric=metric,
            slopes=draw.choice(("press", "mixed", "items", "negative", "row")),
            future=draw.choice((None, "steeper", "inf", "items", "zero")) if ordered else None,
            unbiased=draw.choice((0, 0, 2)),
            softcap=draw.choice((None, None, 4.0)),
            dropout_p=draw.choice((0.0, 0.0, 0.25)),
            poison=True,
            dtype=draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)),
        )


PROBLEMS: tuple[Case, ...] = (
    *_shapes(),
    *_empty(),
    *_visibility(),
    *_positions(),
    *_slopes(),
    *_content(),
    *_layouts(),
    *_long(),
    *_random(60),
)
"""Every backend solves these; see `tests/backends/test_conformance.py`."""
