# SPDX-License-Identifier: Apache-2.0
"""What tests found, as plain data."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .evaluate import plan_windows, position_curve
from .positions import SCHEMES
from .statistics import Estimate, estimate, method, over_seeds


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One scheme at one length."""

    length: int
    why_not: str | None = None
    """Why the scheme cannot run at this length; then nothing below is set."""
    bits: Estimate | None = None
    """Bits per byte."""
    change: Estimate | None = None
    """Bits per byte more than at the first length, over the same segments; None at that length."""
    seeds: Estimate | None = None
    """The same mean over seeds with its interval, None for one seed."""
    seeds_change: Estimate | None = None
    """The change over seeds, None for one seed."""
    mean_context: float | None = None
    """Bytes before the current one that a guess could use, on average."""
    by_context: Sequence[dict[str, Any]] = field(default_factory=tuple)
    """Bits per byte by context: see `evaluate.position_curve`."""

    @property
    def perplexity(self) -> float | None:
        """Perplexity per byte, 2 ** bits, None where there is none or it exceeds every float."""
        return None if self.bits is None or self.bits.mean >= sys.float_info.max_exp else 2**self.bits.mean


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scheme."""

    scheme: str
    parameters: int
    seconds: float
    """Wall time of training."""
    curve: Sequence[tuple[int, float, float]]
    """Updates done, training loss since the last point, validation loss, in bits per byte."""
    checkpoint: str | None
    """File name; None if the training diverged."""
    diverged: str | None = None
    """How the training diverged, if it did; then no cell has a figure."""
    seeds: tuple[int, ...] = ()
    """Seeds whose trainings converged; losses are means over these, seconds, curve and checkpoint the first one's."""
    lost: dict[int, str] = field(default_factory=dict)
    """How the trainings with other seeds diverged."""
    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        """What tables call the scheme."""
        return SCHEMES[self.scheme].label

    @property
    def trained(self) -> bool:
        """Whether it is a scheme that was trained, and not one that runs another's weights."""
        return SCHEMES[self.scheme].trained_as is None

    @property
    def absence(self) -> str:
        """What stands where a figure is missing."""
        return "cannot run" if self.diverged is None else "diverged"

    def by_place(self) -> list[dict[str, Any]]:
        """Return bits per byte by context, each place from the shortest windows that have it.

        A text holds many more short windows than long ones, so that figures near the start of a window are less noisy.
        """
        curve: list[dict[str, Any]] = []
        for cell in self.cells:
            covered = curve[-1]["last"] if curve else -1
            curve += [bin for bin in cell.by_context if bin["first"] > covered]
        return curve

    def cell(self, length: int) -> Cell | None:
        """Return the cell at `length`, None if the scheme was not tried there."""
        return next((cell for cell in self.cells if cell.length == length), None)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that a comparison found and what it did."""

    text: str
    """Name of the text that was scored."""
    trained_length: int
    lengths: tuple[int, ...]
    scored: int
    stride: int | None
    segments: int
    rows: tuple[Row, ...]
    command: str
    """What runs it again, as a shell takes it."""
    settings: dict[str, Any]
    """The command, field by field."""
    corpus: dict[str, Any]
    """`Corpus.describe`, with its remark if it has one."""
    environment: dict[str, Any]

    def row(self, scheme: str) -> Row | None:
        """Return the row of `scheme`, None if it was not compared."""
        return next((row for row in self.rows if row.scheme == scheme), None)

    def table_rows(self) -> tuple[Row, ...]:
        """Return the rows of what was trained or tried at every length; the others only help to explain these."""
        return tuple(
            row for row in self.rows if row.trained or self.lengths == tuple(cell.length for cell in row.cells)
        )

    @property
    def method(self) -> str:
        """What intervals mean."""
        return method(max((len(row.seeds) for row in self.rows), default=1) or 1)

    def as_dict(self) -> dict[str, Any]:
        """Return everything in types that JSON knows."""
        plain = asdict(self)
        for row, row_plain in zip(self.rows, plain["rows"], strict=True):
            row_plain["label"] = row.label
            for cell, cell_plain in zip(row.cells, row_plain["cells"], strict=True):
                cell_plain["perplexity"] = cell.perplexity
        return {"interval": self.method, **plain}


def segment_bits(nats: Tensor, segments: int) -> NDArray[np.float64]:
    """Return the mean loss of each of `segments` equal parts of the text, in bits per byte, (segments,) fp64."""
    return nats.double().view(segments, -1).mean(dim=1).numpy() / math.log(2)


def make_cells(scores: dict[int, Tensor | str], segments: int, stride: int | None) -> tuple[Cell, ...]:
    """Return a cell for each length: from its loss per byte in nats, or from the reason why there is none.

    Losses are (N,), or (seeds, N) for several trainings of one scheme.
    """
    cells: list[Cell] = []
    first: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
    for length, nats in sorted(scores.items()):
        if isinstance(nats, str):
            cells.append(Cell(length=length, why_not=nats))
            continue
        by_seed = np.stack([segment_bits(each, segments) for each in nats.view(-1, nats.shape[-1])])
        mean_nats, bits = nats.view(by_seed.shape[0], -1).double().mean(dim=0), by_seed.mean(axis=0)
        means = by_seed.mean(axis=1)
        if not np.isfinite(bits).all():
            cells.append(Cell(length=length, why_not="its loss there is no finite number"))
            continue
        context = plan_windows(len(mean_nats), length, stride).context()
        cells.append(
            Cell(
                length=length,
                bits=estimate(bits),
                change=None if first is None else estimate(bits - first[0]),
                seeds=over_seeds(means.tolist()) if len(means) > 1 else None,
                seeds_change=None if first is None or len(means) == 1 else over_seeds((means - first[1]).tolist()),
                mean_context=context.double().mean().item(),
                by_context=position_curve(mean_nats, context),
            )
        )
        first = (bits, means) if first is None else first
    return tuple(cells)
