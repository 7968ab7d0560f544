# SPDX-License-Identifier: Apache-2.0
"""What a run found, the file that keeps it, and the loop that measures what is missing there."""

import json
import os
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..environment import machine, versions
from ..progress import Interrupted, Progress
from ..storage import write_text
from .timing import one_core

Finding = dict[str, Any]
"""One thing that was found, in types that JSON knows; {"not_run": what, "why": reason} where it could not be had."""


@dataclass
class Record:
    """A run: where, and what it has found so far."""

    facts: dict[str, Any]
    """What the findings depend on."""
    found: dict[str, list[Finding]] = field(default_factory=dict)
    """By measurement, in the order in which they ran."""

    def having(self, key: str) -> list[Finding]:
        """Return the findings that tell `key`, in order."""
        return [finding for findings in self.found.values() for finding in findings if key in finding]

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> "Record":
        """Return what `write` wrote.

        Raises: OSError if there is no file, ValueError, KeyError or TypeError if it is something else.
        """
        return Record(**json.loads(path.read_text(encoding="utf-8")))


def surroundings() -> dict[str, Any]:
    """Return facts of every run: the machine, the versions, and the load before it."""
    used = {name: version for name, version in versions().items() if name in ("linbias", "torch")}
    load = {"load before": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
    return {**machine(), **used, **load}


@dataclass(frozen=True)
class Measurement:
    """One that is made whole or not at all."""

    name: str
    cost: float
    """About how many seconds it takes on one core: for the progress shown, nothing else."""
    make: Callable[[], list[Finding]]
    pinned: bool = True
    """Whether it stays on one core where torch has one thread."""


def measure(
    title: str, plan: Sequence[Measurement], record: Record, path: Path, gist: Callable[[list[Finding]], str]
) -> None:
    """Make what `record` lacks, keep it in `path` after every measurement, and say the gist of each.

    Raises: Interrupted by Ctrl-C or SIGTERM; what was measured is kept.
    """
    with Progress(title, {each.name: each.cost for each in plan}) as progress, _stopped_by_sigterm():
        try:
            for each in plan:
                done = each.name in record.found
                progress.advance(each.name, float(done))
                if not done:
                    with one_core(each.pinned and torch.get_num_threads() == 1):
                        record.found[each.name] = each.make()
                    record.write(path)
                    progress.say(f"  {each.name}: {gist(record.found[each.name])}")
                progress.finish(each.name)
        except KeyboardInterrupt as asked:
            done = sum(each.name in record.found for each in plan)
            stopped = Interrupted(f"stopped after {done} of {len(plan)} measurements, saved")
            stopped.signum = signal.SIGTERM if isinstance(asked, _Terminated) else signal.SIGINT
            raise stopped from None


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def _stopped_by_sigterm() -> Generator[None]:
    """SIGTERM ends a run as Ctrl-C does."""

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
