# SPDX-License-Identifier: Apache-2.0
"""Plots as PNG images. matplotlib is used through its objects, never pyplot: no window, no global state."""

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .config import InspectCommand
from .extras import need
from .heads import HeadFacts
from .positions import SCHEMES
from .results import Results, Row

# Okabe and Ito's palette, which colour-blind readers can tell apart, and a shape for each, for print.
_LOOKS = {
    "alibi": ("#0072B2", "o"),
    "rope": ("#D55E00", "s"),
    "sinusoidal": ("#CC79A7", "D"),
    "learned": ("#009E73", "^"),
    "none": ("#7F7F7F", "v"),
    "t5": ("#E69F00", "P"),
    "kerple": ("#882255", "X"),
    "alibi-learned": ("#56B4E9", "<"),
    "alibi-half": ("#44AA99", ">"),
}
_OTHER_LOOK = ("#1f2430", "*")
_DASHES = ((0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)))
"""Of schemes that run the weights of another, whose colour they have, in their order."""
INK, QUIET = "#1f2430", "#8a8f9c"
_DPI = 160


def new_figure(width: float, height: float, columns: int) -> tuple[Any, list[Any]]:
    """Return a figure with a row of axes, in the style of all our plots; sizes in inches."""
    figure = need("matplotlib.figure").Figure(figsize=(width, height), layout="constrained", dpi=_DPI)
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(QUIET)
        ax.tick_params(colors=INK, which="both", labelsize=9)
        ax.grid(axis="y", color="#e4e6ec", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def to_png(figure: Any) -> bytes:
    """Return the figure as PNG, the same bytes for the same figure."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def label(ax: Any, title: str, x: str, y: str) -> None:
    """Give axes their title and the names of their axes."""
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
    ax.set_xlabel(x, fontsize=9.5, color=INK)
    ax.set_ylabel(y, fontsize=9.5, color=INK)


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


def _length_axis(ax: Any, ticks: tuple[int, ...], trained: int) -> None:
    _octave_axis(ax, ticks, [f"{tick:,}" for tick in ticks])
    ax.axvline(trained, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), zorder=1)


def _look(scheme: str) -> tuple[str, str, Any]:
    """Colour, marker and line style of a scheme."""
    base = SCHEMES[scheme].trained_as
    colour, marker = _LOOKS.get(base or scheme, _OTHER_LOOK)
    siblings = [name for name, other in SCHEMES.items() if base is not None and other.trained_as == base]
    return colour, marker, _DASHES[siblings.index(scheme) % len(_DASHES)] if siblings else "-"


def draw_comparison(results: Results) -> bytes:
    """Return a PNG: loss by window length, and loss by place in the longest window."""
    figure, (by_length, by_place) = new_figure(12.0, 4.6, 2)
    for row in results.table_rows():
        _draw_by_length(by_length, row)
        _draw_by_place(by_place, row)
    label(by_length, "Loss by length of the test window", "window, bytes", "bits per byte")
    _length_axis(by_length, results.lengths, results.trained_length)
    label(by_place, "Loss by place in the window", "place, counted from 1", "")
    _length_axis(by_place, _octaves(results.lengths[-1]), results.trained_length)
    for ax in (by_length, by_place):
        low, high = ax.get_ylim()
        ax.annotate(" trained up to here", (results.trained_length, high), fontsize=8, color=QUIET, va="top", ha="left")
        ax.set_ylim(low, high)
    handles, labels = by_place.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=6, frameon=False, fontsize=9.5, labelcolor=INK)
    return to_png(figure)


def _octaves(longest: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(longest.bit_length()) if 2**power <= longest)


def _draw_by_length(ax: Any, row: Row) -> None:
    cells = [cell for cell in row.cells if cell.bits is not None]
    estimates = [cell.bits for cell in cells if cell.bits is not None]
    if not cells:
        return
    x, y = [cell.length for cell in cells], [bits.mean for bits in estimates]
    colour, marker, dashes = _look(row.scheme)
    below = [0.0 if bits.low is None else bits.mean - bits.low for bits in estimates]
    above = [0.0 if bits.high is None else bits.high - bits.mean for bits in estimates]
    style = {"color": colour, "marker": marker, "linestyle": dashes, "markersize": 5, "linewidth": 2}
    ax.errorbar(x, y, yerr=(below, above), capsize=3, zorder=3, **style)


def _draw_by_place(ax: Any, row: Row) -> None:
    curve = row.by_place()
    colour, _, dashes = _look(row.scheme)
    x = [((bin["first"] + 1) * (bin["last"] + 1)) ** 0.5 for bin in curve]
    ax.plot(x, [bin["bits"] for bin in curve], color=colour, linestyle=dashes, linewidth=2, label=row.label, zorder=3)


def draw_heads(command: InspectCommand, facts: list[HeadFacts]) -> bytes:
    """Return a PNG: the weight of a key by distance for each head, and how much of the text each head reaches."""
    figure, (decay, share) = new_figure(12.0, 4.6, 2)
    palette = need("matplotlib").colormaps["viridis"]
    shades = [palette(0.05 + 0.85 * rank / max(1, len(facts) - 1)) for rank in range(len(facts))]
    slopes = sorted((fact.slope for fact in facts), reverse=True)
    for fact in facts:
        _draw_decay(decay, command, fact, shades[slopes.index(fact.slope)])
    label(decay, "Weight of a key, relative to the query's own", "distance, tokens", "")
    decay.set_xscale("symlog", base=2, linthresh=1)
    decay.set_yscale("log")
    decay.set_ylim(1e-12, 3 * math.exp(min(command.content, 600.0)))
    _decorate_decay(decay, command)
    reached = [100 * fact.keys for fact in facts]
    places = np.arange(len(facts))
    pairs = [100 * fact.pairs for fact in facts]
    share.bar(places - 0.2, reached, color="#b9c0cf", width=0.4, label="of the keys of the last query")
    share.bar(places + 0.2, pairs, color="#0072B2", width=0.4, label="of all causal pairs")
    label(share, f"Within reach, of {command.length:,} tokens", "head", "percent")
    share.set_ylim(0, 119)
    share.set_yticks(range(0, 101, 20))
    share.legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper left")
    share.set_xticks(places[:: max(1, len(facts) // 8)])
    return to_png(figure)


def _draw_decay(ax: Any, command: InspectCommand, fact: HeadFacts, colour: Any) -> None:
    distances = np.unique(np.round(np.geomspace(1, command.length, 200)))
    distances = np.concatenate(([0.0], distances))
    ax.plot(distances, _weight(command, fact.slope * distances), color=colour, linewidth=1.8)
    if fact.reach < command.length:
        height = _weight(command, np.array([fact.slope * fact.reach]))
        ax.plot([fact.reach], height, marker="o", markersize=5, color=colour, markeredgecolor="white")


def _weight(command: InspectCommand, bias: Any) -> Any:
    # Plots end where doubles do; beyond e^600 a bound says nothing about anyone's model.
    return np.exp(np.minimum(command.content - bias, 600.0))


def _decorate_decay(ax: Any, command: InspectCommand) -> None:
    powers = range(0, command.length.bit_length(), 2)
    ax.set_xticks([0, *(2**power for power in powers)], ["0", *(f"{2**power:,}" for power in powers)])
    ax.minorticks_off()
    ax.set_xlim(0, command.length)
    ax.annotate(
        "dot: reach of the head; steep heads dark", (0.02, 0.03), xycoords="axes fraction", fontsize=8, color=QUIET
    )
