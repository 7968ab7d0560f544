# SPDX-License-Identifier: Apache-2.0
"""Text tables."""

from collections.abc import Sequence


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
