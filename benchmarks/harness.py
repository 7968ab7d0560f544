# SPDX-License-Identifier: Apache-2.0
"""What the project's measurements share: options, a record that a later run goes on from, figures with goals, tables.

Clocks, turns, the core they stay on and the loop that measures what is missing are those of `linbias bench`.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.pairs import ratio_of_pairs
from linbias.lab.bench import timing
from linbias.lab.bench.record import Finding, Measurement, Record, measure, surroundings
from linbias.lab.environment import versions
from linbias.lab.progress import Interrupted
from linbias.lab.storage import digest_of_facts, digest_of_files
from linbias.lab.tables import align, grid

HERE = Path(__file__).parent
MET: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda reached, goal: reached >= goal,
    "<=": lambda reached, goal: reached <= goal,
    "<": lambda reached, goal: reached < goal,
}
Cells = dict[tuple[str, int | str], str]


def parser(about: str | None, output: str) -> argparse.ArgumentParser:
    """A parser with the options that every measurement has."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="short texts, few repetitions")
    options.add_argument("--threads", type=int, default=1, help="of torch; 1: CPU time on one core, more: the wall's")
    options.add_argument("--again", action="store_true", help="measure what the record already holds once more")
    options.add_argument("--output", type=Path, default=HERE / "results" / output)
    return options


def open_record(options: argparse.Namespace) -> Record:
    """The record to go on from, without what could not be had; or, where there is none, a new one."""
    measuring = {
        path.as_posix(): path for folder in (HERE, Path(timing.__file__).parent) for path in folder.glob("*.py")
    }
    settings = {
        "threads": options.threads,
        "quick": options.quick,
        "transformers": versions()["transformers"],
        "code": digest_of_facts(measuring=digest_of_files(measuring)),
    }
    if options.output.exists() and not options.again:
        record = Record.read(options.output)
        differ = [name for name, value in settings.items() if record.facts.get(name) != value]
        if differ:
            raise SystemExit(
                f"{options.output} was made with another {', '.join(differ)}: --again replaces it, --output keeps it"
            )
        kept = {name: found for name, found in record.found.items() if not all("not_run" in one for one in found)}
        return Record(record.facts, kept)
    return Record({**surroundings(), **rates(), **settings})


def carry_out(
    title: str, plan: Callable[[Record], list[Measurement]], options: argparse.Namespace, gist: Callable[[Any], str]
) -> Record:
    """Measure what is planned and not yet in the record; SystemExit where it was interrupted."""
    torch.set_num_threads(options.threads)
    record = open_record(options)
    try:
        measure(title, plan(record), record, options.output, gist)
    except Interrupted as stop:
        raise SystemExit(f"{stop}; the same command goes on from here") from None
    return record


def rates() -> dict[str, float]:
    """What one core can do through torch: products in float32, and reading."""
    left, right, data = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.ones(2**26)
    with timing.one_core():
        times = timing.best_in_turns({"product": lambda: left @ right, "sum": data.sum}, 7)
    return {
        "SGEMM, GFLOP/s": round(2 * 1024**3 / times["product"] / 1e9, 1),
        "reading, GB/s": round(data.nbytes / times["sum"] / 1e9, 1),
    }


def figure(name: str, reached: float, relation: str, goal: float, interval: Sequence[float] = ()) -> Finding:
    """One number with what it should be, and the interval of its pairs."""
    return {"figure": name, "reached": reached, "relation": relation, "goal": goal, "interval": list(interval)}


def ratio_figure(
    name: str, over: Sequence[float], under: Sequence[float], relation: str, goal: float, factor: float = 1.0
) -> Finding:
    """The ratio of the best times, `factor` times; with the interval of the pairs' ratios after the first turn."""
    pairs = ratio_of_pairs(over[1:], under[1:])
    interval = (factor * pairs.low, factor * pairs.high)
    return figure(name, factor * min(over) / min(under), relation, goal, interval)


def figure_text(found: Finding) -> str:
    """What a figure reached, its interval, and its goal."""
    interval = f" ({found['interval'][0]:.3g} to {found['interval'][1]:.3g})" if found["interval"] else ""
    return f"{found['reached']:.3g}{interval}, goal {found['relation']} {found['goal']:g}"


def figures_table(record: Record) -> str:
    """All figures with their goals."""
    rows: list[list[str]] = []
    for found in record.having("figure"):
        reached, _, goal = figure_text(found).rpartition(", goal ")
        met = MET[found["relation"]](found["reached"], found["goal"])
        rows.append([found["figure"], reached, goal, "" if met else "missed"])
    return align(("figure", "reached (95 % of pairs)", "goal", ""), rows) if rows else ""


def text_table(title: str, cells: Cells) -> str:
    """A table by row and column, or nothing."""
    return f"{title}\n{align(*grid(cells))}" if cells else ""


def markdown(cells: Cells) -> str:
    """The same for a page."""
    header, body = grid(cells)
    lines = ["| " + " | ".join(row) + " |" for row in (header, *body)]
    return "\n".join([lines[0].replace("|  |", "| |", 1), "|---" * len(header) + "|", *lines[1:]])


def load(path: Path) -> Record:
    """A record as it was written."""
    return Record(**json.loads(path.read_text()))
