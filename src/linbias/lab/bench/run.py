# SPDX-License-Identifier: Apache-2.0
"""One run of `linbias bench`: check, plan, measure what is missing, write table and picture."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from ... import BackendUnavailable, alibi_attention
from ...testing import Case, conform
from ..config import BenchCommand, ConfigError
from ..storage import digest_of_facts, digest_of_files, write_bytes
from .race import BOTH, DIM, FORWARD, HEADS, PLAIN, Contender, Direction, normal, race
from .record import Finding, Measurement, Record, measure, surroundings
from .show import draw_bench, gist_of_race
from .timing import BUDGET

_CHECKS = (
    Case(batch=1, heads=12, kv_heads=12, queries=333, keys=333, head_dim=64, value_dim=64, causal=True),
    Case(batch=1, heads=3, kv_heads=3, queries=1025, keys=1025, head_dim=64, value_dim=64, causal=True),
    Case(batch=2, heads=6, kv_heads=2, queries=257, keys=300, head_dim=64, value_dim=64, causal=True),
)
LENGTHS = {False: (512, 1024, 2048, 4096, 8192, 16384, 65536, 131072), True: (512, 1024)}
"""By whether the run is quick."""
LONGEST_TRAINING = 8192
ROUNDS = {False: 9, True: 3}
_SHORT = {False: 16384, True: 0}
"""Shorter inputs are timed that much more often: a disturbance outlasts many of their calls."""
_RESULTS = "results.json"


class Unfit(ValueError):
    """What would be timed gives wrong results: nothing was timed."""


def bench(command: BenchCommand) -> Record:
    """Measure what `command` says, or what an interrupted run of it left, and return everything found.

    Raises:
        Interrupted: stopped; what was measured is kept and not measured again.
        BackendUnavailable: a backend that was asked for cannot run here.
        ConfigError: nothing is left to measure.
        Unfit: a backend's results are wrong.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(command.threads)
    try:
        names, gaps = usable_backends(command.backends)
        check_backends(names)
        lengths = command.lengths or LENGTHS[command.quick]
        if "training" in command.parts and max(lengths) > LONGEST_TRAINING:
            why = "left out, it would take minutes"
            gaps.append({"not_run": f"training beyond {LONGEST_TRAINING:,} tokens", "why": why})
        return _measure(command, lengths, names, gaps)
    finally:
        torch.set_num_threads(threads)


def usable_backends(wanted: tuple[str, ...] | None) -> tuple[list[str], list[Finding]]:
    """Return the backends that were asked for, or the fast ones that can run here, and why a fast one cannot.

    Raises: BackendUnavailable if one that was asked for cannot run.
    """
    probe = normal(16)
    chosen: list[str] = []
    gaps: list[Finding] = []
    for name in dict.fromkeys(wanted or ("native", "tiled")):
        try:
            alibi_attention(*probe.qkv, probe.slopes, causal=True, backend=name)
        except BackendUnavailable as reason:
            if wanted is not None:
                raise
            gaps.append({"not_run": f"linbias {name}", "why": str(reason)})
            continue
        chosen.append(name)
    return chosen, gaps


def check_backends(names: list[str]) -> None:
    """Raise Unfit unless each solves some problems of linbias.testing within the error budget."""
    for name in names:
        for case in _CHECKS:
            try:
                conform(case, name)
            except AssertionError as wrong:
                raise Unfit(
                    f"backend {name!r} gives wrong results for {case}, so nothing was timed: {wrong}"
                ) from wrong


def _measure(command: BenchCommand, lengths: tuple[int, ...], names: list[str], gaps: list[Finding]) -> Record:
    settings = digest_of_facts(command={**asdict(command), "out": None}, names=names, measuring=_measuring())
    unfinished = command.out / f"unfinished-{settings}.json"
    try:
        record = Record.read(unfinished)
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is not whole: begin
        record = Record({**surroundings(), "backends": names, "threads used": command.threads})
    plan = races(lengths, command.parts, [Contender.of_linbias(name) for name in names], command.quick, record)
    if not plan:
        raise ConfigError(
            f"nothing is left to measure: training is timed up to {LONGEST_TRAINING:,} tokens; ask for shorter lengths "
            "or for part forward"
        )
    if gaps:
        plan.append(Measurement("left out", 0.0, lambda: gaps))
    measure("linbias bench", plan, record, unfinished, gist_of_race)
    record.write(command.out / _RESULTS)
    unfinished.unlink(missing_ok=True)
    return record


def _measuring() -> str:
    """Digest of the sources that decide what is measured, which `digest_of_facts` leaves out."""
    return digest_of_files({path.name: path for path in Path(__file__).parent.glob("*.py")})


def races(
    lengths: Iterable[int], parts: Sequence[str], contenders: list[Contender], quick: bool, record: Record
) -> list[Measurement]:
    """Return races on normal inputs; the order matters where a baseline is carried on to where it is not run."""
    plan: list[Measurement] = []
    for length in sorted(set(lengths)):
        if "forward" in parts:
            plan.append(_race_at(length, contenders, FORWARD, quick, record))
        if "training" in parts and length <= LONGEST_TRAINING:
            plan.append(_race_at(length, contenders, BOTH, quick, record))
    return plan


def _race_at(
    length: int, contenders: list[Contender], direction: Direction, quick: bool, record: Record
) -> Measurement:
    """The race at one length, with about what it costs."""
    rounds = max(ROUNDS[quick], _SHORT[quick] // length) if direction == FORWARD else ROUNDS[quick]
    able = [each for each in contenders if length <= each.longest]
    # Pairs at 30 GFLOP/s; what skips computes about what a head sees of 6,000 tokens. The first turn compiles.
    seen = [min(length, 6000) if each.longest > PLAIN.longest else length for each in able]
    turn = length * sum(seen) / 2 * 4 * HEADS * DIM / 30e9 * (1 if direction == FORWARD else 3)
    cost = 5 + min(turn * (rounds + 1), BUDGET + 2 * turn)
    return Measurement(
        f"{direction}, {length:,} tokens",
        cost,
        lambda: race(normal(length), contenders, direction, rounds, record),
    )


def write_plot(record: Record, folder: Path) -> list[Path]:
    """Draw what was found, if it can be drawn, and return the files of the run."""
    image = draw_bench(record)
    if image is None:
        return [folder / _RESULTS]
    write_bytes(folder / "plot.png", image)
    return [folder / _RESULTS, folder / "plot.png"]
