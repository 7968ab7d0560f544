# SPDX-License-Identifier: Apache-2.0
"""Where the weights of ALiBi leave a floating type: the distance from which a head is blind, and what share that is.

Example, 16 heads and 2,048 tokens in bfloat16, by the bias alone: 28.5 % of the causal pairs lie below the smallest
normal number, 27.6 % below the smallest number, 27.5 % are rounded to 0; after dividing rows by their sums 28.9 % lie
below the smallest normal number. Of the keys of the last query alone 36.6 % do: that is the figure that a preprint
(arXiv 2608.03994) gives for the entries, so it seems to be about the last row and hardware that flushes to zero.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ... import alibi_slopes
from ..config import DtypeName
from ..heads import DTYPES
from ..tables import align
from .config import NumericsCommand


def limits(dtype: DtypeName) -> dict[str, float]:
    """Return the natural logarithms of the three limits of a type, by name."""
    info = torch.finfo(DTYPES[dtype])
    smallest = math.log(info.smallest_normal) + math.log(info.eps)
    return {
        "below the smallest normal": math.log(info.smallest_normal),
        "below the smallest": smallest,
        # A tie between 0 and the smallest number goes to 0, the even one.
        "rounded to 0": smallest - math.log(2),
    }


def blind_from(slopes: Tensor, limit: float, content: float = 0.0) -> Tensor:
    """Return the smallest distance at which content - slope * distance <= limit, (H,) fp64; inf for slope 0."""
    return torch.ceil((content - limit) / slopes.double()).clamp(min=0)


def share_of_pairs(blind: Tensor, length: int) -> Tensor:
    """Return the share of pairs (i, j), j <= i < length, at distance `blind` or more, (H,) fp64."""
    rows = (length - blind).clamp(min=0)
    return rows * (rows + 1) / (length * (length + 1))


def share_of_last_row(blind: Tensor, length: int) -> Tensor:
    """Return the share of the last query's keys at distance `blind` or more, (H,) fp64."""
    return (length - blind).clamp(min=0) / length


def share_of_normalised(slopes: Tensor, length: int, limit: float, content: float = 0.0) -> Tensor:
    """Return the share of pairs whose weight over the sum of its row is at or below the limit, (H,) fp64.

    Keys at distance d have the score content - slope * d, the query's own key 0.
    """
    shares: list[float] = []
    steps = torch.arange(length, dtype=torch.float64)
    for slope in slopes.double().tolist():
        scores = content - slope * steps
        scores[0] = 0.0
        row_sums = scores.logcumsumexp(0)
        # Scores fall from the second on, so those at or below a threshold are the last of the row; the own key is not.
        threshold = (limit + row_sums - content) / -slope if slope else torch.full_like(steps, math.inf)
        first = torch.ceil(threshold).clamp(min=1)
        shares.append(((steps + 1 - first).clamp(min=0).sum() / (length * (length + 1) / 2)).item())
    return torch.tensor(shares, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Blindness:
    """What one limit does to each head."""

    limit: str
    power: float
    """The limit as an exponent of 2."""
    blind_from: list[float]
    """Distance from which each head is blind; inf for none."""
    pairs: list[float]
    last_row: list[float]
    normalised: list[float]
    """Shares for each head."""

    def means(self) -> tuple[float, float, float]:
        """Return the three shares over all heads."""
        pairs, last, normalised = (sum(each) / len(each) for each in (self.pairs, self.last_row, self.normalised))
        return pairs, last, normalised


def numerics(command: NumericsCommand) -> list[Blindness]:
    """Return what each limit of the type does."""
    slopes = alibi_slopes(command.heads, rule=command.rule, max_bias=command.max_bias)
    found: list[Blindness] = []
    for name, limit in limits(command.dtype).items():
        blind = blind_from(slopes, limit, command.content)
        found.append(
            Blindness(
                limit=name,
                power=limit / math.log(2),
                blind_from=blind.tolist(),
                pairs=share_of_pairs(blind, command.length).tolist(),
                last_row=share_of_last_row(blind, command.length).tolist(),
                normalised=share_of_normalised(slopes, command.length, limit, command.content).tolist(),
            )
        )
    return found


def numerics_text(command: NumericsCommand, found: list[Blindness]) -> str:
    """Return what `linbias numerics` prints."""
    slopes = alibi_slopes(command.heads, rule=command.rule, max_bias=command.max_bias).tolist()
    normal, smallest, zero = found
    heads = [
        (str(head), f"{slope:.6g}", *(f"{each.blind_from[head]:,.0f}" for each in found), f"{normal.pairs[head]:.1%}")
        for head, slope in enumerate(slopes)
    ]
    means = [
        (f"{each.limit}, 2^{each.power:.0f}", *(f"{share:.1%}" for share in each.means()))
        for each in (normal, smallest, zero)
    ]
    names = tuple(f"{each.limit}" for each in found)
    return "\n".join(
        (
            f"{command.heads} heads, rule {command.rule}, max_bias {command.max_bias:g}, {command.length:,} tokens, "
            f"{command.dtype}, content {command.content:g}",
            "",
            "Distance from which a head is blind, and the share of the causal pairs below the smallest normal number",
            align(("head", "slope", *names, "of pairs"), heads),
            "",
            "Share over all heads",
            align(("", "of pairs", "of the last query's keys", "of pairs, rows normalised"), means),
        )
    )


def numerics_json(command: NumericsCommand, found: list[Blindness]) -> str:
    """Return the same numbers as JSON; a distance that is infinite is null."""
    plain: list[dict[str, Any]] = []
    for each in found:
        pairs, last, normalised = each.means()
        blind = [distance if math.isfinite(distance) else None for distance in each.blind_from]
        means = {"pairs": pairs, "last_row": last, "normalised": normalised}
        plain.append({**asdict(each), "blind_from": blind, "means": means})
    return json.dumps({"settings": {**asdict(command), "json": None}, "limits": plain}, indent=1, allow_nan=False)
