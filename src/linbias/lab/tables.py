# SPDX-License-Identifier: Apache-2.0
"""Text tables."""

import textwrap
from collections.abc import Mapping, Sequence

WIDTH = 80
"""Columns of a terminal that nobody widened."""


def align(header: Sequence[str], body: Sequence[Sequence[str]], width: int = WIDTH) -> str:
    """Return a table whose first column is flush left and whose others are flush right.

    One wider than `width` is cut into several of about as many columns, one below the other, that repeat the first.
    """
    rows = [header, *body]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n\n".join(_aligned(rows, widths, [0, *columns]) for columns in _parts(widths, width))


def _parts(widths: Sequence[int], width: int) -> list[range]:
    """The columns after the first in as few runs as fit, none much longer than another."""
    columns = len(widths) - 1
    for count in range(1, columns + 1):
        edges = [1 + columns * part // count for part in range(count + 1)]
        runs = [range(first, last) for first, last in zip(edges, edges[1:], strict=False)]
        if all(widths[0] + sum(2 + widths[column] for column in run) <= width for run in runs):
            return runs
    return [range(column, column + 1) for column in range(1, columns + 1)] or [range(0)]


def _aligned(rows: Sequence[Sequence[str]], widths: Sequence[int], columns: Sequence[int]) -> str:
    def pad(cell: str, column: int) -> str:
        return cell.rjust(widths[column]) if column else cell.ljust(widths[column])

    lines = ["  ".join(pad(row[column], column) for column in columns).rstrip() for row in rows]
    lines.insert(1, "-" * (sum(widths[column] for column in columns) + 2 * (len(columns) - 1)))
    return "\n".join(lines)


def wrap(text: str, indent: int = 0) -> str:
    """Return a paragraph in lines of at most `WIDTH`, those after the first indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def grid(cells: Mapping[tuple[str, int | str], str]) -> tuple[list[str], list[list[str]]]:
    """Return header and body of the table with these cells by row and column, numbers first and ascending."""
    named = list(dict.fromkeys(column for _, column in cells))
    columns = [
        *sorted(each for each in named if isinstance(each, int)),
        *(each for each in named if isinstance(each, str)),
    ]
    header = ["", *(column if isinstance(column, str) else f"{column:,}" for column in columns)]
    rows = dict.fromkeys(row for row, _ in cells)
    return header, [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
