# SPDX-License-Identifier: Apache-2.0
"""Tables and a picture of a record of models.py: ``python -m benchmarks.models_page [RECORD] [--picture FILE]``."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import load, markdown
from benchmarks.models import OURS, PATCHED
from linbias.lab.plots import INK, label, log_lengths, log_values, new_figure, to_png
from linbias.lab.storage import write_bytes

Figures = list[dict[str, Any]]

NAMES = {"bloom": "BLOOM", "mpt": "MPT", "falcon": "Falcon"}
COLOURS = {"bloom": "#0072B2", "mpt": "#D55E00", "falcon": "#009E73"}
LINES = {PATCHED: "-", OURS: ":", "eager": "--", "sdpa": "-."}


def table(figures: Figures, work: str, cell: Callable[[dict[str, Any]], str]) -> str:
    """Markdown: a row each model and kind, a column each length."""
    return markdown(
        {
            (f"{NAMES[figure['family']]}, {figure['kind']}", figure["tokens"]): cell(figure)
            if "why" not in figure
            else ""
            for figure in figures
            if figure["work"] == work
        }
    )


def time_and_memory(figure: dict[str, Any]) -> str:
    linear = f" ({figure['linear_seconds']:.2f})" if "linear_seconds" in figure else ""
    return f"{figure['seconds']:.2f}{linear} s, {figure['gigabytes']:.2f} GB"


def speed(figure: dict[str, Any]) -> str:
    return f"{figure['tokens_per_second']:.1f}"


def draw(figures: Figures) -> bytes:
    """PNG: reading time and memory against length, and tokens per second against context."""
    picture, axes = new_figure(13.0, 4.6, 3)
    panels = [("prefill", "seconds"), ("prefill", "gigabytes"), ("decode", "tokens_per_second")]
    for ax, (work, value) in zip(axes, panels, strict=True):
        chosen = [figure for figure in figures if figure["work"] == work and value in figure]
        for family, kind in dict.fromkeys((figure["family"], figure["kind"]) for figure in chosen):
            row = [figure for figure in chosen if (figure["family"], figure["kind"]) == (family, kind)]
            ax.plot(
                [figure["tokens"] for figure in row],
                [figure[value] for figure in row],
                color=COLOURS[family],
                linestyle=LINES[kind],
                marker="o" if kind in (PATCHED, OURS) else "x",
                markersize=5,
                linewidth=2,
                label=f"{NAMES[family]}, {kind}",
            )
        log_lengths(ax, sorted({figure["tokens"] for figure in chosen}))
        if value == "tokens_per_second":
            ax.set_ylim(bottom=0)
        else:
            log_values(ax)
    label(axes[0], "Reading a text", "tokens", "seconds")
    label(axes[1], "Memory at most, reading", "tokens", "GB")
    label(axes[2], "Generating", "tokens of context", "tokens per second")
    named = {name: line for ax in axes for line, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    picture.legend(named.values(), named, loc="outside upper left", ncols=5, frameon=False, fontsize=9, labelcolor=INK)
    return to_png(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", nargs="?", type=Path, default=Path("benchmarks/results/models.json"))
    parser.add_argument("--picture", type=Path, default=Path("benchmarks/results/models.png"))
    options = parser.parse_args()
    figures = load(options.record).having("work")
    print(table(figures, "prefill", time_and_memory), table(figures, "decode", speed), sep="\n\n", end="\n\n")
    print(table(figures, "train", time_and_memory))
    write_bytes(options.picture, draw(figures))


if __name__ == "__main__":
    main()
