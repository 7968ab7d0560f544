# SPDX-License-Identifier: Apache-2.0
"""One HTML page that says what was found and what was run, and needs no other file."""

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from .. import alibi_slopes
from .extras import need
from .heads import effective_context, slope_text
from .plots import DARK, LIGHT, draw_panels
from .remarks import headline, interval, remarks
from .results import Cell, Results
from .storage import write_text

PAPER = {"light": LIGHT, "dark": DARK}


def write_page(results: Results, path: Path) -> None:
    """Render the page for `results`, with its plots inside it."""
    plots = {name: draw_panels(results, theme) for name, theme in PAPER.items()}
    write_text(path, render_page(results, plots, datetime.now(UTC)))


def render_page(results: Results, plots: Mapping[str, tuple[bytes, bytes]], written: datetime) -> str:
    """Return the page as HTML; `plots` are two PNGs for light screens and two for dark ones."""
    jinja2 = need("jinja2")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "thousands": lambda value: f"{value:,}",
        "interval": interval,
        "signed": lambda value: f"{value:+z.3f}",
        "verdict": _verdict,
    }
    template = environment.from_string((resources.files("linbias.lab") / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        results=results,
        headline=headline(results),
        remarks=remarks(results)[1:],
        plots=_inline(plots),
        method=results.method,
        heads=_heads(results.settings["model"]["heads"]),
        settings=_settings(results),
        written=written.strftime("%Y-%m-%d %H:%M UTC"),
    )


def _inline(plots: Mapping[str, tuple[bytes, bytes]]) -> list[dict[str, str]]:
    """Each panel as data URLs by theme."""
    urls = {
        name: ["data:image/png;base64," + base64.b64encode(image).decode() for image in plots[name]] for name in PAPER
    }
    return [dict(zip(urls, panel, strict=True)) for panel in zip(*urls.values(), strict=True)]


def _verdict(cell: Cell) -> str:
    """Better or worse than at the first length where the whole interval of the change says so, else nothing."""
    if cell.change is None or cell.change.low is None or cell.change.high is None:
        return ""
    return "better" if cell.change.high < 0 else "worse" if cell.change.low > 0 else ""


def _heads(count: int) -> list[tuple[int, str, str]]:
    slopes = alibi_slopes(count)
    contexts = effective_context(slopes).tolist()
    return [
        (head, slope_text(slope), f"{context:,.4g}")
        for head, (slope, context) in enumerate(zip(slopes.tolist(), contexts, strict=True), start=1)
    ]


def _settings(results: Results) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Groups of (name, value) for the table of what was run."""
    settings, environment = results.settings, results.environment
    versions = {name: version for name, version in environment["versions"].items() if version}
    return [
        ("model", list(settings["model"].items())),
        ("training", list(settings["train"].items())),
        (
            "testing",
            [
                ("bytes scored", f"{results.scored:,}"),
                ("segments", results.segments),
                ("stride", results.stride or "window length"),
            ],
        ),
        (
            "machine",
            [*environment["machine"].items(), ("device", environment["device"]), ("processes", environment["workers"])],
        ),
        ("versions", list(versions.items())),
    ]
