# SPDX-License-Identifier: Apache-2.0
"""One HTML page that says what was found and what was run, and needs no other file."""

import base64
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from .. import alibi_slopes
from .extras import need
from .heads import effective_context
from .remarks import headline, interval, remarks
from .results import Cell, Results
from .statistics import METHOD
from .storage import write_text

_NOTICEABLE = 0.02
"""Change in bits per byte from which a cell of the table is tinted."""


def write_page(results: Results, plot: bytes, path: Path) -> None:
    """Render the page for `results`, with `plot` (a PNG) inside it."""
    write_text(path, render_page(results, plot, datetime.now(UTC)))


def render_page(results: Results, plot: bytes, written: datetime) -> str:
    """Return the page as HTML."""
    jinja2 = need("jinja2")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "thousands": lambda value: f"{value:,}",
        "interval": interval,
        "signed": lambda value: f"{value:+z.3f}",
        "tint": _tint,
    }
    template = environment.from_string((resources.files("linbias.lab") / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        results=results,
        headline=headline(results),
        remarks=remarks(results)[1:],
        plot="data:image/png;base64," + base64.b64encode(plot).decode(),
        method=METHOD,
        heads=_heads(results.settings["model"]["heads"]),
        settings=_settings(results),
        written=written.strftime("%Y-%m-%d %H:%M UTC"),
    )


def _tint(cell: Cell) -> str:
    if cell.change is None:
        return ""
    if cell.change.mean <= -_NOTICEABLE:
        return "better"
    if cell.change.mean < _NOTICEABLE:
        return ""
    return "worse" if cell.change.mean < 10 * _NOTICEABLE else "much-worse"


def _heads(count: int) -> list[tuple[int, str, str]]:
    slopes = alibi_slopes(count)
    contexts = effective_context(slopes).tolist()
    return [
        (head, f"{slope:.5g}", f"{context:,.4g}")
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
