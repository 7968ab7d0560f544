# SPDX-License-Identifier: Apache-2.0
"""docs/semantics.md once more, in numpy: float64, and more digits where large scores cancel. All backends answer to it.

Written from that page, for what the user passes, and without a line of linbias, so that no mistake can be in both.
Letters: B items, H query heads, G key heads, T queries, S keys, C coordinates.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_WORD, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The sizes and the public options of one call of `linbias.alibi_attention`, arrays in place of tensors."""

    shape: tuple[int, int, int, int]
    """(B, H, T, S)."""
    causal: bool
    window: tuple[int | None, int | None] | None = None
    sinks: int = 0
    prefix: int = 0
    key_mask: Any = None
    attn_mask: Any = None
    query_segments: Any = None
    key_segments: Any = None
    query_positions: Any = None
    key_positions: Any = None
    metric: str | None = None
    unbiased: int = 0
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    tolerance: float | None = None

    def rows(self, name: str) -> np.ndarray:
        """The named option as (B, T or S), or (B, T or S, C) under a metric, whether or not the items share it."""
        given = getattr(self, name)
        alone = 2 if self.metric is not None and name.endswith("positions") else 1
        return np.broadcast_to(given, (self.shape[0], *given.shape[-alone:]))

    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Of queries and of keys; the ends are aligned."""
        batch, _, queries, keys = self.shape
        there = np.arange(keys)[None] if self.key_positions is None else self.rows("key_positions")
        if self.query_positions is not None:
            return self.rows("query_positions"), there
        if self.key_positions is not None:
            return there[:, keys - queries :], there
        return np.arange(keys - queries, keys)[None], there

    def distances(self) -> tuple[np.ndarray, np.ndarray]:
        """(b, 1, T, S): how far the key is from the query, and whether it is later."""
        here, there = self.positions()
        here, there = here[:, None, :, None], there[:, None, None, :]
        if self.metric is None:
            # Without a sign the difference of any two int64 fits, and wraps around to the right one; then it is held.
            later, (one, other) = there > here, (each.astype(np.int64).view(np.uint64) for each in (here, there))
            return np.minimum(np.where(later, other - one, one - other), np.uint64(2**63 - 1)), later
        apart = np.abs(here.astype(np.float64) - there.astype(np.float64))
        far = apart.sum(-1) if self.metric == "manhattan" else np.sqrt((apart**2).sum(-1))
        return far, np.zeros(far.shape, bool)

    def ranks(self) -> np.ndarray:
        """(B, 1, 1, S): how many real keys of the same segment are stored before each key."""
        batch, _, _, keys = self.shape
        counted = np.ones((batch, keys, keys), bool)
        if self.key_mask is not None:
            counted &= self.rows("key_mask")[:, None, :]
        if self.key_segments is not None:
            counted &= self.rows("key_segments")[:, :, None] == self.rows("key_segments")[:, None, :]
        return np.tril(counted, -1).sum(-1)[:, None, None, :]

    def visible(self) -> np.ndarray:
        """(B, H, T, S): whether the key exists for the query, whatever the slopes."""
        see = np.ones(self.shape, bool)
        if self.key_mask is not None:
            see &= self.rows("key_mask")[:, None, None, :]
        if self.key_segments is not None:
            see &= self.rows("query_segments")[:, None, :, None] == self.rows("key_segments")[:, None, None, :]
        if self.attn_mask is not None:
            see &= self.attn_mask
        if self.metric is not None:
            return see
        (distance, later), rank, (left, right) = self.distances(), self.ranks(), self.window or (None, None)
        if self.causal:
            see &= ~later | (rank < self.prefix)
        if left is not None:
            see &= later | (distance <= left) | (rank < self.sinks)
        if right is not None:
            see &= ~later | (distance <= right) | (rank < self.sinks)
        return see

    def biased(self) -> np.ndarray:
        """(T, S): neither the query nor the key is one of the unbiased tokens, of which n = 0 marks none."""
        _, _, queries, keys = self.shape
        here, there = np.arange(keys - queries, keys)[:, None], np.arange(keys)
        return ((here >= self.unbiased) & (there >= self.unbiased)) | (self.unbiased == 0)

    def kept(self, seed: int) -> np.ndarray:
        """(B, H, T, S): what dropout leaves, by Philox4x32-10 of the seed and the four indices."""
        b, h, i, j = np.ogrid[tuple(map(slice, (*self.shape[:3], -(-self.shape[3] // 4))))]
        words = philox4x32((j, i, h, b), (seed & 0xFFFFFFFF, seed >> 32))
        drawn = np.stack(np.broadcast_arrays(*words), -1).reshape(*self.shape[:3], 4 * j.size)
        return drawn[..., : self.shape[3]] >= math.floor(self.dropout_p * 2**32)


def philox4x32(counter: tuple, key: tuple[int, int]) -> tuple:
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011) on arrays of 32-bit words, or on single ones."""
    (a, b, c, d), (left, right) = (np.asarray(word).astype(np.uint64) for word in counter), map(np.uint64, key)
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (second >> _32) ^ b ^ left, second & _WORD, (first >> _32) ^ d ^ right, first & _WORD
        left, right = (left + np.uint64(0x9E3779B9)) & _WORD, (right + np.uint64(0xBB67AE85)) & _WORD
    return a, b, c, d


def bias(call: Call, slopes: np.ndarray, future_slopes: np.ndarray | None = None) -> np.ndarray:
    """(B, H, T, S): what is subtracted from the score; inf where a slope of infinity hides the key."""
    distance, later = call.distances()
    past, future = (
        np.broadcast_to(each, call.shape[:2])[:, :, None, None]
        for each in (slopes, slopes if future_slopes is None else future_slopes)
    )
    slope = np.where(later, future, past).astype(np.longdouble)
    return np.where((distance > 0) & call.biased(), slope * distance.astype(np.longdouble), 0.0)


@np.errstate(all="ignore")  # what is hidden may hold anything; what must not be NaN, the callers look at
def attend(query, key, value, slopes, *, future_slopes=None, grad_out=None, grad_lse=None, seed=0, **options):
    """Output, lse and, for the gradients that come back to them, every gradient, by `linbias.testing`'s names.

    Tensors, and the options of `linbias.alibi_attention`. `seed` is that of torch's generator before the call.
    """
    query, key, value, past, future, grad_out, grad_lse = (
        None if each is None else each.detach().double().numpy()
        for each in (query, key, value, slopes, future_slopes, grad_out, grad_lse)
    )
    arrays = {name: each.numpy() if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    call = Call(shape=(*query.shape[:3], key.shape[2]), **arrays)
    group, scale = query.shape[1] // key.shape[1], query.shape[3] ** -0.5 if call.scale is None else call.scale

    penalty = bias(call, past, future)
    see = call.visible() & (penalty != math.inf)
    penalty, rows = np.where(see, penalty, 0.0), see.any(3)[..., None]
    keys = _by_group(see.any(2), group).any(2)[..., None]
    query, key, value = np.where(rows, query, 0.0), np.where(keys, key, 0.0), np.where(keys, value, 0.0)
    key, value = key.repeat(group, 1), value.repeat(group, 1)

    product = scale * (query @ key.mT)
    content = product if call.softcap is None else call.softcap * np.tanh(product / call.softcap)
    scores = np.where(see, content - penalty, -math.inf)
    top = scores.max(3, keepdims=True, initial=-math.inf)
    top = np.where(top == -math.inf, 0.0, top)
    weights = np.exp((scores - top).astype(np.float64))
    total = weights.sum(3, keepdims=True)
    weights = weights / np.where(total == 0.0, 1.0, total)
    share = 1.0
    if call.dropout_p:
        drawn = torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(seed))
        share = call.kept(int(drawn)) / (1 - call.dropout_p)
    found = {"out": (weights * share) @ value, "lse": (top + np.log(total))[..., 0].astype(np.float64)}
    if grad_out is None:
        return found

    grad_out, grad_lse = np.where(rows, grad_out, 0.0), np.where(rows, grad_lse[..., None], 0.0)
    grad_weights = share * (grad_out @ value.mT)
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(3, keepdims=True) + grad_lse)
    inner = 1.0 if call.softcap is None else 1 - np.tanh(product / call.softcap) ** 2
    grad_product = scale * inner * grad_scores
    found["grad_query"] = grad_product @ key
    found["grad_key"] = _by_group(grad_product.mT @ query, group).sum(2)
    found["grad_value"] = _by_group((weights * share).mT @ grad_out, group).sum(2)
    distance, later = call.distances()
    moved = -np.where(see & call.biased(), grad_scores * distance.astype(np.float64), 0.0)
    sides = {"slopes": (past, 1.0)} if future is None else {"slopes": (past, ~later), "future_slopes": (future, later)}
    for name, (given, side) in sides.items():
        summed = (moved * side).sum((2, 3))
        found[f"grad_{name}"] = summed if given.shape == summed.shape else summed.sum(0).reshape(given.shape)
    return found


def _by_group(of_heads: np.ndarray, group: int) -> np.ndarray:
    """(B, H, ...) as (B, G, H / G, ...)."""
    return of_heads.reshape(of_heads.shape[0], of_heads.shape[1] // group, group, *of_heads.shape[2:])
