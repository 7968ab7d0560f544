# SPDX-License-Identifier: Apache-2.0
"""Clocks. Only ratios of times taken in turns mean something: machines and their load differ more than code does."""

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch

BUDGET = 30.0
"""Seconds after which a comparison takes no further turn; each has had two by then, or one that long."""


def now() -> float:
    """Return seconds: CPU time of the process if torch uses one thread, so that other load counts less.

    With more threads, CPU time would add them up, so it is the time on the wall.
    """
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(call: Callable[[], object]) -> float:
    """Return what one call takes, by `now`."""
    start = now()
    call()
    return now() - start


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[Callable[[], object]], float] = seconds,
    budget: float = BUDGET,
) -> dict[str, list[float]]:
    """Return the times of each call, turn by turn, so that all meet the same load.

    A first turn for what is compiled or touched first is followed by `rounds`, or fewer once `budget` seconds are over.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for turn in range(rounds + 1):
        for name, call in calls.items():
            times[name].append(clock(call))
        if turn and time.perf_counter() - began > budget:
            break
    return times


def best_in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the best time of each call; the first turn counts too, because a later one undercuts it."""
    return {name: min(times) for name, times in in_turns(calls, rounds).items()}


@contextmanager
def one_core(wanted: bool = True) -> Generator[None]:
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
