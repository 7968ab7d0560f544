# SPDX-License-Identifier: Apache-2.0
"""What a record says, as text."""

from collections.abc import Sequence

from ..tables import align
from .peers import BASELINE
from .record import BOTH, FORWARD, Found, Record, Timing

Goals = dict[tuple[str, str], dict[int, float]]
GOALS: Goals = {
    ("linbias native", FORWARD): {512: 2.2, 1024: 2.3, 2048: 2.8, 4096: 3.6, 8192: 5.0, 16384: 8.0, 65536: 25.0},
    ("linbias native", BOTH): {1024: 1.8, 4096: 3.0, 8192: 4.5},
    ("linbias tiled", FORWARD): {1024: 1.2, 2048: 1.5, 4096: 1.8, 8192: 2.5},
    ("linbias tiled", BOTH): {8192: 2.0},
}
"""Ratios to reach on normal inputs with one thread, by implementation, direction and length."""


def describe(record: Record) -> str:
    """Return everything that was found, as tables."""
    normal = [timing for timing in record.timings if timing.inputs == "normal"]
    goals = GOALS if record.machine.get("threads used") == 1 else {}
    blocks = [_by_length(normal, direction, goals) for direction in (FORWARD, BOTH)]
    blocks += [_by_inputs(record), _figures(record), _memory(record)]
    facts = "\n".join(f"{name}: {value}" for name, value in record.machine.items())
    failed = {what: why for found in record.found.values() for what, why in found.not_run.items()}
    gaps = "\n".join(f"not run: {what}: {why}" for what, why in failed.items())
    return "\n\n".join(block for block in [*blocks, facts, gaps] if block)


def line_of(found: Found) -> str:
    """Return the gist of one job in a line."""
    several = len({timing.inputs for timing in found.timings}) > 1
    parts = [f"{timing.implementation} {_ratio(timing)}{f' ({timing.inputs})' * several}" for timing in found.timings]
    parts += [f"{figure.reached:.3g} (goal {figure.relation} {figure.goal:g})" for figure in found.figures]
    parts += [f"{name} {size:.0f} MiB" for name, size in found.memory_mib.items()]
    return ", ".join(parts) or "; ".join(f"{what}: {why}" for what, why in found.not_run.items())


def _ratio(timing: Timing) -> str:
    if timing.ratio is None:
        return f"{timing.seconds:.3g} s"
    return f"{'~' if timing.baseline_estimated else ''}{timing.ratio:.2f}x"


def _by_length(timings: Sequence[Timing], direction: str, goals: Goals) -> str:
    """One row an implementation, one column a length, the goals below their row."""
    chosen = [timing for timing in timings if timing.direction == direction]
    if not chosen:
        return ""
    lengths = sorted({timing.length for timing in chosen})
    body: list[list[str]] = []
    for name in dict.fromkeys(timing.implementation for timing in chosen):
        row = {timing.length: timing for timing in chosen if timing.implementation == name}
        errors = [timing.error for timing in row.values() if timing.error is not None]
        cells = [_ratio(row[length]) if length in row else "-" for length in lengths]
        body.append([name, *cells, f"{max(errors):.0e}" if errors else ""])
        aims = goals.get((name, direction), {})
        if aims.keys() & set(lengths):
            body.append(["  goal", *(f"{aims[length]:.1f}x" if length in aims else "" for length in lengths), ""])
        if any(timing.computed is not None for timing in row.values()):
            shares = [row[length].computed if length in row else None for length in lengths]
            body.append(["  of the pairs", *("" if share is None else f"{share:.0%}" for share in shares), ""])
    times = {timing.length: timing.baseline_seconds for timing in chosen if not timing.baseline_estimated}
    milliseconds = [times.get(length) for length in lengths]
    body.append([f"{BASELINE}, ms", *("" if each is None else f"{each * 1e3:,.1f}" for each in milliseconds), ""])
    title = f"{direction}, tokens: time of causal SDPA without any bias over ours (above 1 is faster)"
    if any(timing.computed is not None for timing in chosen):
        title += "\nof the pairs: computed, over visible; above 100 % where whole tiles reach beyond the diagonal"
    if any(timing.baseline_estimated for timing in chosen):
        title += "\n~ SDPA was not run at this length: its time at the longest that was, growing with the square"
    table = align((direction, *(f"{length:,}" for length in lengths), "error" if direction == FORWARD else ""), body)
    return f"{title}\n{table}"


def _by_inputs(record: Record) -> str:
    """Forward on inputs that are not noise, beside noise of the same length."""
    others = [timing for timing in record.timings if timing.inputs != "normal"]
    if not others:
        return ""
    (length,) = {timing.length for timing in others}
    same = [timing for timing in record.timings if timing.length == length and timing.direction == FORWARD]
    kinds = list(dict.fromkeys(timing.inputs for timing in same))
    found = {(timing.implementation, timing.inputs): timing for timing in same}
    names = dict.fromkeys(timing.implementation for timing in same)
    body = [[name, *(_ratio(found[name, kind]) if (name, kind) in found else "-" for kind in kinds)] for name in names]
    return f"forward at {length:,} tokens, by what is attended\n{align(('', *kinds), body)}"


def _figures(record: Record) -> str:
    if not record.figures:
        return ""
    body = [
        (figure.name, f"{figure.reached:.2f}", f"{figure.relation} {figure.goal:g}", "" if figure.met else "missed")
        for figure in record.figures
    ]
    return align(("figure", "reached", "goal", ""), body)


def _memory(record: Record) -> str:
    sizes = {name: size for found in record.found.values() for name, size in found.memory_mib.items()}
    if not sizes:
        return ""
    body = [(name, f"{size:,.0f}") for name, size in sizes.items()]
    return align(("memory of one forward, output and bias included", "MiB"), body)
