# SPDX-License-Identifier: Apache-2.0
"""What the heads of a trained model look at.

The weights of any scheme come out of its own attention, one slice of keys at a time: with rows of the identity as
values, the outputs are the weights. B texts, H heads, T tokens, D distances.
"""

import csv
import io
import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import alibi_attention
from ..config import ConfigError
from ..data import load_corpus, require_bytes
from ..evaluate import check_scheme
from ..plots import label, log_lengths, new_figure, to_png
from ..positions import SCHEMES, rule_change, why_not
from ..schemes.alibi import Alibi
from ..schemes.base import Positions
from ..single import data_of
from ..storage import write_bytes, write_text
from ..tables import align, wrap
from ..train import load_checkpoint, resolve_device
from .config import AttentionCommand
from .numerics import limits

_SLICE = 128
"""Keys whose weights are held at once, for all queries."""


class Watched(Positions):
    """A scheme that keeps, layer after layer, what its queries looked at."""

    def __init__(self, base: Positions, limits: list[float]) -> None:
        """`limits`: natural logarithms below which probabilities are counted."""
        super().__init__()
        self.base, self.limits = base, limits
        self.layers: list[Layer] = []

    def embed(self, hidden_BTC: Tensor) -> Tensor:
        """Return the base's embeddings."""
        return self.base.embed(hidden_BTC)

    def attend(self, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        """Return the base's attention, having looked at its weights."""
        self.layers.append(self._look(query_BHTD.double(), key_BHTD.double()))
        if isinstance(self.base, Alibi):
            self.layers[-1].skipped = _skipped(self.base, query_BHTD, key_BHTD)
        return self.base.attend(query_BHTD, key_BHTD, value_BHTD)

    def _look(self, query: Tensor, key: Tensor) -> "Layer":
        heads, length = query.shape[1], query.shape[2]
        mass = torch.zeros(heads, length, dtype=torch.float64, device=query.device)
        first = torch.zeros(heads, dtype=torch.float64, device=query.device)
        below = torch.zeros(heads, len(self.limits), dtype=torch.int64, device=query.device)
        places = torch.arange(length, device=query.device)
        for start in range(0, length, _SLICE):
            keys = places[start : start + _SLICE]
            distance_TS = places[:, None] - keys
            seen = distance_TS >= 0
            weights = self._weights(query, key, keys)
            summed_HTS = weights.sum(dim=0)
            mass.index_add_(1, distance_TS[seen], summed_HTS[:, seen])
            if start == 0:
                first += summed_HTS[:, 1:, 0].sum(dim=1)
            for index, limit in enumerate(self.limits):
                below[:, index] += (weights[:, :, seen] <= math.exp(limit)).sum(dim=(0, 2))
        return Layer(mass=mass.cpu(), first=first.cpu(), below=below.cpu(), texts=query.shape[0])

    def _weights(self, query: Tensor, key: Tensor, keys: Tensor) -> Tensor:
        """(B, H, T, S), float64, of some keys; every one is seen, however small."""
        chosen = torch.zeros(key.shape[2], len(keys), dtype=key.dtype, device=key.device)
        chosen[keys, torch.arange(len(keys), device=key.device)] = 1.0
        rows = chosen.expand(*key.shape[:2], -1, -1)
        if not isinstance(self.base, Alibi):
            return self.base.attend(query, key, rows)
        kept, self.base.tolerance = self.base.tolerance, 0.0
        try:
            return self.base.attend(query, key, rows)
        finally:
            self.base.tolerance = kept


@dataclass(kw_only=True)
class Layer:
    """Sums over the texts and queries of one layer."""

    mass: Tensor
    """(H, D) probability at each distance."""
    first: Tensor
    """(H,) probability that queries but the first gave to the first key."""
    below: Tensor
    """(H, limits) causal pairs whose probability is at or below each limit."""
    texts: int
    skipped: Tensor | None = None
    """(H,) share of pairs that linbias skipped at its default tolerance; None if the scheme is not ALiBi."""


def _skipped(base: Alibi, query: Tensor, key: Tensor) -> Tensor:
    """Of the pairs computed where nothing but the invisible is skipped: tiles are computed whole."""
    slopes = base.slopes_at(query.shape[-2], query.device)
    computed = [
        alibi_attention(query, key, key, slopes, causal=True, window=base.window, tolerance=tolerance, return_aux=True)[
            1
        ].computed.double()
        for tolerance in (None, 0.0)
    ]
    return (1 - computed[0] / computed[1]).cpu()


@dataclass(frozen=True, kw_only=True)
class Head:
    """What one head looks at, on average over queries and texts."""

    layer: int
    head: int
    first: float
    """Share of its mass on the first byte, over the queries after it."""
    half: int
    """Distance within which half of its mass lies."""
    most: int
    """Distance within which nine tenths of its mass lie: its effective receptive field."""
    below: dict[str, float]
    """Share of causal pairs whose probability leaves the type, by limit."""
    skipped: float | None
    """Share of the pairs that linbias skipped; None if the scheme is not ALiBi."""
    mass: list[dict[str, Any]]
    """Share of its mass by distance, in octaves."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """All that was found."""

    title: str
    length: int
    texts: int
    dtype: str
    heads: tuple[Head, ...]
    notes: tuple[str, ...]
    settings: dict[str, Any]


def look(command: AttentionCommand) -> Attention:
    """Read the texts and look at every layer.

    Raises: CheckpointError, ConfigError, DataError: it cannot be done.
    """
    trained = load_checkpoint(command.checkpoint)
    name, length = command.scheme or trained.scheme, command.length or 4 * trained.length
    check_scheme(trained, name)
    reason = why_not(name, trained.model, trained.length, length)
    if reason is not None:
        raise ConfigError(f"length must be one that {name!r} can run at, got {length:,}: {reason}")
    corpus = load_corpus(command.data) if command.data is not None else data_of(trained, command.checkpoint)
    text = corpus.split(command.split)
    require_bytes(text, length, f"to read {length:,}")
    device = resolve_device(command.device)
    decoder = trained.decoder(name).to(device)
    watched = Watched(decoder.transformer.positions, list(limits(command.dtype).values()))
    decoder.transformer.positions = watched
    count = min(command.texts, len(text.content) // length)
    with torch.no_grad():
        decoder(text.tensor(device)[: count * length].view(count, length).long())
    change = rule_change(name, trained.length)
    return Attention(
        title=f"{SCHEMES[name].label}, trained on passages of {trained.length:,} bytes",
        length=length,
        texts=count,
        dtype=command.dtype,
        heads=tuple(head for number, layer in enumerate(watched.layers) for head in _heads(number, layer, command)),
        notes=() if change is None else (change,),
        settings=json.loads(json.dumps(asdict(command), default=str)),
    )


def _heads(number: int, layer: Layer, command: AttentionCommand) -> list[Head]:
    heads, length = layer.mass.shape
    pairs = layer.texts * length * (length + 1) // 2
    share = layer.mass / layer.mass.sum(dim=1, keepdim=True)
    within = share.cumsum(dim=1)
    names = list(limits(command.dtype))
    edges = [0, *(2**power for power in range((length - 1).bit_length())), length]
    found: list[Head] = []
    for head in range(heads):
        # The last sum may be a little less than one.
        half, most = (int((within[head] < part).sum().clamp(max=length - 1)) for part in (0.5, 0.9))
        octaves = [
            {"first": first, "last": after - 1, "share": share[head, first:after].sum().item()}
            for first, after in pairwise(edges)
            if after > first
        ]
        found.append(
            Head(
                layer=number,
                head=head,
                first=layer.first[head].item() / (layer.texts * (length - 1)),
                half=half,
                most=most,
                below={name: layer.below[head, index].item() / pairs for index, name in enumerate(names)},
                skipped=None if layer.skipped is None else layer.skipped[head].item(),
                mass=octaves,
            )
        )
    return found


def attention_text(found: Attention) -> str:
    """Return what `linbias attention` prints."""
    first_limit = next(iter(found.heads[0].below))
    header = ("layer.head", "on first byte", "half within", "90 % within", f"gone in {found.dtype}", "skipped")
    lines = [
        (
            f"{each.layer}.{each.head}",
            f"{each.first:.1%}",
            f"{each.half:,}",
            f"{each.most:,}",
            f"{each.below[first_limit]:.1%}",
            "" if each.skipped is None else f"{each.skipped:.1%}",
        )
        for each in found.heads
    ]
    means = [sum(each.below[name] for each in found.heads) / len(found.heads) for name in found.heads[0].below]
    gone = ", ".join(f"{share:.1%} {name}" for name, share in zip(found.heads[0].below, means, strict=True))
    known = [each.skipped for each in found.heads if each.skipped is not None]
    skipped = f"; linbias skipped {sum(known) / len(known):.1%} of the pairs" if known else ""
    return "\n".join(
        (
            wrap(f"{found.title}; {found.texts} texts of {found.length:,} bytes"),
            "",
            align(header, lines),
            "",
            wrap(f"Of the probabilities of all causal pairs, in {found.dtype}: {gone}{skipped}."),
            wrap(f"gone: {first_limit} number of {found.dtype}"),
            *map(wrap, found.notes),
        )
    )


def write_attention(found: Attention, folder: Path) -> list[Path]:
    """Write attention.png, .csv and .json below `folder`, and return their paths."""
    plot, table, data = (folder / f"attention.{kind}" for kind in ("png", "csv", "json"))
    write_text(data, json.dumps(asdict(found), indent=1, allow_nan=False))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("layer", "head", "first", "last", "share"))
    for head in found.heads:
        writer.writerows((head.layer, head.head, each["first"], each["last"], each["share"]) for each in head.mass)
    write_text(table, stream.getvalue())
    write_bytes(plot, draw_attention(found))
    return [plot, table, data]


def draw_attention(found: Attention) -> bytes:
    """Return a PNG: for each layer, the share of each head's mass within a distance."""
    layers = sorted({head.layer for head in found.heads})
    figure, axes = new_figure(4.4 * len(layers), 4.0, len(layers))
    for ax, layer in zip(axes, layers, strict=True):
        for head in (each for each in found.heads if each.layer == layer):
            within, total = [], 0.0
            for octave in head.mass:
                total += octave["share"]
                within.append(100 * total)
            ax.plot([octave["last"] + 1 for octave in head.mass], within, linewidth=1.6, label=f"head {head.head}")
        log_lengths(ax, [2**power for power in range(0, found.length.bit_length(), 2)])
        ax.set_ylim(0, 101)
        label(ax, f"Layer {layer}: mass within a distance", "distance + 1, bytes", "percent" if layer == 0 else "")
    axes[0].legend(frameon=False, fontsize=8)
    return to_png(figure)
