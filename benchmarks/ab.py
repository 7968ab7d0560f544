# SPDX-License-Identifier: Apache-2.0
"""Two installs of linbias in turns: ``python benchmarks/ab.py BASE_PYTHON NEW_PYTHON [--rounds 15]``.

Each argument is a Python of an environment that has linbias. Both run this file as a worker that times what it is asked
to, on the same core, with one torch thread, by CPU time. A row's ratio is the median over the rounds of base / new:
above 1, NEW is faster; the interval behind it covers that median with 95 %, so one that contains 1 shows no difference.
A worker uses the public names of linbias only, so that any two commits can be compared.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if sys.argv[1:] == ["--worker"]:  # what compares two installs needs neither
    import torch

    import linbias
else:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, not with -m
    from benchmarks.pairs import ratio_of_pairs

SAMPLE_SECONDS = 0.05
"""A sample repeats a short call until it lasts about this long: clocks and interrupts blur less of it."""
AGREEMENT = 1e-3
HEADS, DIM, CACHED, STEPS = 12, 64, 32_768, 64


# --- the worker ------------------------------------------------------------------------------------------------------


Prepared = tuple[Callable[[], Any], int]
"""A call, and how many units (calls, tokens) it is."""


def noise(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def forward(length: int, heads: int = HEADS) -> Prepared:
    query, key, value = noise(3, 1, heads, length, DIM)
    slopes = linbias.alibi_slopes(heads)
    return lambda: linbias.alibi_attention(query, key, value, slopes, causal=True), 1


def both(length: int) -> Prepared:
    leaves = [part.clone().requires_grad_() for part in noise(3, 1, HEADS, length, DIM)]
    slopes, grad = linbias.alibi_slopes(HEADS), noise(1, HEADS, length, DIM)

    def call() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(linbias.alibi_attention(*leaves, slopes, causal=True), leaves, grad)[0]

    return call, 1


def cached(length: int) -> Any:
    cache = linbias.KVCache()
    cache.append(noise(1, 8, length, DIM), noise(1, 8, length, DIM))
    return cache


def decode(slopes: Any) -> Prepared:
    cache, query = cached(CACHED), noise(1, 8, 1, DIM)
    return lambda: cache.attend(query, slopes), 1


def steps() -> Prepared:
    cache, token, slopes = cached(128), noise(1, 8, 1, DIM), linbias.alibi_slopes(8)

    def call() -> Any:
        for _ in range(STEPS):
            cache.append(token, token)
            out = cache.attend(token, slopes)
        cache.crop(128)
        return out

    return call, STEPS


WORKLOADS: dict[str, Callable[[], Prepared]] = {
    "forward, 1,024": lambda: forward(1024),
    "forward, 4,096": lambda: forward(4096),
    "forward + backward, 1,024": lambda: both(1024),
    "forward + backward, 4,096": lambda: both(4096),
    f"decode, {CACHED:,} cached, ALiBi": lambda: decode(linbias.alibi_slopes(8)),
    f"decode, {CACHED:,} cached, all visible": lambda: decode(torch.zeros(8)),
    "small call, T = S = 16": lambda: forward(16, heads=8),
    "KVCache step after 128": steps,
}


def work() -> None:
    """Answer requests: a JSON line each way. The first answer says who this is."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    made: dict[str, tuple[Callable[[], Any], int, int]] = {}
    probe = torch.zeros(1, 8, 128, DIM)
    verdicts = linbias.backends.explain(probe, probe, probe, linbias.alibi_slopes(8), causal=True)
    backend = next(line.split()[0] for line in verdicts.splitlines() if "runs this call" in line)
    tell(rows=list(WORKLOADS), linbias=str(Path(linbias.__file__).parent), torch=torch.__version__, backend=backend)
    for line in sys.stdin:
        row = json.loads(line)
        if row not in made:
            call, units = WORKLOADS[row]()
            size = float(call().double().abs().sum())
            took = timed(call, 1)
            made[row] = call, units, max(1, round(SAMPLE_SECONDS / max(took, 1e-6)))
            tell(size=size)
            continue
        call, units, repeats = made[row]
        call()  # the other worker has just had the caches of this core
        tell(seconds=timed(call, repeats) / units)


def timed(call: Callable[[], Any], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats


def tell(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


# --- the comparison --------------------------------------------------------------------------------------------------


class Worker:
    """One install, waiting to be asked."""

    def __init__(self, python: str) -> None:
        # A PYTHONPATH would give both the same sources.
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, "-P", str(Path(__file__).resolve()), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**own, "OMP_NUM_THREADS": "1"},
        )
        self.about = self._answer()

    def ask(self, row: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(row) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args[0]}: the worker ended, see above")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def compare_row(row: str, base: Worker, new: Worker, rounds: int) -> str:
    """A line of the table, after checking that both compute the same."""
    sizes = [worker.ask(row)["size"] for worker in (base, new)]
    if abs(sizes[0] - sizes[1]) > AGREEMENT * abs(sizes[0]):
        return f"{row:<36} results differ (sums of magnitudes {sizes[0]:.6g} and {sizes[1]:.6g}): not compared"
    times: dict[Worker, list[float]] = {base: [], new: []}
    for turn in range(rounds):
        for worker in (base, new) if turn % 2 else (new, base):
            times[worker].append(worker.ask(row)["seconds"])
    before, after = (f"{median(times[worker]) * 1e3:>10.4g}" for worker in (base, new))
    return f"{row:<36}{before}{after}  {ratio_of_pairs(times[base], times[new])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="python of the environment to compare with")
    parser.add_argument("new", help="python of the environment that is judged")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of samples a row")
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows whose name contains one of these")
    parser.add_argument("--core", type=int, help="to stay on; default: the last this process may use")
    options = parser.parse_args()
    core = options.core
    if core is None and hasattr(os, "sched_getaffinity"):
        core = max(os.sched_getaffinity(0))
    if core is not None:
        os.sched_setaffinity(0, {core})  # which the workers inherit
    base, new = Worker(options.base), Worker(options.new)
    for name, worker in (("base", base), ("new", new)):
        print(f"{name:5} {worker.about['linbias']}, torch {worker.about['torch']}, backend {worker.about['backend']}")
    print(f"core {core}, {options.rounds} rounds, CPU milliseconds (median); base / new, above 1: new is faster\n")
    print(f"{'':<36}{'base':>10}{'new':>10}  ratio (95 % interval)")
    for row in base.about["rows"]:
        if any(part in row for part in options.rows):
            print(compare_row(row, base, new, options.rounds), flush=True)
    base.close()
    new.close()


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--worker"] else main()
