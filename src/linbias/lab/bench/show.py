# SPDX-License-Identifier: Apache-2.0
"""What a record of races says: a line, a table, a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..plots import INK, QUIET, label, log_lengths, log_values, new_figure, to_png
from ..tables import align, grid
from .race import BOTH, FORWARD, PLAIN
from .record import Finding, Record

Goals = Mapping[tuple[str, str], Mapping[int, float]]
"""Ratios to reach on normal inputs, by implementation, direction and length."""

_LOOKS = {
    "linbias native": ("#0072B2", "o"),
    "linbias tiled": ("#56B4E9", "s"),
    "linbias reference": ("#999999", "P"),
    "SDPA, dense ALiBi mask": ("#D55E00", "D"),
    "FlexAttention, compiled": ("#CC79A7", "v"),
    "eager formula": ("#E69F00", "^"),
    "bias as extra channel": ("#009E73", "X"),
}


def describe_bench(record: Record, goals: Goals | None = None) -> str:
    """Return what was found on normal inputs, the surroundings and the gaps."""
    blocks = [_by_length(record, direction, goals or {}) for direction in (FORWARD, BOTH)]
    facts = "\n".join(f"{name}: {value}" for name, value in record.facts.items())
    failed = {gap["not_run"]: gap["why"] for gap in record.having("not_run")}
    gaps = "\n".join(f"not run: {what}: {why}" for what, why in failed.items())
    return "\n\n".join(block for block in [*blocks, facts, gaps] if block)


def gist_of_race(findings: Sequence[Finding]) -> str:
    """Return the ratios of a race in a line."""
    ratios = [f"{found['implementation']} {ratio_text(found)}" for found in findings if "ratio" in found]
    return ", ".join(ratios) or "; ".join(f"{gap['not_run']}: {gap['why']}" for gap in findings)


def ratio_text(finding: Finding) -> str:
    """Return how a table shows the ratio of a finding."""
    if finding["ratio"] is None:
        return f"{finding['seconds']:.3g} s"
    return f"{'~' if finding['baseline_estimated'] else ''}{finding['ratio']:.2f}x"


def _chosen(record: Record, direction: str) -> list[Finding]:
    return [row for row in record.having("ratio") if (row["inputs"], row["direction"]) == ("normal", direction)]


def _by_length(record: Record, direction: str, goals: Goals) -> str:
    """One row an implementation, one column a length, the goals below their row."""
    chosen = _chosen(record, direction)
    if not chosen:
        return ""
    cells: dict[tuple[str, int | str], str] = {}
    for name in dict.fromkeys(row["implementation"] for row in chosen):
        own = [row for row in chosen if row["implementation"] == name]
        cells |= {(name, row["length"]): ratio_text(row) for row in own}
        aims = goals.get((name, direction), {})
        cells |= {(f"  goal of {name}", n): f"{aims[n]:.1f}x" for row in own if (n := row["length"]) in aims}
        if direction == FORWARD:
            cells[name, "error"] = f"{max(row['error'] for row in own):.0e}"
            shares = {(f"  pairs of {name}", row["length"]): row["computed"] for row in own}
            cells |= {key: f"{share:.0%}" for key, share in shares.items() if share is not None}
    times = {row["length"]: row["baseline_seconds"] for row in chosen if not row["baseline_estimated"]}
    cells |= {(f"{PLAIN.name}, ms", n): f"{taken * 1e3:,.1f}" for n, taken in times.items() if taken is not None}
    title = f"{direction}, tokens: time of causal SDPA without any bias over ours (above 1 is faster)"
    if direction == FORWARD:
        title += "\npairs: computed, over visible; above 100 % where whole tiles reach beyond the diagonal"
    if any(row["baseline_estimated"] for row in chosen):
        title += "\n~ SDPA was not run at this length: its time at the longest that was, growing with the square"
    return f"{title}\n{align(*grid(cells))}"


def draw_bench(record: Record, goals: Goals | None = None) -> bytes | None:
    """Return a PNG: microseconds per token, and SDPA's time over each implementation's, against length, forward.

    None if no forward was timed.
    """
    chosen = _chosen(record, FORWARD)
    if not chosen:
        return None
    figure, (cost, ratio) = new_figure(12.0, 4.8, 2)
    for name in dict.fromkeys(row["implementation"] for row in chosen):
        own = [row for row in chosen if row["implementation"] == name]
        colour, marker = _LOOKS[name]
        style = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 2}
        _curve(cost, {row["length"]: _per_token(row, "seconds") for row in own}, label=name, **style)
        known = {row["length"]: row["ratio"] for row in own if row["ratio"] is not None}
        _curve(ratio, known, **style)
        aims = {length: aim for length, aim in (goals or {}).get((name, FORWARD), {}).items() if length in known}
        ratio.scatter(list(aims), list(aims.values()), marker="_", s=160, color=colour, zorder=2)
    _draw_baseline(cost, [row for row in chosen if row["baseline_seconds"] is not None])
    ratio.axhline(1, color=INK, linewidth=1)
    if goals:
        ratio.annotate("dashes: goals", (0.02, 0.95), xycoords="axes fraction", fontsize=8, color=QUIET)
    label(cost, "Time per token, forward", "tokens", "microseconds")
    label(ratio, "Time of SDPA without any bias over this", "tokens", "")
    for ax in (cost, ratio):
        log_lengths(ax, sorted({row["length"] for row in chosen}))
        log_values(ax)
    handles, labels = cost.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    return to_png(figure)


def _curve(ax: Any, points: Mapping[int, float], **style: Any) -> None:
    ax.plot(list(points), list(points.values()), **style)


def _per_token(row: Finding, what: str) -> float:
    return row[what] / row["length"] * 1e6


def _draw_baseline(ax: Any, rows: list[Finding]) -> None:
    """Solid where it was run, dotted where it is taken to grow with the square."""
    run = {row["length"]: _per_token(row, "baseline_seconds") for row in rows if not row["baseline_estimated"]}
    grown = {row["length"]: _per_token(row, "baseline_seconds") for row in rows if row["baseline_estimated"]}
    _curve(ax, run, color=INK, linewidth=2, label=PLAIN.name, zorder=2)
    if grown:
        further = dict(list(run.items())[-1:]) | grown
        _curve(ax, further, color=INK, linewidth=2, linestyle=":", label=f"{PLAIN.name}: square growth", zorder=2)
