# SPDX-License-Identifier: Apache-2.0
"""One run: check, plan, measure what is missing, keep it."""

import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from ...attention import alibi_attention
from ...errors import BackendUnavailable
from ...testing import Case, conform
from ..config import BenchCommand, ConfigError, ModelConfig
from ..display import Display, open_display
from ..environment import machine, versions
from ..monitor import Interrupted
from ..storage import digest_of, fingerprint, write_atomically
from . import figures, memory
from .inputs import SINK, normal, trained
from .peers import PEERS, PLAIN, Contender
from .plot import draw_bench
from .races import race
from .record import BOTH, FORWARD, Direction, Found, Record
from .tables import line_of
from .timing import BUDGET, read_bandwidth, sgemm_rate

_CHECKS = (
    Case(batch=1, heads=12, kv_heads=12, queries=333, keys=333, head_dim=64, value_dim=64, causal=True),
    Case(batch=1, heads=3, kv_heads=3, queries=1025, keys=1025, head_dim=64, value_dim=64, causal=True),
    Case(batch=2, heads=6, kv_heads=2, queries=257, keys=300, head_dim=64, value_dim=64, causal=True),
)
_LENGTHS = {False: (512, 1024, 2048, 4096, 8192, 16384, 65536, 131072), True: (512, 1024)}
_LONGEST_TRAINING = 8192
_CONTENT_LENGTH = {False: 4096, True: 1024}
_ROUNDS = {False: 9, True: 3}
_SHORT = {False: 16384, True: 0}
"""Shorter inputs are timed that much more often: a disturbance outlasts many of their calls."""
RESULTS = "results.json"
_MODEL = ModelConfig(layers=2, width=256, heads=4)
_MODEL_STEPS = {False: 150, True: 10}


class Unfit(ValueError):
    """What would be timed gives wrong results: nothing was timed."""


@dataclass(frozen=True)
class _Job:
    name: str
    cost: float
    """About how many seconds it takes on one core: for the progress shown, nothing else."""
    run: Callable[[], Found]
    pinned: bool = True
    """Whether it stays on one core; timing threads needs more."""


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
        names, gaps = _backends(command)
        _check(names)
        return _measure(command, names, gaps | _gaps(command, names))
    finally:
        torch.set_num_threads(threads)


def write_report(record: Record, folder: Path) -> list[Path]:
    """Draw what was found, if it can be drawn, and return the files of the run."""
    results, plot = folder / RESULTS, folder / "plot.png"
    image = draw_bench(record)
    if image is None:
        return [results]
    write_atomically(plot, lambda temporary: temporary.write_bytes(image))
    return [results, plot]


def _backends(command: BenchCommand) -> tuple[list[str], dict[str, str]]:
    """Those that were asked for, or the fast ones that can run here; and why a fast one cannot."""
    probe = normal(16)
    chosen: list[str] = []
    gaps: dict[str, str] = {}
    for name in dict.fromkeys(command.backends or ("native", "tiled")):
        try:
            alibi_attention(*probe.qkv, probe.slopes, causal=True, backend=name)
        except BackendUnavailable as reason:
            if command.backends is not None:
                raise
            gaps[f"linbias {name}"] = str(reason)
            continue
        chosen.append(name)
    return chosen, gaps


def _gaps(command: BenchCommand, names: list[str]) -> dict[str, str]:
    """What of the parts asked for is never measured with these backends and lengths, and why."""
    gaps: dict[str, str] = {}
    if "figures" in command.parts and "native" not in names:
        gaps["figures"] = f"they are those of backend native, which is not among those timed: {', '.join(names)}"
    if "training" in command.parts and max(_lengths(command)) > _LONGEST_TRAINING:
        gaps[f"training beyond {_LONGEST_TRAINING:,} tokens"] = "left out, it would take minutes"
    return gaps


def _check(names: list[str]) -> None:
    for name in names:
        for case in _CHECKS:
            try:
                conform(case, name)
            except AssertionError as wrong:
                raise Unfit(
                    f"backend {name!r} gives wrong results for {case}, so nothing was timed: {wrong}"
                ) from wrong


def _measure(command: BenchCommand, names: list[str], gaps: dict[str, str]) -> Record:
    settings = _settings(command, names)
    unfinished = command.out / f"unfinished-{settings}.json"
    record = _open(command, names, settings, unfinished)
    jobs = _plan(command, names, record)
    if gaps:
        jobs.append(_Job("left out", 0.0, partial(Found, not_run=gaps)))
    display = open_display("linbias bench", sum(job.cost for job in jobs))
    try:
        with _stopped_by_sigterm():
            for job in jobs:
                _run(job, command, record, unfinished, display)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped after {len(record.found)} of {len(jobs)} measurements, saved") from None
    finally:
        display.close()
    record.write(command.out / RESULTS)
    unfinished.unlink(missing_ok=True)
    return record


def _run(job: _Job, command: BenchCommand, record: Record, path: Path, display: Display) -> None:
    done = job.name in record.found
    display.resume(job.name, job.cost, float(done))
    if not done:
        with _one_core(job.pinned and command.threads == 1):
            record.found[job.name] = job.run()
        record.write(path)
        display.advance(job.name, job.cost, 1.0, "")
        display.say(f"  {job.name}: {line_of(record.found[job.name])}")
    display.finish(job.name, job.cost)


def _settings(command: BenchCommand, names: list[str]) -> str:
    """What an unfinished run must share with this one to be gone on with."""
    here = Path(__file__).parent
    measuring = digest_of({path.name: path for path in here.glob("*.py")})
    return fingerprint(command={**asdict(command), "out": None}, names=names, measuring=measuring)


def _open(command: BenchCommand, names: list[str], settings: str, unfinished: Path) -> Record:
    try:
        return Record.read(unfinished)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # there is none, or it is not whole: begin
    with _one_core(command.threads == 1):
        rates = {"SGEMM, GFLOP/s": round(sgemm_rate(), 1), "reading, GB/s": round(read_bandwidth(), 1)}
    load = {"load before": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}
    used = {name: version for name, version in versions().items() if name in ("linbias", "torch")}
    facts = {**machine(), **used, **rates, **load, "backends": names, "threads used": command.threads}
    return Record(settings=settings, machine=facts)


@contextmanager
def _stopped_by_sigterm() -> Generator[None]:
    """SIGTERM ends a run as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _one_core(wanted: bool) -> Generator[None]:
    """Stay on one core, where the system can do that."""
    if not wanted or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


# --- the plan --------------------------------------------------------------------------------------------------------


def _plan(command: BenchCommand, names: list[str], record: Record) -> list[_Job]:
    """All jobs of a run; the order matters where a baseline is carried on to lengths at which it is not run."""
    quick = command.quick
    contenders = [*map(Contender.of_linbias, names), *PEERS]
    rounds = _ROUNDS[quick]
    jobs: list[_Job] = []
    for length in _lengths(command):
        if "forward" in command.parts:
            jobs.append(_race(length, contenders, FORWARD, max(rounds, _SHORT[quick] // length), record))
        if "training" in command.parts and length <= _LONGEST_TRAINING:
            jobs.append(_race(length, contenders, BOTH, rounds, record))
    if "inputs" in command.parts:
        jobs += _other_inputs(quick, contenders, rounds, record)
    if "figures" in command.parts and "native" in names:
        jobs += _figures()
    if "memory" in command.parts:
        jobs.append(_Job("memory of one forward", 60.0, partial(memory.compare, contenders)))
    if not jobs:
        raise ConfigError(
            f"nothing is left to measure: the figures are those of backend native (given: {', '.join(names)}), and "
            f"training is timed up to {_LONGEST_TRAINING:,} tokens; ask for other parts, lengths or backends"
        )
    return jobs


def _lengths(command: BenchCommand) -> list[int]:
    return sorted(set(command.lengths or _LENGTHS[command.quick]))


def _race(length: int, contenders: list[Contender], direction: Direction, rounds: int, record: Record) -> _Job:
    def work() -> Found:
        return race(normal(length), contenders, direction, rounds, record)

    # Pairs at 30 GFLOP/s; what skips computes about what a head sees of 6,000 tokens. The first turn compiles.
    pairs = [length * min(length, 6000 if each.longest > PLAIN.longest else length) / 2 for each in contenders]
    able = [count for count, each in zip(pairs, contenders, strict=True) if length <= each.longest]
    turn = sum(able) * 4 * 12 * 64 / 30e9 * (1 if direction == FORWARD else 3)
    return _Job(f"{direction}, {length:,} tokens", 5 + min(turn * (rounds + 1), BUDGET + 2 * turn), work)


def _other_inputs(quick: bool, contenders: list[Contender], rounds: int, record: Record) -> Iterator[_Job]:
    length, steps = _CONTENT_LENGTH[quick], _MODEL_STEPS[quick]

    def sink() -> Found:
        return race(normal(length, sink=SINK), contenders, FORWARD, rounds, record)

    def of_model() -> Found:
        found = Found()
        for content in trained(_MODEL, steps, length):
            layer = race(content, contenders, FORWARD, rounds, record)
            found.timings += layer.timings
            found.not_run |= layer.not_run
        return found

    yield _Job(f"with a sink, {length:,} tokens", 40.0, sink)
    yield _Job(f"a trained model, {length:,} tokens", 100.0, of_model)


def _figures() -> Iterator[_Job]:
    yield _Job("dense rate, D=64", 10.0, partial(figures.dense_rate, 64, 0.93))
    yield _Job("dense rate, D=128", 15.0, partial(figures.dense_rate, 128, 0.97))
    yield _Job("dense training", 15.0, figures.dense_training)
    yield _Job("half types", 15.0, figures.half_types)
    yield _Job("decode", 15.0, figures.decode)
    yield _Job("small calls", 3.0, figures.overhead)
    yield _Job("two threads", 30.0, figures.threads, pinned=False)
    yield _Job("training memory", 40.0, memory.beyond_results)
