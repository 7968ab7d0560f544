# SPDX-License-Identifier: Apache-2.0
"""What results say, in words: every sentence is computed from the numbers it states."""

from .positions import rule_change
from .results import Cell, Estimate, Results, Row


def headline(results: Results) -> str:
    """Return the outcome in one sentence."""
    first, last = results.lengths[0], results.lengths[-1]
    changes = [(row.label, row.cells[-1].change) for row in results.table_rows()]
    known = [(label, change) for label, change in changes if change is not None]
    if not known:
        return f"All schemes were tested at {first:,} bytes only."
    parts = [f"{label} {change.mean:+z.2f}" for label, change in sorted(known, key=lambda item: item[1].mean)]
    return f"From {first:,} to {last:,} bytes, bits per byte change by: {', '.join(parts)}."


def remarks(results: Results) -> list[str]:
    """Return the sentences below the table."""
    found = [headline(results)]
    found += [f"{row.label}: {row.diverged}." for row in results.table_rows() if row.diverged]
    found += [
        f"{row.label}: cannot run at {', '.join(f'{cell.length:,}' for cell in cells)} bytes, because {reason}."
        for row in results.table_rows()
        for reason, cells in _refusals(row)
    ]
    found += changed_rules(results)
    early = early_token_effect(results)
    return found + ([early] if early else [])


def _refusals(row: Row) -> list[tuple[str, list[Cell]]]:
    grouped: dict[str, list[Cell]] = {}
    for cell in row.cells:
        if cell.why_not is not None and row.diverged is None:
            grouped.setdefault(cell.why_not, []).append(cell)
    return list(grouped.items())


def changed_rules(results: Results) -> list[str]:
    """Say which rows run trained weights with another rule than that of their training, and what it changes."""
    told = (rule_change(row.scheme, results.trained_length) for row in results.table_rows())
    return [change for change in told if change is not None]


def early_token_effect(results: Results) -> str | None:
    """Say what ALiBi gains by looking farther back than in training; None if it was not tried.

    A longer window has fewer bytes near its start, where there is little context. ALiBi limited to the training length
    has that advantage too.
    """
    full, limited = results.row("alibi"), results.row("alibi-window")
    longest = results.lengths[-1]
    whole = full and full.cell(longest)
    window = limited and limited.cell(longest)
    if not whole or not window or whole.change is None or whole.bits is None or window.bits is None:
        return None
    farther = whole.bits.mean - window.bits.mean
    rest = whole.change.mean - farther
    return (
        f"ALiBi at {longest:,}: {whole.bits.mean:.3f} bits per byte; {window.bits.mean:.3f} when each layer sees only "
        f"the last {results.trained_length:,} bytes, as in training. Looking farther back than in training thus "
        f"changes the loss by {farther:+z.3f}; the other {rest:+z.3f} of the change since {results.lengths[0]:,} come "
        "without it, above all because fewer bytes of a longer window stand near its start."
    )


def interval(estimate: Estimate) -> str:
    """Return the interval of an estimate, or an empty text if it has none."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{estimate.low:.3f} to {estimate.high:.3f}"


def perplexity_text(perplexity: float | None, digits: int) -> str:
    """Return a perplexity as tables show it; None is one that exceeds every float."""
    return "beyond floats" if perplexity is None else f"{perplexity:.{digits}f}"
