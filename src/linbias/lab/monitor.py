# SPDX-License-Identifier: Apache-2.0
"""How long-running work says how far it is, and learns that it should stop."""

import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

SAVE_SECONDS = 5.0
"""Work lost at most when a process is killed outright; an interrupt loses none."""


class Interrupted(Exception):
    """Work stopped on request, after saving how far it came."""


class Monitor(Protocol):
    """The listener of one piece of work."""

    def resume(self, fraction: float) -> None:
        """Hear, before anything else, what part of the work (0 to 1) was already done by an earlier run."""
        ...

    def advance(self, fraction: float, note: str) -> None:
        """Hear that `fraction` (0 to 1) of the work is done; `note` is a few words for a progress bar."""
        ...

    def should_stop(self) -> bool:
        """Say whether the work should save and raise Interrupted."""
        ...


class Unwatched:
    """A monitor that says nothing and never stops."""

    def resume(self, fraction: float) -> None:
        """Ignore it."""

    def advance(self, fraction: float, note: str) -> None:
        """Ignore it."""

    def should_stop(self) -> bool:
        """Return False."""
        return False


class StopFlag:
    """True once the process was asked to stop."""

    def __init__(self) -> None:
        self.raised = False


@contextmanager
def stop_on_signals() -> Generator[StopFlag]:
    """Turn Ctrl-C and SIGTERM into a flag for the time of a `with` block; a second Ctrl-C ends the process at once."""
    flag = StopFlag()

    def handle(signum: int, frame: FrameType | None) -> None:
        if flag.raised and signum == signal.SIGINT:
            raise KeyboardInterrupt
        flag.raised = True

    previous = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class SaveClock:
    """Says when it is time to save again."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def due(self) -> bool:
        """Return True if SAVE_SECONDS have gone by since it last did."""
        now = time.monotonic()
        if now - self._last < SAVE_SECONDS:
            return False
        self._last = now
        return True
