# SPDX-License-Identifier: Apache-2.0
"""The picture of a record: time per token, and the ratio to attention without a bias, against length."""

from typing import Any

from ..plots import INK, QUIET, label, log_lengths, log_values, new_figure, to_png
from .peers import BASELINE
from .record import FORWARD, Record, Timing
from .tables import GOALS

_LOOKS = {
    "linbias native": ("#0072B2", "o"),
    "linbias tiled": ("#56B4E9", "s"),
    "linbias reference": ("#999999", "P"),
    "SDPA, dense ALiBi mask": ("#D55E00", "D"),
    "FlexAttention, compiled": ("#CC79A7", "v"),
    "eager formula": ("#E69F00", "^"),
    "bias as extra channel": ("#009E73", "X"),
}


def draw_bench(record: Record) -> bytes | None:
    """Return a PNG: microseconds per token, and SDPA's time over each implementation's, against length, forward.

    None if no forward was timed.
    """
    chosen = [timing for timing in record.timings if (timing.inputs, timing.direction) == ("normal", FORWARD)]
    if not chosen:
        return None
    figure, (cost, ratio) = new_figure(12.0, 4.8, 2)
    for name in dict.fromkeys(timing.implementation for timing in chosen):
        row = [timing for timing in chosen if timing.implementation == name]
        colour, marker = _LOOKS[name]
        style = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 2}
        cost.plot([t.length for t in row], [_per_token(t.seconds, t.length) for t in row], label=name, **style)
        known = [(t.length, t.ratio) for t in row if t.ratio is not None]
        ratio.plot([length for length, _ in known], [value for _, value in known], **style)
        goals = GOALS.get((name, FORWARD), {}) if record.machine.get("threads used") == 1 else {}
        aims = [(length, goals[length]) for length, _ in known if length in goals]
        ratio.scatter([x for x, _ in aims], [y for _, y in aims], marker="_", s=160, color=colour, zorder=2)
    _draw_baseline(cost, chosen)
    ratio.axhline(1, color=INK, linewidth=1)
    ratio.annotate("dashes: goals", (0.02, 0.95), xycoords="axes fraction", fontsize=8, color=QUIET)
    label(cost, "Time per token, forward", "tokens", "microseconds")
    label(ratio, "Time of SDPA without any bias over this", "tokens", "")
    for ax in (cost, ratio):
        log_lengths(ax, sorted({timing.length for timing in chosen}))
        log_values(ax)
    handles, labels = cost.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    return to_png(figure)


def _per_token(seconds: float, length: int) -> float:
    return seconds / length * 1e6


def _draw_baseline(ax: Any, timings: list[Timing]) -> None:
    """Solid where it was run, dotted where it is taken to grow with the square."""
    times = {t.length: (t.baseline_seconds, t.baseline_estimated) for t in timings if t.baseline_seconds is not None}
    run = [(length, seconds) for length, (seconds, estimated) in times.items() if not estimated]
    further = run[-1:] + [(length, seconds) for length, (seconds, estimated) in times.items() if estimated]
    drawn = [(run, "-", BASELINE)] + ([(further, ":", f"{BASELINE}: square growth")] if len(further) > 1 else [])
    for points, line, name in drawn:
        x, y = [length for length, _ in points], [_per_token(seconds, length) for length, seconds in points]
        ax.plot(x, y, color=INK, linewidth=2, linestyle=line, label=name, zorder=2)
