# SPDX-License-Identifier: Apache-2.0
"""Progress on the terminal: bars with the time left, or a line now and then where there is no terminal."""

import os
import sys
import time
from typing import Any, Protocol, TextIO

from .extras import need

_BAR = "{desc:<24} {percentage:3.0f} % |{bar:30}| {elapsed} gone, {remaining} left{postfix}"
_LINE_SECONDS = 15.0
_FORECAST_FROM = 0.01


class Display(Protocol):
    """Shows the progress of several jobs as one whole. A job is known by its name and its cost."""

    def resume(self, name: str, cost: float, fraction: float) -> None:
        """A job starts, `fraction` of it done by an earlier run."""
        ...

    def advance(self, name: str, cost: float, fraction: float, note: str) -> None:
        """A job has come to `fraction`."""
        ...

    def finish(self, name: str, cost: float) -> None:
        """A job is done."""
        ...

    def say(self, text: str) -> None:
        """Show a line that stays."""
        ...

    def close(self) -> None:
        """Remove what does not stay."""
        ...


def open_display(title: str, total_cost: float) -> Display:
    """Return bars if standard error is a terminal of known width, else lines."""
    if sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns:
        return Bars(title, total_cost)
    return Lines(title, total_cost, sys.stderr)


class _Ledger:
    """What part of the whole is done, not counting what earlier runs did."""

    def __init__(self, total: float) -> None:
        self.total = total
        self._inherited: dict[str, float] = {}
        self._fractions: dict[str, float] = {}
        self._costs: dict[str, float] = {}

    def resume(self, name: str, cost: float, fraction: float) -> None:
        self._costs[name] = cost
        self._inherited[name] = self._fractions[name] = fraction
        self.total -= cost * fraction

    def advance(self, name: str, fraction: float) -> None:
        self._fractions[name] = fraction

    @property
    def done(self) -> float:
        return sum(self._costs[name] * (fraction - self._inherited[name]) for name, fraction in self._fractions.items())


class Bars:
    """One bar for the whole and one for each job under way."""

    def __init__(self, title: str, total_cost: float) -> None:
        self._tqdm: Any = need("tqdm").tqdm
        self._ledger = _Ledger(total_cost)
        self._whole = self._bar(title, total_cost, 0)
        self._bars: dict[str, Any] = {}

    def _bar(self, title: str, total: float, position: int) -> Any:
        return self._tqdm(
            desc=title, total=total, position=position, leave=False, bar_format=_BAR, smoothing=0.05, dynamic_ncols=True
        )

    def resume(self, name: str, cost: float, fraction: float) -> None:
        """Open a bar that starts at `fraction`."""
        self._ledger.resume(name, cost, fraction)
        self._whole.total = max(self._ledger.total, 1e-9)
        if fraction < 1:
            taken = {bar.pos for bar in self._bars.values()}
            position = next(p for p in range(1, len(taken) + 2) if -p not in taken)
            self._bars[name] = self._bar(f"  {name}", 1.0, position)
            self._bars[name].initial = self._bars[name].n = fraction

    def advance(self, name: str, cost: float, fraction: float, note: str) -> None:
        """Move the job's bar and the whole's."""
        self._ledger.advance(name, fraction)
        bar = self._bars[name]
        bar.set_postfix_str(note, refresh=False)
        bar.update(fraction - bar.n)
        self._whole.update(self._ledger.done - self._whole.n)

    def finish(self, name: str, cost: float) -> None:
        """Close the job's bar."""
        self._ledger.advance(name, 1.0)
        if name in self._bars:
            self._bars.pop(name).close()
        self._whole.update(self._ledger.done - self._whole.n)

    def say(self, text: str) -> None:
        """Print above the bars."""
        self._tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Close all bars."""
        for bar in [*self._bars.values(), self._whole]:
            bar.close()


class Lines:
    """A line every quarter of a minute and one for each job done, for logs."""

    def __init__(self, title: str, total_cost: float, stream: TextIO) -> None:
        self._title, self._stream = title, stream
        self._ledger = _Ledger(total_cost)
        self._notes: dict[str, str] = {}
        self._began = self._spoke = time.monotonic()

    def resume(self, name: str, cost: float, fraction: float) -> None:
        """Say whether the job was done before."""
        self._ledger.resume(name, cost, fraction)
        if fraction:
            self.say(f"  {name}: {fraction:.0%} done before, reused")

    def advance(self, name: str, cost: float, fraction: float, note: str) -> None:
        """Print a line if the last is old enough."""
        self._ledger.advance(name, fraction)
        self._notes[name] = f"{name} {fraction:.0%}"
        now = time.monotonic()
        if now - self._spoke < _LINE_SECONDS:
            return
        self._spoke = now
        part = self._ledger.done / self._ledger.total
        # The first percent says little about the rest: processes are still starting.
        left = f"{_clock((now - self._began) * (1 - part) / part)} left" if part > _FORECAST_FROM else "just begun"
        self.say(f"{self._title}: {part:.0%}, {left} ({', '.join(self._notes.values())})")

    def finish(self, name: str, cost: float) -> None:
        """Forget the job's note."""
        self._ledger.advance(name, 1.0)
        self._notes.pop(name, None)

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing stays open."""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
