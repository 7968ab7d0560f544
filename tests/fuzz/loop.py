# SPDX-License-Identifier: Apache-2.0
"""Draw a subject from a seed, try it, count; what fails is made smaller and printed with its seed."""

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from linbias.backends import native


class Fuzzer(NamedTuple):
    """`draw` makes a frozen dataclass, whose defaults are the plain choice, and `check` raises where it is wrong."""

    draw: Callable[[random.Random], Any]
    check: Callable[[Any], list[str]]
    """Names what it ran on."""


@dataclass(frozen=True)
class Finding:
    """What failed, and the smallest subject found that fails in the same way."""

    seed: int
    subject: Any
    reason: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.subject!r}\n  {self.reason}"


class Runner(NamedTuple):
    """A backend and which build of its kernels."""

    name: str
    backend: str
    variant: str = ""


def runners() -> list[Runner]:
    """Every CPU backend that there is, `native` once for each instruction set of this processor."""
    found = [Runner("reference", "reference"), Runner("tiled", "tiled")]
    if native.INSTALLED:
        from linbias import _native

        names = [name for name in ("baseline", "avx2", "avx512") if _native.has_variant(name)]
        found += [Runner(f"native {name}", "native", name) for name in names]
    return found


@contextmanager
def running(runner: Runner, *, threads: int = 1, flush: bool = False) -> Iterator[str]:
    """The name of the backend to ask for, while its kernels are those of the runner; errors name it."""
    before = native._variant, torch.get_num_threads()
    native._variant = runner.variant
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flush)
    try:
        yield runner.backend
    except AssertionError as wrong:
        raise AssertionError(f"{runner.name}: {wrong}") from wrong
    finally:
        native._variant = before[0]
        torch.set_num_threads(before[1])
        torch.set_flush_denormal(False)


def fuzz(
    fuzzer: Fuzzer, seed: int, *, seconds: float = 0.0, cases: int = 0, report: Callable[[Finding], object] = repr
) -> tuple[Counter[str], list[Finding]]:
    """Try the subjects of seed, seed + 1, ... until `seconds` are over or `cases` are tried; counts and findings."""
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    end = time.monotonic() + seconds
    while counts["cases"] < cases or time.monotonic() < end:
        subject = fuzzer.draw(random.Random(seed))
        counts["cases"] += 1
        reason = failure(fuzzer, subject, counts)
        if reason is not None:
            smallest = shrunk(fuzzer, subject, reason)
            findings.append(Finding(seed, smallest, failure(fuzzer, smallest) or reason))
            report(findings[-1])
        seed += 1
    return counts, findings


def failure(fuzzer: Fuzzer, subject: Any, counts: Counter[str] | None = None) -> str | None:
    """Why the subject fails, None if it does not."""
    torch.manual_seed(0)
    try:
        names = fuzzer.check(subject)
    except AssertionError as wrong:
        return f"AssertionError: {wrong}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    if counts is not None:
        counts.update(names)
    return None


def shrunk(fuzzer: Fuzzer, subject: Any, reason: str, seconds: float = 20.0) -> Any:
    """Field by field the default, or half a number, as long as the same kind of failure is left."""
    end, kind, smaller = time.monotonic() + seconds, reason.split(":")[:2], True
    while smaller:
        smaller = False
        for name, value in plainer(subject):
            if time.monotonic() > end:
                return subject
            other = replace(subject, **{name: value})
            try:
                still = failure(fuzzer, other)
            except ValueError:  # a field that asks for another one
                continue
            if still is not None and still.split(":")[:2] == kind:
                subject, smaller = other, True
                break
    return subject


def plainer(subject: Any) -> Iterator[tuple[str, Any]]:
    """Fields and what they could be instead."""
    for each in fields(subject):
        value = getattr(subject, each.name)
        counted = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, tuple) and len(value) > 2:  # a history
            half = len(value) // 2
            yield from ((each.name, part) for part in (value[:half], value[half:], value[1:], value[:-1]))
        if (
            each.default is not MISSING
            and value != each.default
            and not (counted and each.default and value < each.default)
        ):
            yield each.name, each.default
        if counted and value > 1:
            yield from ((each.name, smaller) for smaller in (value // 2, value - 1))
