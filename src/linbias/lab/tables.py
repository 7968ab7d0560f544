# SPDX-License-Identifier: Apache-2.0
"""Text tables."""

from collections.abc import Mapping, Sequence


def align(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is flush left and whose others are flush right."""
    rows = [header, *body]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines)


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
