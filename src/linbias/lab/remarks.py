# SPDX-License-Identifier: Apache-2.0
"""What results say, in words: every sentence is computed from the numbers it states."""

from .positions import rule_change
from .results import Cell, Estimate, Results, Row

_EVEN = 8.0
"""Bits per byte if all 256 bytes are thought equally likely."""


def headline(results: Results) -> str:
    """Return the outcome in a sentence or two: figures first, changes beside them."""
    first, last = results.lengths[0], results.lengths[-1]
    start, end = _ranked(results, first), _ranked(results, last)
    if not start and not end:
        return "No scheme could be tested."
    trained = ", as trained" if first == results.trained_length else ""
    said = f"Bits per byte, the lowest first. At {first:,} bytes{trained}: {_listed(start) or 'none could run'}."
    if first == last:
        return said
    return f"{said} At {last:,} bytes, with the change: {_listed(end) or 'none could run'}."


def _ranked(results: Results, length: int) -> list[tuple[Row, Cell, Estimate]]:
    cells = [(row, row.cell(length)) for row in results.table_rows()]
    known = [(row, cell, cell.bits) for row, cell in cells if cell is not None and cell.bits is not None]
    return sorted(known, key=lambda each: each[2].mean)


def _listed(ranked: list[tuple[Row, Cell, Estimate]]) -> str:
    return ", ".join(
        f"{row.label} {bits.mean:.3f}" + (f" ({cell.change.mean:+z.3f})" if cell.change else "")
        for row, cell, bits in ranked
    )


def remarks(results: Results) -> list[str]:
    """Return the sentences below the table."""
    found = [headline(results), results.corpus.get("remark"), _one_rate(results)]
    found += [f"{row.label}: {row.diverged}." for row in results.table_rows() if row.diverged]
    lost = [(row.label, seed, how) for row in results.table_rows() if row.trained for seed, how in row.lost.items()]
    found += [f"{label}, seed {seed}, left out: {how}." for label, seed, how in lost]
    found += [
        f"{row.label}: its validation loss ended at {row.curve[-1][2]:.3f} bits per byte, above the {_EVEN:g} that "
        "even guessing costs: it learned nothing, and a lower learning rate may help."
        for row in results.table_rows()
        if row.diverged is None and row.curve[-1][2] > _EVEN
    ]
    found += [
        f"{row.label}: cannot run at {', '.join(f'{cell.length:,}' for cell in cells)} bytes, because {reason}."
        for row in results.table_rows()
        for reason, cells in _refusals(row)
    ]
    found += changed_rules(results)
    found.append(early_token_effect(results))
    return [each for each in found if each]


def _one_rate(results: Results) -> str | None:
    """Say that nothing was tuned, where several schemes are compared."""
    if len(results.table_rows()) == 1:
        return None
    train, seeds = results.settings["train"], results.settings.get("seeds") or [results.settings["train"]["seed"]]
    if len(seeds) == 1:
        how = f"once, with the same learning rate ({train['learning_rate']:g}) and seed ({seeds[0]}); neither was tuned"
    else:
        how = (
            f"with the same learning rate ({train['learning_rate']:g}), which was not tuned, and with each of the "
            f"seeds {', '.join(map(str, seeds))}, which were not chosen"
        )
    return (
        f"Every scheme was trained {how} for any of them. A scheme that another rate suits better is shown below "
        "its best, and differences as small as those between seeds say nothing."
    )


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
