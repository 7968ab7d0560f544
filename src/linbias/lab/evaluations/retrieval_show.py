# SPDX-License-Identifier: Apache-2.0
"""Retrieval as a heat map, JSON, CSV and text: the same numbers."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..extras import need
from ..plots import INK, QUIET, label, to_png
from ..positions import SCHEMES, rule_change
from ..storage import write_bytes, write_text
from ..tables import align, wrap
from .retrieval import Answers, Retrieval

_COLUMNS = ("scheme", "pairs", "length", "depth", "seeds", "trials", "hits", "accuracy", "low", "high", "why_not")
_NORMAL = 1.959963984540054


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson's score, over the choice of text."""
    share, z2 = hits / trials, _NORMAL**2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _NORMAL / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def answer_rows(answers: Sequence[Answers]) -> list[dict[str, Any]]:
    """Return a row of numbers for each scheme and question."""
    return [
        {
            "scheme": each.scheme,
            **asdict(each.question),
            "seeds": len(each.hits),
            "trials": each.trials * len(each.hits),
            "hits": sum(each.hits),
            "hits_by_seed": list(each.hits),
            "accuracy": each.accuracy,
            **dict(zip(("low", "high"), _interval(each), strict=True)),
            "why_not": each.why_not,
        }
        for each in answers
    ]


def _interval(answers: Answers) -> tuple[float | None, float | None]:
    # Over several seeds the texts are the same ones, so they count once: the interval is about the choice of text.
    return wilson(round(sum(answers.hits) / len(answers.hits)), answers.trials) if answers.hits else (None, None)


def write_retrieval(found: Retrieval, folder: Path) -> list[Path]:
    """Write retrieval.png, .csv and .json below `folder`, and return their paths."""
    plot, table, data = (folder / f"retrieval.{kind}" for kind in ("png", "csv", "json"))
    numbers = answer_rows(found.answers)
    facts = {
        "trained_length": found.trained_length,
        "seeds": found.seeds,
        "interval": "95 % by Wilson's score over the choice of text; it does not cover the choice of seed",
        "answers": numbers,
        "settings": found.settings,
        "environment": found.environment,
        "corpus": found.corpus,
    }
    write_text(data, json.dumps(facts, indent=1, allow_nan=False))
    stream = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(stream, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(numbers)
    write_text(table, stream.getvalue())
    title = f"Values found, by length and depth; trained at {found.trained_length:,} bytes"
    write_bytes(plot, draw_answers(numbers, title))
    return [plot, table, data]


def draw_answers(numbers: Sequence[dict[str, Any]], title: str) -> bytes:
    """Return a PNG: for each scheme and number of needles, accuracy by length and depth, with the counts."""
    panels = list(dict.fromkeys((row["scheme"], row["pairs"]) for row in numbers))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    size = (4.2 * columns, 3.4 * lines + 0.6)
    figure = need("matplotlib.figure").Figure(figsize=size, layout="constrained", dpi=160)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax, (scheme, pairs) in zip(axes, panels, strict=False):
        chosen = [row for row in numbers if (row["scheme"], row["pairs"]) == (scheme, pairs)]
        needles = "" if len({row["pairs"] for row in numbers}) == 1 else f", {pairs} needle{'s' * (pairs > 1)}"
        _draw_panel(ax, chosen, f"{_label(scheme)}{needles}")
    figure.suptitle(title, x=0.01, ha="left", color=INK)
    return to_png(figure)


def _draw_panel(ax: Any, chosen: Sequence[dict[str, Any]], title: str) -> None:
    lengths = sorted({row["length"] for row in chosen})
    depths = sorted({row["depth"] for row in chosen})
    table = [[math.nan] * len(lengths) for _ in depths]
    for row in chosen:
        x, y = lengths.index(row["length"]), depths.index(row["depth"])
        if row["accuracy"] is None:
            ax.text(x, y, "-", ha="center", va="center", fontsize=8, color=QUIET)
            continue
        table[y][x] = row["accuracy"]
        ink = "white" if row["accuracy"] < 0.6 else "black"
        ax.text(x, y, f"{row['hits']}/{row['trials']}", ha="center", va="center", fontsize=7.5, color=ink)
    ax.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8, color=INK)
    ax.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8, color=INK)
    ax.spines[:].set_visible(False)
    label(ax, title, "length, bytes", "depth (0 %: farthest)")


def answers_table(numbers: Sequence[dict[str, Any]]) -> str:
    """Return hits of texts asked by length, over all depths, as a table."""
    lengths = sorted({row["length"] for row in numbers})
    lines: list[tuple[str, ...]] = []
    for scheme, pairs in dict.fromkeys((row["scheme"], row["pairs"]) for row in numbers):
        cells: list[str] = []
        for length in lengths:
            wanted = (scheme, pairs, length)
            asked = [row for row in numbers if (row["scheme"], row["pairs"], row["length"]) == wanted]
            hits, trials = sum(row["hits"] for row in asked), sum(row["trials"] for row in asked)
            cells.append(f"{hits}/{trials}" if trials else "cannot run")
        lines.append((_label(scheme), str(pairs), *cells))
    return align(("scheme", "needles", *(f"{length:,}" for length in lengths)), lines)


def _label(scheme: str) -> str:
    return SCHEMES[scheme].label if scheme in SCHEMES else scheme


def retrieval_text(found: Retrieval) -> str:
    """Return what `linbias retrieve` prints: accuracy by length, over all depths."""
    told = (rule_change(name, found.trained_length) for name in dict.fromkeys(each.scheme for each in found.answers))
    changes = [wrap(change) for change in told if change is not None]
    seeds = f"{len(found.seeds)} seed{'s' * (len(found.seeds) > 1)}"
    return "\n".join(
        (
            wrap(
                f"Values found of those asked for, at all depths together; trained on passages of "
                f"{found.trained_length:,} bytes, {seeds}"
            ),
            "",
            answers_table(answer_rows(found.answers)),
            *([""] if changes else []),
            *changes,
        )
    )
