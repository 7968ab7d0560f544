# SPDX-License-Identifier: Apache-2.0
"""Streaming: loss against tokens seen, with all keys kept, with a window, and with a window and sinks."""

import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import ConfigError
from ..data import load_corpus, require_bytes
from ..evaluate import check_scheme, position_curve
from ..model import ByteDecoder
from ..plots import label, log_lengths, new_figure, to_png
from ..positions import SCHEMES, rule_change
from ..schemes.streamed import Streamed, streams
from ..single import data_of
from ..statistics import METHOD, Estimate, estimate
from ..storage import write_bytes, write_text
from ..tables import align, wrap
from ..train import load_checkpoint, resolve_device
from .config import StreamCommand

Nats = Callable[[Tensor], Tensor]
"""From a text (1, N + 1) to the loss of its tokens after the first, (N,)."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One way of keeping keys."""

    mode: str
    bins: list[dict[str, Any]]
    """Bits per token by place in the text: see `evaluate.position_curve`."""
    beyond: Estimate
    """Bits per token at places that have more before them than the window."""
    farther: Estimate | None
    """`beyond` less that of the window alone, over the same texts; None for the window."""


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """All that was found."""

    curves: tuple[Curve, ...]
    title: str
    unit: str
    window: int
    texts: int
    tokens: int
    notes: tuple[str, ...]
    facts: dict[str, Any]


def stream(command: StreamCommand) -> Streaming:
    """Read the texts in every mode.

    Raises: CheckpointError, ConfigError, DataError: it cannot be done.
    """
    trained = load_checkpoint(command.checkpoint)
    name = command.scheme or trained.scheme
    check_scheme(trained, name)
    scheme = SCHEMES[name].build(trained.model, trained.length)
    reason = streams(scheme)
    if reason is not None:
        raise ConfigError(f"scheme must be one that can keep a part of its keys, got {name!r}: {reason}")
    corpus = load_corpus(command.data) if command.data is not None else data_of(trained, command.checkpoint)
    text, window = corpus.split(command.split), command.window or trained.length
    require_bytes(text, command.tokens + 1, f"to stream {command.tokens:,}")
    if command.tokens <= window + command.sinks:
        raise ConfigError(
            f"tokens must be more than window and sinks, {window + command.sinks:,}, got {command.tokens:,}; "
            "nothing would be left out"
        )
    device = resolve_device(command.device)
    decoder = trained.decoder(name).to(device)
    count = min(command.texts, (len(text.content) - 1) // command.tokens)
    source = text.tensor(device)
    texts = [source[n * command.tokens : (n + 1) * command.tokens + 1].long()[None] for n in range(count)]
    change = rule_change(name, trained.length)
    return Streaming(
        curves=curves(_modes(decoder, window, command.sinks), texts, window),
        title=f"{SCHEMES[name].label}, trained on passages of {trained.length:,} bytes",
        unit="byte",
        window=window,
        texts=count,
        tokens=command.tokens,
        notes=() if change is None else (change,),
        facts={"settings": json.loads(json.dumps(asdict(command), default=str)), "corpus": corpus.describe()},
    )


def _modes(decoder: ByteDecoder, window: int, sinks: int) -> dict[str, Nats]:
    base = decoder.transformer.positions
    kept = {"full": base, "window": Streamed(base, window, 0, cached=False)}
    for where, cached in (("text", False), ("cache", True)):
        kept[f"window and sinks, {where} distance"] = Streamed(base, window, sinks, cached=cached)

    def reader(mode: str) -> Nats:
        def read(tokens: Tensor) -> Tensor:
            decoder.transformer.positions = kept[mode]
            with torch.no_grad():
                return decoder.nats(tokens[:, :-1], tokens[:, 1:])[0]

        return read

    return {mode: reader(mode) for mode in kept}


def curves(modes: dict[str, Nats], texts: list[Tensor], window: int) -> tuple[Curve, ...]:
    """Return the curve of each mode; one is called "window"."""
    nats = {mode: torch.stack([read(text).cpu() for text in texts]) for mode, read in modes.items()}
    beyond = {mode: _bits_beyond(each, window) for mode, each in nats.items()}
    places = torch.arange(texts[0].shape[1] - 1).repeat(len(texts))
    return tuple(
        Curve(
            mode=mode,
            bins=position_curve(each.flatten(), places, per_octave=1),
            beyond=estimate(beyond[mode]),
            farther=None if mode == "window" else estimate(beyond[mode] - beyond["window"]),
        )
        for mode, each in nats.items()
    )


def _bits_beyond(nats: Tensor, window: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return nats[:, window:].double().mean(dim=1).numpy() / math.log(2)


def streaming_text(found: Streaming) -> str:
    """Return what `linbias stream` prints."""
    bins = [bin for bin in found.curves[0].bins if bin["last"] + 1 >= found.window // 2][-7:]
    header = ("bits by tokens seen", *(f"{bin['first']:,}+" for bin in bins))
    lines = [
        (curve.mode, *(f"{bin['bits']:.3f}" for bin in curve.bins if bin["first"] >= bins[0]["first"]))
        for curve in found.curves
    ]
    beyond = [
        (curve.mode, str(curve.beyond), "" if curve.farther is None else str(curve.farther)) for curve in found.curves
    ]
    return "\n".join(
        (
            wrap(f"{found.title}; {found.texts} texts of {found.tokens:,} tokens, window {found.window:,}"),
            "",
            align(header, lines),
            "",
            wrap(f"At places with more than {found.window:,} tokens before them, and less what the window has there:"),
            align((f"bits per {found.unit}", "mean", "less the window's"), beyond),
            "",
            *map(wrap, found.notes),
            wrap(f"interval: {METHOD}"),
        )
    )


def write_streaming(found: Streaming, folder: Path) -> list[Path]:
    """Write streaming.png, .csv and .json below `folder`, and return their paths."""
    plot, table, data = (folder / f"streaming.{kind}" for kind in ("png", "csv", "json"))
    write_text(data, json.dumps({"interval": METHOD, **asdict(found)}, indent=1, allow_nan=False))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("mode", "first", "last", "bits", "tokens"))
    for curve in found.curves:
        writer.writerows((curve.mode, bin["first"], bin["last"], bin["bits"], bin["bytes"]) for bin in curve.bins)
    write_text(table, stream.getvalue())
    write_bytes(plot, draw_streaming(found))
    return [plot, table, data]


def draw_streaming(found: Streaming) -> bytes:
    """Return a PNG: loss by tokens seen for each mode."""
    figure, (ax,) = new_figure(8.0, 4.6, 1)
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
    for curve, colour in zip(found.curves, colours, strict=False):
        x = [((bin["first"] + 1) * (bin["last"] + 1)) ** 0.5 for bin in curve.bins]
        ax.plot(x, [bin["bits"] for bin in curve.bins], color=colour, linewidth=2, label=curve.mode)
    log_lengths(ax, [2**power for power in range(0, found.tokens.bit_length(), 2)])
    ax.axvline(found.window, color="#8a8f9c", linewidth=1, linestyle=(0, (4, 3)))
    ax.legend(frameon=False, fontsize=9)
    label(ax, f"Loss by tokens seen; window {found.window:,}", "tokens seen", f"bits per {found.unit}")
    return to_png(figure)
