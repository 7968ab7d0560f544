# SPDX-License-Identifier: Apache-2.0
"""Results as a text table, JSON and CSV, and what they say in words."""

import csv
import io
import json
from pathlib import Path

from .page import write_page
from .plots import draw_comparison
from .remarks import perplexity_text, remarks
from .results import Cell, Results, Row
from .statistics import METHOD
from .storage import write_bytes, write_text
from .tables import align, wrap

_COLUMNS = (
    *("scheme", "trained_length", "length", "stride", "scored_bytes", "segments"),
    *("bits_per_byte", "low", "high", "perplexity", "change", "change_low", "change_high", "mean_context", "why_not"),
)


def write_exports(results: Results, folder: Path) -> list[Path]:
    """Write results.json, results.csv, plot.png and report.html below `folder`, and return their paths."""
    files = [folder / name for name in ("report.html", "plot.png", "results.csv", "results.json")]
    page, plot, table, data = files
    write_text(data, json.dumps(results.as_dict(), indent=1, allow_nan=False))
    write_text(table, csv_table(results))
    image = draw_comparison(results)
    write_bytes(plot, image)
    write_page(results, image, page)
    return files


def csv_table(results: Results) -> str:
    """Return one line for each scheme and length, as CSV with a header."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in results.rows:
        for cell in row.cells:
            context = (row.scheme, results.trained_length, cell.length, results.stride or cell.length)
            writer.writerow((*context, results.scored, results.segments, *_numbers(cell), cell.why_not))
    return stream.getvalue()


def _numbers(cell: Cell) -> tuple[float | None, ...]:
    bits, change = cell.bits, cell.change
    return (
        *((bits.mean, bits.low, bits.high) if bits else (None,) * 3),
        cell.perplexity,
        *((change.mean, change.low, change.high) if change else (None,) * 3),
        cell.mean_context,
    )


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
        "Perplexity per byte, 2 ** bits",
        align(header, perplexity),
        *map(wrap, remarks(results)),
        wrap(f"±: half the width of the interval, a {METHOD}"),
    ]
    return "\n\n".join(parts)


def _bits(row: Row) -> list[str]:
    return [row.absence if cell.bits is None else str(cell.bits) for cell in row.cells]


def _perplexity(row: Row) -> list[str]:
    return [row.absence if cell.bits is None else perplexity_text(cell.perplexity, 2) for cell in row.cells]
