# SPDX-License-Identifier: Apache-2.0
"""How far work is: bars with the time left, or where there is no terminal a line now and then."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from .extras import need

SAVE_SECONDS = 5.0
"""Work lost at most when a process is killed outright; an interrupt loses none."""
_LINE_SECONDS = 15.0
_BAR = "{desc:<28} {percentage:3.0f} % |{bar}| {elapsed} gone, {remaining} left{postfix}"
_WIDEST = 110
"""Columns of a terminal that bars use; they take what the words leave, which at 80 columns is enough for the time."""
_LINE = "{desc}: {percentage:.0f} %, {elapsed} gone, {remaining} left{postfix}"

Tell = Callable[[float, str], None]
"""What work calls with the part (0 to 1) that is done and a few words: first with what an earlier run had done.

It raises Interrupted where the work should save and end; never with part 1, when nothing is left to stop.
"""


class Interrupted(Exception):
    """Work stopped on request, after saving how far it came."""

    signum: int = signal.SIGINT
    """The signal that asked."""


def silent(fraction: float, note: str) -> None:
    """Be a Tell that says nothing and never stops."""


class _Screen:
    """The standard error, or nothing once nobody reads it: work goes on all the same."""

    def __init__(self) -> None:
        self._file: Any = sys.stderr

    def write(self, text: str) -> None:
        self._try("write", text)

    def flush(self) -> None:
        self._try("flush")

    def isatty(self) -> bool:
        return self._try("isatty") or False

    def _try(self, what: str, *given: str) -> Any:
        try:
            return None if self._file is None else getattr(self._file, what)(*given)
        except (OSError, ValueError):  # ValueError: it is closed
            self._file = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def notice(text: str) -> None:
    """Show a line on the standard error, if anybody reads it."""
    _Screen().write(f"{text}\n")


class Progress:
    """Several pieces of work as one whole: a bar for it and one for each piece under way."""

    def __init__(self, title: str, costs: Mapping[str, float]) -> None:
        """`costs` by name, in any unit: which part of the whole each piece is."""
        self._tqdm: Any = need("tqdm").tqdm
        self._costs = costs
        self._screen = _Screen()
        self._terminal = self._screen.isatty() and _columns() > 0
        self._fractions: dict[str, float] = {}
        self._finished: set[str] = set()
        self._bars: dict[str, Any] = {}
        self._notes: dict[str, str] = {}
        kind = self._tqdm if self._terminal else _lines(self._tqdm)
        self._whole = self._bar(kind, title, sum(costs.values()), _BAR if self._terminal else _LINE)

    def __enter__(self) -> "Progress":
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what does not stay."""
        for bar in [*self._bars.values(), self._whole]:
            bar.close()

    def advance(self, name: str, fraction: float, note: str = "") -> None:
        """Move a piece to `fraction`; what its first call tells was done before, and says nothing about speed."""
        if name in self._finished:
            return  # news that a queue delivered late
        gain = self._costs[name] * (fraction - self._fractions.get(name, 0.0))
        if name not in self._fractions:
            self._begin(name, fraction, gain)
            gain = 0.0
        self._fractions[name] = fraction
        self._notes[name] = f"{name} {fraction:.0%}"
        if name in self._bars:
            self._bars[name].set_postfix_str(note, refresh=False)
            self._bars[name].update(fraction - self._bars[name].n)
        else:
            self._whole.set_postfix_str(", ".join(self._notes.values()), refresh=False)
        self._whole.update(gain)

    def _begin(self, name: str, fraction: float, gain: float) -> None:
        # tqdm judges speed by what came after `initial`.
        self._whole.initial += gain
        self._whole.n += gain
        if self._terminal and fraction < 1:
            self._bars[name] = self._bar(self._tqdm, f"  {name}", 1.0, _BAR, fraction)
        elif fraction and not self._terminal:
            self.say(f"  {name}: {fraction:.0%} done before, reused")

    def finish(self, name: str) -> None:
        """Take a piece off what is under way."""
        self._fractions.setdefault(name, 0.0)
        self.advance(name, 1.0)
        self._finished.add(name)
        self._notes.pop(name)
        if name in self._bars:
            self._bars.pop(name).close()

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self._terminal:
            self._tqdm.write(text, file=self._screen)
        else:
            print(text, file=self._screen, flush=True)  # type: ignore[arg-type]

    def _bar(self, kind: Any, title: str, total: float, form: str, initial: float = 0.0) -> Any:
        bar = kind(
            desc=title,
            total=total,
            initial=initial,
            bar_format=form,
            file=self._screen,
            mininterval=_LINE_SECONDS if form == _LINE else 0.1,
            delay=_LINE_SECONDS if form == _LINE else 0.0,
            miniters=0,
            smoothing=0,
            leave=False,
        )
        # What tqdm asks for columns and lines each time it draws.
        bar.dynamic_ncols = (lambda _: (_columns(), None)) if self._terminal else None
        return bar


def _columns() -> int:
    try:
        return min(os.get_terminal_size(sys.stderr.fileno()).columns, _WIDEST)
    except (AttributeError, OSError, ValueError):
        return 0


def _lines(tqdm: Any) -> Any:
    """A bar for logs: every state it shows is a line of its own."""

    class Lines(tqdm):
        @staticmethod
        def status_printer(file: Any) -> Callable[[str], None]:
            return lambda line: print(line, file=file, flush=True) if line else None

    return Lines


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
