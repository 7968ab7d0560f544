# SPDX-License-Identifier: Apache-2.0
"""JinaBERT and DNABERT-2 beside the dense formula and ONNX Runtime: ``python -m benchmarks.encoders [--quick] ...``.

Every contender has the same random weights and a process of its own, which takes its turn when it is told to: so the
memory is one contender's and the times of a turn meet the same load. What does not fit in memory, or is not
installed (onnx, onnxruntime), is named as not run. ``--layers`` cuts the models where the whole would take too long.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.encoder_contenders import DENSE, ONNX, OURS, PRODUCTS, SDPA, TENSORS
from benchmarks.harness import carry_out, figure, figure_text, figures_table, parser, ratio_figure, text_table
from linbias.lab.bench.record import Finding, Measurement, Record
from linbias.lab.storage import write_text

ROOT = Path(__file__).parents[1]
LENGTHS = {False: (512, 2048, 8192, 26421, 65536), True: (512, 2048)}
HEADS = 12
MOST_LAYERS = 12
ALONE = 8192


class Contender:
    """A process that holds one model, and one text of `length` tokens."""

    def __init__(self, name: str, shape: str, layers: int, length: int, threads: int) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.encoder_contenders",
            name,
            shape,
            *map(str, (layers, length, threads)),
        ]
        self.name = name
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def turn(self) -> dict[str, float]:
        """Seconds of one pass, and the most memory in GB that the process has held.

        Raises: RuntimeError if the process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words say why
        answer = self._process.stdout.readline()
        if not answer:
            last = self._process.stderr.read().strip().splitlines() or [f"ended with {self._process.wait()}"]
            raise RuntimeError(last[-1][:200])
        return json.loads(answer)

    def end(self) -> None:
        """Let it go."""
        self._process.kill()
        self._process.communicate()


def missing(name: str, length: int) -> str | None:
    """Why a contender cannot run: a package, or the tensors of all pairs that it needs."""
    if name == ONNX and (lacking := [one for one in ("onnx", "onnxruntime") if importlib.util.find_spec(one) is None]):
        return f"{' and '.join(lacking)} not installed"
    needed, free = TENSORS.get(name, 0) * HEADS * length**2 * 4 / 1e9, available_gb()
    if needed > 0.75 * free:  # the rest is left to others
        pairs = f"{TENSORS[name]} tensors of {HEADS} x {length:,}^2 in float32"
        return f"{pairs} are {needed:.0f} GB, more than three quarters of the {free:.0f} that are free"
    return None


def available_gb() -> float:
    """Memory that a new process may take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024 / 1e9


def take_turns(shape: str, layers: int, length: int, names: Sequence[str], rounds: int) -> list[Finding]:
    """One row a contender: its times, turn by turn, and the peak of its process; and what the goals say of them."""
    # Long texts go one after the other, or the machine would have to hold every contender's tensors of all pairs.
    groups = [names] if length < ALONE else [[name] for name in names]
    found = [row for group in groups for row in _turns_of(shape, layers, length, group, rounds)]
    return [*found, *figures_of([row for row in found if "encoder" in row])]


def _turns_of(shape: str, layers: int, length: int, names: Sequence[str], rounds: int) -> list[Finding]:
    reasons = {name: missing(name, length) for name in names}
    runs = [Contender(name, shape, layers, length, torch.get_num_threads()) for name, why in reasons.items() if not why]
    told: dict[str, list[dict[str, float]]] = {run.name: [] for run in runs}
    try:
        for _ in range(rounds):
            for run in runs:
                if reasons[run.name] is None:
                    try:
                        told[run.name].append(run.turn())
                    except RuntimeError as died:
                        reasons[run.name] = str(died)
    finally:
        for run in runs:
            run.end()
    return [
        {"not_run": f"{name}, {shape}, {length:,} tokens", "why": why}
        if why
        else {
            "encoder": name,
            "shape": shape,
            "layers": layers,
            "length": length,
            "times": [turn["seconds"] for turn in told[name]],
            "peak": max(turn["peak_gb"] for turn in told[name]),
        }
        for name, why in reasons.items()
    ]


def figures_of(rows: list[Finding]) -> list[Finding]:
    """What these rows say of the goals."""
    times = {row["encoder"]: row["times"] for row in rows}
    peaks = {row["encoder"]: row["peak"] for row in rows}
    if OURS not in times:
        return []
    shape, layers, length = rows[0]["shape"], rows[0]["layers"], rows[0]["length"]
    at, found = f"{shape}, {layers} layers, {length:,} tokens", []
    goals = {512: {DENSE: 1.0, SDPA: 1.0}, 8192: {DENSE: 3.0, SDPA: 3.0, ONNX: 1.5}} if shape == "JinaBERT" else {}
    for name, goal in goals.get(length, {}).items():
        if name in times:
            found.append(ratio_figure(f"{name}'s time over ours, {at}", times[name], times[OURS], ">=", goal))
    if PRODUCTS in times:
        name = f"our time over that of the linear layers' products, {at}"
        found.append(ratio_figure(name, times[OURS], times[PRODUCTS], "<=", 1.3))
        found.append(figure(f"GB of the process, {at}", peaks[OURS], "<", 0.7))
    if length == 26421 and layers == MOST_LAYERS:
        found.append(figure(f"GB of the process, {at}", peaks[OURS], "<", 2.0))
    return found


def plan(options: argparse.Namespace, _: Record) -> list[Measurement]:
    rounds = 3 if options.quick else 5
    everyone: tuple[str, ...] = (OURS, DENSE, SDPA, ONNX)

    def of(shape: str, layers: int, length: int, names: Sequence[str], turns: int) -> Measurement:
        make: Callable[[], list[Finding]] = partial(take_turns, shape, layers, length, names, turns)
        return Measurement(f"{shape}, {layers} layers, {length:,} tokens", layers * length * turns / 1e4, make)

    made = [
        of("JinaBERT", options.layers, length, everyone, rounds if length < ALONE else 2) for length in options.lengths
    ]
    made.append(of("DNABERT-2", 1, 4096, (OURS, DENSE, PRODUCTS), rounds))
    if not options.quick and options.layers != MOST_LAYERS:
        made.append(of("JinaBERT", MOST_LAYERS, 26421, (OURS,), 1))
    return made


def gist(findings: list[Finding]) -> str:
    told = [f"{row['encoder']} {min(row['times']):.2f} s, {row['peak']:.2f} GB" for row in findings if "encoder" in row]
    told += [f"{found['figure']}: {figure_text(found)}" for found in findings if "figure" in found]
    return "; ".join(told + [f"no {found['not_run']}: {found['why']}" for found in findings if "not_run" in found])


def show(record: Record) -> str:
    """Everything that was found, as tables."""
    rows = record.having("encoder")
    kinds = {f"{row['shape']}, {row['layers']} layers": None for row in rows}
    blocks: list[str] = []
    for kind in kinds:
        own = [row for row in rows if kind == f"{row['shape']}, {row['layers']} layers"]

        def cells(text: Callable[[Any], str], own: list[Finding] = own) -> dict[tuple[str, int | str], str]:
            return {(row["encoder"], row["length"]): text(row) for row in own}

        blocks.append(text_table(f"{kind}: seconds", cells(lambda row: f"{min(row['times']):.2f}")))
        blocks.append(text_table("tokens a second", cells(lambda row: f"{row['length'] / min(row['times']):,.0f}")))
        blocks.append(text_table("GB of the process at most", cells(lambda row: f"{row['peak']:.2f}")))
    blocks.append("\n".join(f"not run: {found['not_run']}: {found['why']}" for found in record.having("not_run")))
    return "\n\n".join(block for block in [*blocks, figures_table(record)] if block)


def main() -> None:
    told = parser(__doc__, "encoders.json")
    told.add_argument("--lengths", type=int, nargs="+", help="tokens of one text; default 512 to 65,536")
    told.add_argument("--layers", type=int, help="of JinaBERT; default 12, with --quick 2")
    options = told.parse_args()
    options.lengths = options.lengths or LENGTHS[options.quick]
    options.layers = options.layers or (2 if options.quick else MOST_LAYERS)
    record = carry_out("encoders", partial(plan, options), options, gist)
    text = show(record)
    print(text)
    write_text(options.output.with_suffix(".txt"), text + "\n")


if __name__ == "__main__":
    main()
