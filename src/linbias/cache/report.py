# SPDX-License-Identifier: Apache-2.0
"""`CacheReport`: how many of the keys in a cache each head can still see."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..prepare import check_inputs
from ..semantics.blocks import Blocks, Span, Tiles, penalty
from ..semantics.bounds import reach, score_bound, upper_norms
from ..semantics.checks import check_scale, check_tensor
from ..semantics.pages import gather_pages
from ..semantics.problem import Options, default_scale
from ..semantics.tokens import Tokens
from .layout import Layout, Storage, token_positions
from .storage import real_norms


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

    @staticmethod
    def of(
        seen: Tiles, kept: Tensor, slopes: Tensor, content: Tensor | float, sinks: int, tolerance: float
    ) -> "CacheReport":
        """Count what is within reach.

        Args:
            seen: the pairs of the newest token and each key, (b, 1, 1, S).
            kept, sinks, tolerance: as in the report.
            slopes: (b, H) float64.
            content: (B, H) float64, a bound of the score before the bias minus log Z; 0: left out.
        """
        far = reach(slopes, tolerance=tolerance, content=content)
        visible = torch.zeros((len(kept), slopes.shape[1]), dtype=torch.int64, device=slopes.device)
        weight = torch.zeros_like(visible, dtype=torch.float64)
        shown = seen.visible.some
        # Head by head: all at once would allocate as much as attention avoids.
        for head in range(slopes.shape[1]):
            bias = penalty(seen, slopes[:, head, None, None, None], None)
            shares = torch.where(shown, -bias, -torch.inf).softmax(3).nan_to_num(0.0)
            near = shown & (seen.distance.low <= far[:, head, None, None, None])
            visible[:, head], weight[:, head] = near.sum((1, 2, 3)), shares[..., :sinks].sum((1, 2, 3))
        return CacheReport(slopes, far, kept, visible, weight, sinks, tolerance)

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


def content_of(storage: Storage, layout: Layout, query: Tensor, scale: float | None) -> Tensor:
    """(B, H) float64: what no score of `query` (B, H, T, D) before its bias exceeds another one by."""
    check_tensor("query", query)
    key, _, _, table = storage.read(layout.end, query.shape[2])
    key = key if table is None else gather_pages(key, table)[:, :, : layout.end]
    check_inputs(query, key, key)
    scale = check_scale("scale", scale, default_scale(key.shape[3]))
    norms = real_norms(key, layout.real(layout.slots(key.device))).double()
    norms = pad(norms, (0, 1)).amax(2).repeat_interleave(query.shape[1] // key.shape[1], 1)
    # Two scores of a row are at most twice the bound apart.
    return 2 * score_bound(scale, None, upper_norms(query.detach()).double().amax(2), norms)


def newest_pairs(storage: Storage, layout: Layout, left: int | None, sinks: int, *, capped: bool) -> Tiles:
    """The newest token of each sequence against every key, (b, 1, 1, S), whatever the bias.

    Args:
        storage, layout: what is where.
        left, sinks: the cache's.
        capped: distances as in a cache with ``distance="cache"``.
    """
    device = storage.key.device
    slots = layout.slots(device)
    here, there = (token_positions(storage, layout, each) for each in (layout.last(device), slots))
    rows = Blocks.of(Tokens(1, 0, device, here)).down()
    keys = Blocks.of(Tokens(layout.end, 0, device, there, rank=slots, real=layout.real(slots))).across()
    tiles = Tiles.of(rows, keys, Options(causal=True, left=left, sinks=sinks))
    if not capped or left is None:
        return tiles
    distance = tiles.distance.low
    distance = torch.where(slots < sinks, torch.minimum(distance, sinks + left - keys.position.low), distance)
    return replace(tiles, distance=Span(distance, distance))
