# SPDX-License-Identifier: Apache-2.0
"""What a run found, and the file that keeps it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..storage import write_text

Direction = Literal["forward", "forward + backward"]
FORWARD, BOTH = "forward", "forward + backward"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One implementation on one input."""

    implementation: str
    inputs: str
    direction: Direction
    length: int
    seconds: float
    baseline_seconds: float | None
    """Of causal SDPA without any bias, in turns with it; None where that was not run and nothing stands in for it."""
    baseline_estimated: bool = False
    """The baseline was not run at this length: it is its time at the longest that was, times the ratio squared."""
    error: float | None = None
    """Largest difference of the output from float64, over the last rows, which see most keys."""
    computed: float | None = None
    """Share of the causal pairs whose score was computed, where the implementation tells."""

    @property
    def ratio(self) -> float | None:
        """The baseline's time over this one's: above 1 is faster."""
        return None if self.baseline_seconds is None else self.baseline_seconds / self.seconds


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number with what it should be."""

    name: str
    reached: float
    relation: Literal[">=", "<=", "<"]
    goal: float

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        if self.relation == ">=":
            return self.reached >= self.goal
        return self.reached <= self.goal if self.relation == "<=" else self.reached < self.goal


@dataclass
class Found:
    """What one job found."""

    timings: list[Timing] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    memory_mib: dict[str, float] = field(default_factory=dict)
    """Growth of the peak resident size over one forward, output included, by what was called."""
    not_run: dict[str, str] = field(default_factory=dict)
    """What could not be measured, and why."""


@dataclass
class Record:
    """A run: what it was told, where, and what it has found so far."""

    settings: str
    """Fingerprint of the command, the code and torch."""
    machine: dict[str, Any]
    found: dict[str, Found] = field(default_factory=dict)
    """By job, in the order in which they ran."""

    @property
    def timings(self) -> list[Timing]:
        """All timings, in order."""
        return [timing for found in self.found.values() for timing in found.timings]

    @property
    def figures(self) -> list[Figure]:
        """All figures, in order."""
        return [figure for found in self.found.values() for figure in found.figures]

    def baseline(self, direction: str, inputs: str) -> tuple[int, float] | None:
        """Return the longest length at which the baseline itself was timed, and its seconds."""
        known = [
            (timing.length, timing.baseline_seconds)
            for timing in self.timings
            if (timing.direction, timing.inputs, timing.baseline_estimated) == (direction, inputs, False)
            and timing.baseline_seconds is not None
        ]
        return max(known, default=None)

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all; ratios are written out for readers that are not this class."""
        made = asdict(self)
        for job, found in self.found.items():
            for row, timing in zip(made["found"][job]["timings"], found.timings, strict=True):
                row["ratio"] = timing.ratio
        write_text(path, json.dumps(made, indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> "Record":
        """Return what `write` wrote.

        Raises: ValueError, KeyError or TypeError if the file is something else.
        """
        made = json.loads(path.read_text(encoding="utf-8"))
        found = {job: _found(parts) for job, parts in made["found"].items()}
        return Record(settings=made["settings"], machine=made["machine"], found=found)


def _found(parts: dict[str, Any]) -> Found:
    timings = [Timing(**{name: row[name] for name in row if name != "ratio"}) for row in parts["timings"]]
    figures = [Figure(**row) for row in parts["figures"]]
    return Found(timings, figures, parts["memory_mib"], parts["not_run"])
