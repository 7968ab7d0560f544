# SPDX-License-Identifier: Apache-2.0
"""What the slopes of ALiBi let each head see."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import alibi_slopes, reach
from ..semantics.problem import default_tolerance
from .config import InspectCommand
from .tables import align

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def effective_context(slopes: Tensor) -> Tensor:
    """Return 1 / slope, fp64: the distance over which a key's weight falls by a factor of e; inf for slope 0.

    Beyond a few times this distance a head of equal content scores sees next to nothing, however long the text is.

    >>> effective_context(alibi_slopes(8)).tolist()
    [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    """
    return 1 / slopes.double()


def vanishing_distance(slopes: Tensor, dtype: torch.dtype, content: float) -> Tensor:
    """Return the smallest distance from which e^(content - slope * distance) is 0 in `dtype`, fp64; inf for slope 0.

    A positive number rounds to 0 at half of the smallest subnormal number and below.
    """
    info = torch.finfo(dtype)
    smallest = math.log(info.smallest_normal) + math.log(info.eps)
    return torch.ceil((content - smallest + math.log(2)) / slopes.double())


def slope_text(slope: float) -> str:
    """Return the shortest decimal that is read back as the same fp32 slope.

    >>> slope_text(2**-8), slope_text(2**-20)
    ('0.00390625', '9.536743e-07')
    """
    return str(np.float32(slope))


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """What one head can see in a text."""

    head: int
    """Counted from 0."""
    slope: float
    effective_context: float
    """Distance over which a weight falls by e."""
    reach: float
    """Largest distance at which a key may still matter at the tolerance."""
    vanishes: float
    """Distance from which a probability is 0 in the chosen type."""
    keys: float
    """Share of the text that the last query reaches."""
    pairs: float
    """Share of the causal pairs of the text that lie within reach."""


def inspect_heads(command: InspectCommand) -> list[HeadFacts]:
    """Return the facts of each head."""
    dtype = DTYPES[command.dtype]
    slopes = alibi_slopes(command.heads, rule=command.rule, max_bias=command.max_bias)
    tolerance = command.tolerance or default_tolerance(dtype)
    reaches = reach(slopes, tolerance=tolerance, content=command.content).double()
    vanishing = vanishing_distance(slopes, dtype, command.content)
    columns = zip(
        slopes.tolist(), effective_context(slopes).tolist(), reaches.tolist(), vanishing.tolist(), strict=True
    )
    return [
        HeadFacts(
            head=head,
            slope=slope,
            effective_context=context,
            reach=far,
            vanishes=vanishes,
            keys=min(1.0, (far + 1) / command.length),
            pairs=_share_of_pairs(far, command.length),
        )
        for head, (slope, context, far, vanishes) in enumerate(columns)
    ]


def _share_of_pairs(far: float, length: int) -> float:
    """Share of pairs (i, j), j <= i < length, with i - j <= far."""
    far = min(far, length - 1)
    within = (far + 1) * length - far * (far + 1) / 2
    return within / (length * (length + 1) / 2)


def heads_table(command: InspectCommand, facts: list[HeadFacts]) -> str:
    """Return what `linbias inspect` prints."""
    tolerance = command.tolerance or default_tolerance(DTYPES[command.dtype])
    header = ("head", "slope", "1/slope", "reach", "of keys", "of pairs", f"0 in {command.dtype}")
    body = [
        (
            str(fact.head),
            slope_text(fact.slope),
            f"{fact.effective_context:,.4g}",
            _distance(fact.reach),
            f"{fact.keys:.1%}",
            f"{fact.pairs:.1%}",
            _distance(fact.vanishes),
        )
        for fact in facts
    ]
    mean = sum(fact.pairs for fact in facts) / len(facts)
    return "\n".join(
        (
            f"{command.heads} heads, rule {command.rule}, max_bias {command.max_bias:g}, {command.length:,} tokens, "
            f"content bound {command.content:g}, tolerance {tolerance:.2g}",
            "",
            align(header, body),
            "",
            f"Over all heads {mean:.1%} of the causal pairs lie within reach; the rest cannot matter at the tolerance.",
            "1/slope   distance over which the weight of a key falls by a factor of e, content being equal",
            "reach     largest distance that can matter: keys farther away weigh at most the tolerance, all together,",
            "          as long as no content score exceeds that of the query's own key by more than the content bound",
            "of keys   share of the text that its last token reaches",
            "of pairs  share of all pairs of a query and an earlier or equal key that lie within reach",
            f"0 in ...  distance from which a single weight is rounded to 0 in {command.dtype}",
        )
    )


def _distance(value: float) -> str:
    return "all" if math.isinf(value) else f"{value:,.0f}"
