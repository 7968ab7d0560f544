# SPDX-License-Identifier: Apache-2.0
"""Clocks. Only ratios of times taken in turns mean something: machines and their load differ more than code does."""

import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]
BUDGET = 30.0
"""Seconds after which a comparison takes no further turn; each has had two by then, or one that long."""


def now() -> float:
    """Return seconds: CPU time of the process if torch uses one thread, so that other load counts less.

    With more threads, CPU time would add them up, so it is the time on the wall.
    """
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(call: Call) -> float:
    """Return what one call takes, by `now`."""
    start = now()
    call()
    return now() - start


def wall_seconds(call: Call) -> float:
    """Return what one call takes on the wall."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(
    calls: Mapping[str, Call], rounds: int, clock: Callable[[Call], float] = seconds, budget: float = BUDGET
) -> dict[str, float]:
    """Return the best time of each call, taken in turns so that all meet the same load.

    A first turn for what is compiled or touched first is followed by `rounds`, or fewer once `budget` seconds are over;
    it counts too, because a later one undercuts it.
    """
    best = dict.fromkeys(calls, float("inf"))
    began = time.perf_counter()
    for turn in range(rounds + 1):
        for name, call in calls.items():
            best[name] = min(best[name], clock(call))
        if turn and time.perf_counter() - began > budget:
            break
    return best


def sgemm_rate() -> float:
    """Return GFLOP/s of a 1024^3 product in float32 through torch."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / in_turns({"product": lambda: left @ right}, 10)["product"] / 1e9


def read_bandwidth() -> float:
    """Return GB/s of torch.sum over 256 MiB."""
    data = torch.ones(2**26)
    return data.numel() * 4 / in_turns({"sum": data.sum}, 5)["sum"] / 1e9
