# SPDX-License-Identifier: Apache-2.0
"""What the slopes of ALiBi let each head see."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import alibi_slopes, reach
from ..semantics.problem import default_tolerance
from .config import InspectCommand
from .measure import Measured
from .tables import align, wrap

HEADS, MAX_BIAS, LENGTH = 8, 8.0, 8192
"""Of a rule, where nothing else is said."""
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


def vanishing_distance(slopes: Tensor, dtype: torch.dtype, content: float | Tensor) -> Tensor:
    """Return the smallest distance from which e^(content - slope * distance) is 0 in `dtype`, fp64.

    inf for a slope of 0 or below. A positive number rounds to 0 at half of the smallest subnormal number and below.
    """
    info = torch.finfo(dtype)
    smallest = math.log(info.smallest_normal) + math.log(info.eps)
    distances = torch.ceil((content - smallest + math.log(2)) / slopes.double())
    return distances.where(slopes > 0, math.inf)


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
    """Share of the pairs of the text, of the causal ones where attention is, that lie within reach."""
    content: float
    """Bound on how far a content score exceeds that of the query's own key."""


def inspect_heads(command: InspectCommand) -> list[HeadFacts]:
    """Return the facts of each head of a rule."""
    slopes = alibi_slopes(command.heads or HEADS, rule=command.rule or "press", max_bias=command.max_bias or MAX_BIAS)
    return facts_of(command, slopes, command.content or 0.0, command.length or LENGTH)


def facts_of(
    command: InspectCommand, slopes: Tensor, content: float | Tensor, length: int, *, causal: bool = True
) -> list[HeadFacts]:
    """Return the facts of heads with these slopes (H,) and content bounds on a text of `length` tokens."""
    reaches = reach(slopes, tolerance=tolerance_of(command), content=content).double()
    vanishing = vanishing_distance(slopes, DTYPES[command.dtype], content)
    bounds = torch.as_tensor(content, dtype=torch.float64).expand(slopes.shape)
    columns = (slopes, effective_context(slopes), reaches, vanishing, bounds)
    return [
        HeadFacts(
            head=head,
            slope=slope,
            effective_context=context,
            reach=far,
            vanishes=vanishes,
            keys=min(1.0, (far + 1) / length),
            pairs=_share_of_pairs(far, length, causal),
            content=bound,
        )
        for head, (slope, context, far, vanishes, bound) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    ]


def tolerance_of(command: InspectCommand) -> float:
    """Return the weight that may be neglected."""
    return command.tolerance or default_tolerance(DTYPES[command.dtype])


def _share_of_pairs(far: float, length: int, causal: bool) -> float:
    """Share of pairs (i, j), with j <= i where attention is causal, with |i - j| <= far."""
    far = min(far, length - 1)
    within, pairs = (far + 1) * length - far * (far + 1) / 2, length * (length + 1) / 2
    return within / pairs if causal else (2 * within - length) / (2 * pairs - length)


def heads_table(command: InspectCommand, facts: list[HeadFacts]) -> str:
    """Return what `linbias inspect` prints of a rule."""
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
    intro = (
        f"{len(facts)} heads, rule {command.rule or 'press'}, max_bias {command.max_bias or MAX_BIAS:g}, "
        f"{command.length or LENGTH:,} tokens, content bound {command.content or 0.0:g}, "
        f"tolerance {tolerance_of(command):.2g}"
    )
    key = (
        "1/slope   distance over which the weight of a key falls by a factor of e, content being equal",
        *_KEY,
        f"0 in ...  distance from which a single weight is rounded to 0 in {command.dtype}",
    )
    return _described(intro, [align(header, body)], facts, key)


_KEY = (
    "reach     largest distance that can matter: keys farther away weigh at most the tolerance, all together, as long "
    "as no content score exceeds that of the query's own key by more than the content bound",
    "of keys   share of the text that its last token reaches",
    "of pairs  share of all pairs of a query and a key that it may see (earlier or equal, where attention is causal) "
    "that lie within reach",
)


def _described(intro: str, tables: list[str], facts: Sequence[HeadFacts], key: Sequence[str]) -> str:
    share = f"{_mean_pairs(facts):.1%}"
    outcome = f"Over all heads {share} of the pairs lie within reach; the rest cannot matter at the tolerance."
    return "\n\n".join([wrap(intro), *tables, wrap(outcome), "\n".join(wrap(line, indent=10) for line in key)])


def _mean_pairs(facts: Sequence[HeadFacts]) -> float:
    return sum(fact.pairs for fact in facts) / len(facts)


def layers_of(command: InspectCommand, measured: Measured) -> list[list[HeadFacts]]:
    """Return the facts of each head of each layer of a model that was measured."""
    return [
        facts_of(command, layer.slopes, layer.content, measured.length, causal=layer.causal)
        for layer in measured.layers
    ]


def farthest(layers: Sequence[Sequence[HeadFacts]]) -> list[tuple[int, HeadFacts]]:
    """Return for each head the layer in which it reaches farthest, and the facts there."""
    heads = range(min(map(len, layers)))
    return [max(((n, layer[head]) for n, layer in enumerate(layers)), key=lambda item: item[1].reach) for head in heads]


def measured_table(command: InspectCommand, measured: Measured, layers: Sequence[Sequence[HeadFacts]]) -> str:
    """Return what `linbias inspect` prints of a model: each head where it reaches farthest, and each layer."""
    by_head = [
        (
            str(fact.head),
            str(layer),
            slope_text(fact.slope),
            f"{measured.layers[layer].query_norms[fact.head]:.3g}",
            f"{measured.layers[layer].key_norms[fact.head]:.3g}",
            f"{fact.content:.3g}",
            _distance(fact.reach),
            f"{fact.keys:.1%}",
            f"{fact.pairs:.1%}",
        )
        for layer, fact in farthest(layers)
    ]
    by_layer = [
        (
            str(layer),
            f"{max(fact.content for fact in facts):.3g}",
            f"{sum(fact.pairs for fact in facts) / len(facts):.1%}",
        )
        for layer, facts in enumerate(layers)
    ]
    intro = (
        f"{measured.name}: {len(layers)} layers of {len(layers[0])} heads, measured on {measured.length:,} tokens of "
        f"{measured.text}, tolerance {tolerance_of(command):.2g}; each head in the layer where it reaches farthest"
    )
    key = (
        "|q|, |k|  largest norm of a query and of a key in the text",
        "content   by how much a content score can exceed that of the query's own key, by those norms",
        *_KEY,
    )
    tables = [
        align(("head", "layer", "slope", "|q|", "|k|", "content", "reach", "of keys", "of pairs"), by_head),
        align(("layer", "content, largest", "of pairs, all heads"), by_layer),
    ]
    return _described(intro, tables, [fact for facts in layers for fact in facts], key)


def _distance(value: float) -> str:
    return "all" if math.isinf(value) else f"{value:,.0f}"
