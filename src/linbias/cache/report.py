# SPDX-License-Identifier: Apache-2.0
"""`CacheReport`: how many of the keys in a cache each head can still see."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..semantics.bounds import reach, upper_norms
from .layout import Layout, token_positions
from .storage import Storage


@dataclass(frozen=True, eq=False)
class CacheReport:
    """What each head can see from a sequence's newest token; ``print`` it for a table of the heads."""

    slopes: Tensor
    """(b, H)."""
    reach: Tensor
    """(b, H) float64: the largest distance at which a key can matter; inf where the bias hides nothing."""
    kept: Tensor
    """(B,) int64: keys in the cache."""
    visible: Tensor
    """(B, H) int64: those of them within reach, and within the window or a sink."""
    sink_weight: Tensor
    """(B, H) float64: the share of the softmax that falls on the first `sinks` keys when all scores are equal, so by
    the bias alone; about exp(-slope * length) for a steep head and one sink."""
    sinks: int
    """Keys counted as sinks: those of the cache, else 1."""
    tolerance: float
    """Share of a row's softmax weight that all keys out of reach hold at most."""

    def __str__(self) -> str:
        """One line a head; of sequences that differ, the one that sees most."""
        kept = int(self.kept.amax()) if self.kept.numel() else 0
        lines = [
            f"keys each head can see of the {kept} kept, at tolerance {self.tolerance:.1e}",
            f"{'head':>4}  {'slope':>9}  {'reach':>9}  {'visible':>9}  {'share':>6}  {'sink weight':>11}",
        ]
        slopes, reaches, visible, weights = (
            values.amax(0).tolist() for values in (self.slopes, self.reach, self.visible, self.sink_weight)
        )
        for head, row in enumerate(zip(slopes, reaches, visible, weights, strict=True)):
            slope, far, seen, weight = row
            share = seen / kept if kept else 0.0
            lines.append(f"{head:>4}  {slope:>9.3g}  {far:>9.0f}  {seen:>9}  {share:>6.1%}  {weight:>11.1e}")
        return "\n".join(lines)


@dataclass(frozen=True)
class View:
    """What the newest token of each sequence sees, whatever the bias."""

    distances: Tensor
    """(B, S) int64."""
    shown: Tensor
    """(B, S) bool."""
    kept: Tensor
    """(B,) int64."""


def view(
    storage: Storage, layout: Layout, window: tuple[int | None, int | None] | None, sinks: int, *, capped: bool
) -> View:
    """Look from the newest tokens; `capped`: distances as in a cache with ``distance="cache"``."""
    batch, device = storage.sizes[0], storage.key.device
    slots = storage.slots(layout.end)
    here = token_positions(storage, layout, layout.last(device))
    keys = token_positions(storage, layout, slots)
    here, keys = here.expand(batch, 1), keys.expand(batch, -1)
    real = layout.real(slots)
    real = (slots < layout.last(device) + 1 if real is None else real).expand(batch, -1)
    left = None if window is None else window[0]
    shown = real & (keys <= here)
    if left is not None:
        shown = shown & ((here - keys <= left) | (slots < sinks))
    distances = (here - keys).abs()
    if capped and left is not None:
        distances = torch.where(slots < sinks, torch.minimum(distances, sinks + left - keys), distances)
    return View(distances, shown, real.sum(1))


def content_bound(query: Tensor, norms: Tensor, scale: float) -> Tensor:
    """(B, H) float64: how far apart two scores of a row can be before the bias, from norms alone.

    Args:
        query: (B, H, T, D).
        norms: (B, G, n), bounds of all key norms.
        scale: of the scores.
    """
    largest = norms.amax(2).repeat_interleave(query.shape[1] // norms.shape[1], 1)
    return 2 * abs(scale) * upper_norms(query).amax(2).double() * largest


def report(seen: View, slopes: Tensor, content: Tensor | None, sinks: int, tolerance: float) -> CacheReport:
    """Count what is within reach.

    Args:
        seen: from the newest tokens.
        slopes: (b, H) float64.
        content: (B, H) float64, a bound of the score before the bias minus log Z; None: 0.
        sinks, tolerance: as in `CacheReport`.
    """
    far = reach(slopes, tolerance=tolerance, content=0.0 if content is None else content)
    batch, heads = seen.shown.shape[0], slopes.shape[1]
    first = torch.arange(seen.shown.shape[1], device=slopes.device) < sinks
    visible = torch.zeros((batch, heads), dtype=torch.int64, device=slopes.device)
    weight = torch.zeros((batch, heads), dtype=torch.float64, device=slopes.device)
    # Head by head: all at once would allocate as much as attention avoids.
    for head in range(heads):
        penalty = torch.where(seen.distances == 0, 0.0, slopes[:, head, None] * seen.distances)
        shares = torch.where(seen.shown, -penalty, -torch.inf).softmax(1).nan_to_num(0.0)
        visible[:, head] = (seen.shown & (seen.distances <= far[:, head, None])).sum(1)
        weight[:, head] = torch.where(first, shares, 0.0).sum(1)
    return CacheReport(slopes, far, seen.kept, visible, weight, sinks, tolerance)
