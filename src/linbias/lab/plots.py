# SPDX-License-Identifier: Apache-2.0
"""Plots as PNG images. matplotlib is used through its objects, never pyplot: no window, no global state."""

import io
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .extras import need
from .heads import HeadFacts
from .positions import SCHEMES
from .results import Results, Row

# Okabe and Ito's palette, which colour-blind readers can tell apart, a lighter shade of each for dark pages, and a
# shape for each, for print.
_LOOKS = {
    "alibi": ("#0072B2", "#56B4E9", "o"),
    "rope": ("#D55E00", "#F0883E", "s"),
    "sinusoidal": ("#CC79A7", "#DDA0C4", "D"),
    "learned": ("#009E73", "#2FC79B", "^"),
    "none": ("#7F7F7F", "#A8ADB8", "v"),
}
_DASHES = ((0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)))
"""Of schemes that run the weights of another, whose looks they have, in their order."""
_OTHER_LOOKS = (
    *(("#E69F00", "#F3BC3F", "P"), ("#56B4E9", "#9AD4F5", "X"), ("#A6761D", "#D1A24A", "<")),
    *(("#5B4FA3", "#A79BEA", ">"), ("#B22222", "#F07178", "p"), ("#B5B000", "#F0E442", "h")),
)
INK, QUIET = "#1f2430", "#8a8f9c"
_DPI = 160
_MOST_CURVES = 64
IMAGES: dict[str, dict[str, None]] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""What a picture can be written as, without the stamps that matplotlib adds: same figure, same bytes."""


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of a page that a plot stands on."""

    ink: str
    quiet: str
    grid: str
    paper: str
    dark: bool = False


LIGHT = Theme(ink=INK, quiet=QUIET, grid="#e4e6ec", paper="white")
DARK = Theme(ink="#e3e6ee", quiet="#8b92a5", grid="#333a4a", paper="#161a23", dark=True)


def new_figure(width: float, height: float, columns: int, theme: Theme = LIGHT) -> tuple[Any, list[Any]]:
    """Return a figure with a row of axes, in the style of all our plots; sizes in inches."""
    figure = need("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained", dpi=_DPI, facecolor=theme.paper
    )
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for ax in axes:
        ax.set_facecolor(theme.paper)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(theme.quiet)
        ax.tick_params(color=theme.quiet, labelcolor=theme.ink, which="both", labelsize=9)
        ax.grid(axis="y", color=theme.grid, linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def to_png(figure: Any) -> bytes:
    """Return the figure as PNG, the same bytes for the same figure."""
    return to_image(figure, "png")


def to_image(figure: Any, kind: str) -> bytes:
    """Return the figure as an image of one of `IMAGES`."""
    stream = io.BytesIO()
    stamps: dict[str, dict[str, Any]] = {
        "png": {"Software": None},
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }
    figure.savefig(stream, format=kind, metadata=stamps[kind])
    return stream.getvalue()


def label(ax: Any, title: str, x: str, y: str, theme: Theme = LIGHT) -> None:
    """Give axes their title and the names of their axes."""
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=theme.ink, pad=10)
    ax.set_xlabel(x, fontsize=9.5, color=theme.ink)
    ax.set_ylabel(y, fontsize=9.5, color=theme.ink)


def log_lengths(ax: Any, lengths: list[int]) -> None:
    """Give axes a logarithmic x of lengths, 1k for 1,024."""
    _octave_axis(ax, lengths, [f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}" for length in lengths])


def _octave_axis(ax: Any, ticks: Sequence[int], names: Sequence[str]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, names)
    ax.minorticks_off()


def log_values(ax: Any) -> None:
    """Give axes a logarithmic y with plain numbers."""
    ax.set_yscale("log")
    ax.minorticks_off()
    ax.yaxis.set_major_locator(need("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _length_axis(ax: Any, ticks: Sequence[int], trained: int, theme: Theme) -> None:
    """A logarithmic x with at most eight numbers, and a line where training ended."""
    step = math.ceil(len(ticks) / 8)
    shown = ticks[(len(ticks) - 1) % step :: step]
    _octave_axis(ax, shown, [f"{tick:,}" for tick in shown])
    ax.axvline(trained, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    low, high = ax.get_ylim()
    ax.annotate(" trained up to here", (trained, high), fontsize=8, color=theme.quiet, va="top", ha="left")
    ax.set_ylim(low, high)


def draw_comparison(results: Results) -> bytes:
    """Return a PNG: loss by window length, and loss by place in the longest window."""
    figure, (by_length, by_place) = new_figure(12.0, 4.6, 2)
    _draw_by_length(by_length, results, LIGHT)
    _draw_by_place(by_place, results, LIGHT)
    by_place.set_ylabel("")
    handles, labels = by_place.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=6, frameon=False, fontsize=9.5, labelcolor=INK)
    return to_png(figure)


def draw_panels(results: Results, theme: Theme) -> tuple[bytes, bytes]:
    """Return the two halves of `draw_comparison` as PNGs of their own, narrow enough to be read on a phone."""
    images: list[bytes] = []
    for draw in (_draw_by_length, _draw_by_place):
        figure, (ax,) = new_figure(4.6, 4.4, 1, theme)
        draw(ax, results, theme)
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=9, labelcolor=theme.ink
        )
        images.append(to_png(figure))
    return images[0], images[1]


def _octaves(longest: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(longest.bit_length()) if 2**power <= longest)


def _looks(results: Results, theme: Theme) -> list[tuple[Row, dict[str, Any]]]:
    """Each row with its colour, marker and dashes; trained schemes without looks of their own take them in turn."""
    others, looks, followers = itertools.cycle(_OTHER_LOOKS), dict(_LOOKS), Counter[str]()
    found: list[tuple[Row, dict[str, Any]]] = []
    for row in results.table_rows():
        base = SCHEMES[row.scheme].trained_as
        if (base or row.scheme) not in looks:
            looks[base or row.scheme] = next(others)
        light, dark, marker = looks[base or row.scheme]
        dashes = "-" if base is None else _DASHES[followers[base] % len(_DASHES)]
        if base is not None:
            followers[base] += 1
        found.append((row, {"color": dark if theme.dark else light, "marker": marker, "linestyle": dashes}))
    return found


def _draw_by_length(ax: Any, results: Results, theme: Theme) -> None:
    rows = _looks(results, theme)
    for number, (row, look) in enumerate(rows):
        found = [(cell.length, cell.bits) for cell in row.cells if cell.bits is not None]
        # Beside one another, so that equal losses do not hide each other.
        beside = 2 ** (0.06 * (number - (len(rows) - 1) / 2))
        means = [bits.mean for _, bits in found]
        spread = (
            [0.0 if bits.low is None else bits.mean - bits.low for _, bits in found],
            [0.0 if bits.high is None else bits.high - bits.mean for _, bits in found],
        )
        style = {**look, "markersize": 5, "linewidth": 2, "capsize": 3, "label": row.label}
        ax.errorbar([length * beside for length, _ in found], means, yerr=spread if found else None, zorder=3, **style)
    label(ax, "Loss by length of the test window", "window, bytes", "bits per byte", theme)
    _length_axis(ax, results.lengths, results.trained_length, theme)


def _draw_by_place(ax: Any, results: Results, theme: Theme) -> None:
    rows = _looks(results, theme)
    for number, (row, look) in enumerate(rows):
        curve = row.by_place()
        x = [((bin["first"] + 1) * (bin["last"] + 1)) ** 0.5 for bin in curve]
        # Each curve is narrower than those before it, so that one below another shows at its rims.
        width = 1.5 + 2.5 * (len(rows) - 1 - number) / max(1, len(rows) - 1)
        style = {**look, "marker": None, "linewidth": width, "label": row.label}
        ax.plot(x, [bin["bits"] for bin in curve], zorder=3, **style)
    label(ax, "Loss by place in the window", "place, counted from 1", "bits per byte", theme)
    _length_axis(ax, _octaves(results.lengths[-1]), results.trained_length, theme)


def draw_heads(facts: Sequence[HeadFacts], length: int, kind: str = "png") -> bytes:
    """Return an image: the weight of a key by distance for each head, and how much of the text each head reaches."""
    figure, (decay, share) = new_figure(12.0, 4.6, 2)
    palette = need("matplotlib").colormaps["viridis"]
    steepest = sorted(facts, key=lambda fact: -fact.slope)
    drawn = steepest[:: math.ceil(len(steepest) / _MOST_CURVES)]
    for rank, fact in enumerate(drawn):
        _draw_decay(decay, fact, length, palette(0.05 + 0.85 * rank / max(1, len(drawn) - 1)))
    label(decay, "Weight of a key, relative to the query's own", "distance, tokens", "")
    decay.set_xscale("symlog", base=2, linthresh=1)
    decay.set_yscale("log")
    decay.set_ylim(1e-12, 3 * math.exp(min(max(fact.content for fact in facts), 600.0)))
    _decorate_decay(decay, length, len(drawn), len(facts))
    places = np.arange(len(facts))
    share.bar(
        places - 0.2, [100 * fact.keys for fact in facts], color="#b9c0cf", width=0.4, label="of the last query's keys"
    )
    share.bar(places + 0.2, [100 * fact.pairs for fact in facts], color="#0072B2", width=0.4, label="of all pairs")
    label(share, f"Within reach, of {length:,} tokens", "head", "percent")
    share.set_ylim(0, 119)
    share.set_yticks(range(0, 101, 20))
    share.legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper left")
    share.set_xticks(places[:: max(1, len(facts) // 8)])
    return to_image(figure, kind)


def _draw_decay(ax: Any, fact: HeadFacts, length: int, colour: Any) -> None:
    distances = np.unique(np.round(np.geomspace(1, length, 200)))
    distances = np.concatenate(([0.0], distances))
    ax.plot(distances, _weight(fact, distances), color=colour, linewidth=1.8)
    if fact.reach < length:
        height = _weight(fact, np.array([fact.reach]))
        ax.plot([fact.reach], height, marker="o", markersize=5, color=colour, markeredgecolor="white")


def _weight(fact: HeadFacts, distances: Any) -> Any:
    # Plots end where doubles do; beyond e^600 a bound says nothing about anyone's model.
    return np.exp(np.minimum(fact.content - fact.slope * distances, 600.0))


def _decorate_decay(ax: Any, length: int, drawn: int, heads: int) -> None:
    powers = range(0, length.bit_length(), 2)
    ax.set_xticks([0, *(2**power for power in powers)], ["0", *(f"{2**power:,}" for power in powers)])
    ax.minorticks_off()
    ax.set_xlim(0, length)
    some = "" if drawn == heads else f"; {drawn} of {heads:,} heads"
    ax.annotate(
        f"dot: reach of the head; steep heads dark{some}",
        (0.02, 0.03),
        xycoords="axes fraction",
        fontsize=8,
        color=QUIET,
    )
