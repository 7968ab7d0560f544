# SPDX-License-Identifier: Apache-2.0
"""Results as a text table, JSON, CSV and one HTML page that needs no other file."""

import base64
import csv
import io
import itertools
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from .. import alibi_slopes
from .extras import need
from .heads import effective_context, slope_text
from .plots import DARK, LIGHT, draw_comparison, draw_panels
from .remarks import headline, interval, perplexity_text, remarks
from .results import Cell, Results, Row
from .storage import write_bytes, write_text
from .tables import align, wrap

_COLUMNS = (
    *("scheme", "trained_length", "length", "stride", "scored_bytes", "segments"),
    *("bits_per_byte", "low", "high", "perplexity", "change", "change_low", "change_high", "mean_context", "why_not"),
    *("seeds", "seeds_low", "seeds_high", "seeds_change_low", "seeds_change_high"),
)


_REPORT = ("report.html", "plot.png", "results.csv", "results.json")


def write_exports(results: Results, folder: Path) -> list[Path]:
    """Write results.json, results.csv, plot.png and report.html below `folder`, and return their paths."""
    files = [folder / name for name in _REPORT]
    page, plot, table, data = files
    write_text(data, json.dumps(results.as_dict(), indent=1, allow_nan=False))
    write_text(table, csv_table(results))
    write_bytes(plot, draw_comparison(results))
    write_page(results, page)
    return files


def set_aside(results: Results, folder: Path) -> Path | None:
    """Move the report in `folder` into a folder of its own if it holds what `results` lack, and return that folder.

    A report of the same experiment whose every figure `results` have too is left to be written over.
    """
    there = [folder / name for name in _REPORT if (folder / name).exists()]
    if not there or _covers(results, folder / "results.json"):
        return None
    kept = next(place for number in itertools.count(1) if not (place := folder / f"earlier-{number}").exists())
    kept.mkdir()
    for path in there:
        path.rename(kept / path.name)
    return kept


def _covers(results: Results, file: Path) -> bool:
    """Whether the results in `file` are of the same experiment, and each of its figures is among `results`."""
    try:
        before, now = json.loads(file.read_bytes()), json.loads(json.dumps(results.as_dict()))
        same = _experiment(before) == _experiment(now)
        return same and _figures(before) <= _figures(now)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no results of ours, or of another version
        return False


def _experiment(found: dict[str, Any]) -> list[Any]:
    settings = found["settings"]
    splits = {name: facts["sha256"] for name, facts in found["corpus"]["splits"].items()}
    return [settings["model"], settings["train"], settings.get("seeds"), splits, found["scored"], found["stride"]]


def _figures(found: dict[str, Any]) -> set[tuple[str, int]]:
    cells = ((row["scheme"], cell) for row in found["rows"] for cell in row["cells"])
    return {(scheme, cell["length"]) for scheme, cell in cells if cell["bits"] is not None}


def csv_table(results: Results) -> str:
    """Return one line for each scheme and length, as CSV with a header."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in results.rows:
        for cell in row.cells:
            context = (row.scheme, results.trained_length, cell.length, results.stride or cell.length)
            scored = (results.scored, results.segments, *_numbers(cell), cell.why_not)
            writer.writerow((*context, *scored, *_over_seeds(row, cell)))
    return stream.getvalue()


def _numbers(cell: Cell) -> tuple[float | None, ...]:
    bits, change = cell.bits, cell.change
    return (
        *((bits.mean, bits.low, bits.high) if bits else (None,) * 3),
        cell.perplexity,
        *((change.mean, change.low, change.high) if change else (None,) * 3),
        cell.mean_context,
    )


def _over_seeds(row: Row, cell: Cell) -> tuple[float | None, ...]:
    ends = ((each.low, each.high) if each else (None, None) for each in (cell.seeds, cell.seeds_change))
    return (len(row.seeds), *itertools.chain(*ends))


def results_text(results: Results) -> str:
    """Return the tables and remarks that `linbias compare` prints."""
    lengths = results.lengths
    stride = "no overlap" if results.stride is None else f"stride {results.stride:,}"
    header = ("scheme", *(f"{length:,}" for length in lengths))
    bits = [(row.label, *_bits(row)) for row in results.table_rows()]
    perplexity = [(row.label, *_perplexity(row)) for row in results.table_rows()]
    intro = (
        f"trained on passages of {results.trained_length:,} bytes, "
        f"tested on {results.scored:,} bytes of {results.text} ({stride})"
    )
    parts = [
        wrap(f"Bits per byte by window length: {intro}"),
        align(header, bits),
        *_seeds_table(results, header),
        "Perplexity per byte, 2 ** bits",
        align(header, perplexity),
        *map(wrap, remarks(results)),
        wrap(f"±: half the width of the interval, a {results.method}"),
    ]
    return "\n\n".join(parts)


def _seeds_table(results: Results, header: tuple[str, ...]) -> list[str]:
    rows = [(row, [cell.seeds for cell in row.cells]) for row in results.table_rows()]
    lines = [(row.label, *(row.absence if each is None else str(each) for each in seeds)) for row, seeds in rows]
    return ["Bits per byte, ± over seeds", align(header, lines)] if any(any(seeds) for _, seeds in rows) else []


def _bits(row: Row) -> list[str]:
    return [row.absence if cell.bits is None else str(cell.bits) for cell in row.cells]


def _perplexity(row: Row) -> list[str]:
    return [row.absence if cell.bits is None else perplexity_text(cell.perplexity, 2) for cell in row.cells]


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
