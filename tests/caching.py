# SPDX-License-Identifier: Apache-2.0
"""What the tests of the cache share."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from linbias import alibi_attention
from linbias.cache import KVCache, pages, storage
from linbias.testing import assert_within_budget

STORAGES = {
    "growing": {},
    "small blocks": {"block": 3},
    "static": {"capacity": 64},
    "pages": {"page_size": 4},
}
STEPS = (7, 1, 1, 1, 4, 9)


@contextmanager
def poison() -> Iterator[None]:
    """Memory that nothing was written to holds NaN, so that reading it shows."""

    def filled(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        kind = dtype or like.dtype
        with torch.inference_mode(False):
            return torch.full(shape, torch.nan if kind.is_floating_point else -(2**40), dtype=kind, device=like.device)

    with patch.object(storage, "unfilled", filled), patch.object(pages, "unfilled", filled):
        yield


@pytest.fixture
def poisoned() -> Iterator[None]:
    with poison():
        yield


def make(
    tokens: int, batch: int = 2, heads: int = 6, kv_heads: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with all-different sizes."""
    sizes = ((heads, 7), (kv_heads, 7), (kv_heads, 5))
    query, key, value = (torch.randn(batch, count, tokens, dim).to(dtype) for count, dim in sizes)
    return query, key, value


def assert_equals_full(actual: Tensor, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, **options) -> None:
    """`actual` is the last rows of one call on everything, within the rounding budget."""
    rows = slice(query.shape[2] - actual.shape[2], None)
    options = {"causal": True, "backend": "reference", **options}
    plain = alibi_attention(query, key, value, slopes, **options)
    exact = alibi_attention(query.double(), key.double(), value.double(), slopes, **options)
    allowance = 0.0
    if value.numel():
        kind = torch.float64 if value.dtype == torch.float64 else torch.float32
        allowance = torch.finfo(kind).eps / 2 * value.double().abs().max().item()
    assert_within_budget(actual, exact[:, :, rows], plain[:, :, rows], "out", allowance=allowance)


def run(cache: KVCache, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, steps=STEPS, **options) -> Tensor:
    """Append and attend step by step; the outputs side by side."""
    outputs, start = [], 0
    for count in steps:
        part = slice(start, start + count)
        cache.append(key[:, :, part], value[:, :, part])
        outputs.append(cache.attend(query[:, :, part], slopes, **options))
        start += count
    return torch.cat(outputs, dim=2)


def weights(cache: KVCache, slopes: Tensor, rows: int = 1, **options) -> Tensor:
    """What `attend` makes of values that are one-hot and queries of zeros: the weights, one row a query."""
    heads = slopes.shape[-1]
    return cache.attend(torch.zeros(1, heads, rows, 2), slopes, **options)[0]


def one_hot(tokens: int, **storage) -> KVCache:
    cache = KVCache(**storage)
    cache.append(torch.zeros(1, 1, tokens, 2), torch.eye(tokens)[None, None])
    return cache


def assert_weights(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=5e-7, rtol=0)
